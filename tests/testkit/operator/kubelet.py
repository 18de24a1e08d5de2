"""What a kubelet gives to a worker: for tests in which something else starts the workers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pipetransformer_contract.api.requests import Object
from pipetransformer_contract.wire import Env
from pipetransformer_operator.kube.trust.authority import CA_CONFIG_MAP, CA_FILE


class Requests(Protocol):
    """The operator's `Api`, or one that asks again."""

    async def get(self, path: str) -> Object: ...

    async def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Object: ...


async def token(api: Requests, pod: Object) -> str:
    """A token as the projected volume of the pod's channel would hold it."""
    volumes = pod["spec"]["volumes"]
    projected = next(volume["projected"] for volume in volumes if volume["name"] == "pipetransformer-channel")
    source = projected["sources"][0]["serviceAccountToken"]
    metadata = pod["metadata"]
    request = {
        "spec": {
            "audiences": [source["audience"]],
            "expirationSeconds": source["expirationSeconds"],
            "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]},
        }
    }
    answer = await api.request("POST", f"{_core(pod)}/serviceaccounts/default/token", request)
    return str(answer["status"]["token"])


async def environment(api: Requests, pod: Object, folder: Path, *, address: str, node: str) -> dict[str, str]:
    """The environment of the pod's first container, with what it mounts as files of `folder`."""
    (folder / "token").write_text(await token(api, pod))
    authority = (await api.get(f"{_core(pod)}/configmaps/{CA_CONFIG_MAP}"))["data"][CA_FILE]
    (folder / CA_FILE).write_text(authority)
    fields = {"metadata.uid": pod["metadata"]["uid"], "status.podIP": address, "spec.nodeName": node}
    return {
        entry["name"]: without_escapes(entry.get("value", "")) or fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in pod["spec"]["containers"][0]["env"]
    } | {
        Env.CHANNEL_TOKEN_FILE: str(folder / "token"),
        Env.CHANNEL_CA_FILE: str(folder / CA_FILE),
        Env.TERMINATION_LOG: str(folder / "termination-log"),
    }


def without_escapes(value: str) -> str:
    """A variable's value as the container gets it; it refers to no other."""
    assert "$(" not in value.replace("$$", ""), f"{value} refers to another variable"
    return value.replace("$$", "$")


def _core(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}"
