"""Nodes without a kubelet: accelerators in numbers, and pods that run as soon as they are bound and end when told.

What a kubelet asks of the API server is asked of it here too: a watch, a status for each pod, a token for each pod
(TokenRequest, bound to the pod), and the end of a deletion. No image is pulled and no process started.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from pipetransformer_contract.api.requests import MERGE_PATCH, Object
from pipetransformer_contract.wire import TOKEN_AUDIENCE
from pipetransformer_operator.kube.client.api import NotFound
from tests.testkit.cluster.api_server import ApiServer

GPU = "nvidia.com/gpu"
GPUS_PER_NODE = 8
PARALLEL = 32
TOKEN_SECONDS = 3600


class FakeNodes:
    """`run` keeps the pods of all fake nodes.

    Args:
        api: of the cluster.
        started: called with a pod that runs, and its token.
        stopped: called with the UID of a pod that is told to end; its end follows at once.
    """

    def __init__(self, api: ApiServer, started: Callable[[Object, str], None], stopped: Callable[[str], None]) -> None:
        self._api = api
        self._started = started
        self._stopped = stopped
        self._slots = asyncio.Semaphore(PARALLEL)
        self._running: set[str] = set()
        self._ending: set[str] = set()
        self._addresses = 0

    async def create(self, count: int) -> None:
        """Makes the nodes."""

        async def one(index: int) -> None:
            name, now = f"fake-{index}", _now()
            labels = {"kubernetes.io/hostname": name, "topology.kubernetes.io/zone": f"zone-{index % 4}"}
            resources = {"cpu": "64", "memory": "512Gi", "pods": "110", GPU: str(GPUS_PER_NODE)}
            ready = {"type": "Ready", "status": "True", "reason": "Fake", "lastTransitionTime": now}
            status = {"capacity": resources, "allocatable": resources, "conditions": [ready]}
            async with self._slots:
                await self._api.send("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
                await self._patch_status(f"/api/v1/nodes/{name}", status)
                # Admission taints a new node until a controller finds it ready, and that controller does not run here.
                await self._api.send(
                    "PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}}, content_type=MERGE_PATCH
                )

        await asyncio.gather(*(one(index) for index in range(count)))

    async def run(self) -> None:
        """Starts pods that are bound and ends those that are deleted, until cancelled."""
        listed = await self._api.send("GET", "/api/v1/pods?limit=1")
        bound = {"fieldSelector": "spec.nodeName!="}
        async with asyncio.TaskGroup() as tasks:
            async for event in self._api.events("/api/v1/pods", listed["metadata"]["resourceVersion"], bound):
                pod = event["object"]
                uid = pod["metadata"]["uid"]
                if event["type"] == "DELETED":
                    continue
                if "deletionTimestamp" in pod["metadata"]:
                    if uid not in self._ending:
                        self._ending.add(uid)
                        self._stopped(uid)
                        tasks.create_task(self._end(pod))
                elif uid not in self._running:
                    self._running.add(uid)
                    tasks.create_task(self._start(pod))

    async def exited(self, namespace: str, name: str) -> None:
        """The trainer of a pod has ended with 0."""
        ended = {"terminated": {"exitCode": 0, "finishedAt": _now()}}
        status = {"phase": "Succeeded", "containerStatuses": [_container("trainer", ended, ready=False)]}
        async with self._slots:
            with contextlib.suppress(NotFound):
                await self._patch_status(f"/api/v1/namespaces/{namespace}/pods/{name}", status)

    async def _start(self, pod: Object) -> None:
        metadata, now = pod["metadata"], _now()
        self._addresses += 1
        high, low = divmod(self._addresses, 256)
        status = {
            "phase": "Running",
            "podIP": f"10.{100 + high // 256}.{high % 256}.{low}",
            "startTime": now,
            "conditions": [
                {"type": "PodScheduled", "status": "True", "lastTransitionTime": now},
                {"type": "Ready", "status": "True", "lastTransitionTime": now},
            ],
            "containerStatuses": [
                _container(one["name"], {"running": {"startedAt": now}}, ready=True)
                for one in pod["spec"]["containers"]
            ],
        }
        core = f"/api/v1/namespaces/{metadata['namespace']}"
        bound = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
        request = {"audiences": [TOKEN_AUDIENCE], "expirationSeconds": TOKEN_SECONDS, "boundObjectRef": bound}
        async with self._slots:
            answer = await self._api.send("POST", f"{core}/serviceaccounts/default/token", {"spec": request})
            running = await self._patch_status(f"{core}/pods/{metadata['name']}", status)
        self._started(running, answer["status"]["token"])

    async def _end(self, pod: Object) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
        async with self._slots:
            with contextlib.suppress(NotFound):  # a pod whose containers have ended goes at once
                await self._api.send("DELETE", path, body)

    async def _patch_status(self, path: str, status: Mapping[str, Any]) -> Object:
        return await self._api.send("PATCH", f"{path}/status", {"status": dict(status)}, content_type=MERGE_PATCH)


def _container(name: str, state: Object, *, ready: bool) -> Object:
    return {"name": name, "ready": ready, "restartCount": 0, "image": "", "imageID": "", "state": state}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
