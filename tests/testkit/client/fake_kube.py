"""A cluster in memory: objects and texts by path, and commands in containers."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from pipetransformer_client.errors import AlreadyExists, NotFound, Unavailable
from pipetransformer_client.kube import Kube, Query
from pipetransformer_contract.api.requests import Object
from tests.testkit.operator.builders import JobBuilder

JOBS = "/apis/training.pipetransformer.io/v1alpha1/namespaces/default/pipetrainingjobs"
PODS = "/api/v1/namespaces/default/pods"


class FakeKube:
    """Replaces `Kube` in tests.

    Attributes:
        objects: answers of GET by path.
        texts: lines of streams by path. Each call takes the next list, or repeats the last one. An empty list of lists
            is an outage.
        requests: (method, path, body) of each request except GET.
        streams: queries of all streams.
        outage: number of further GETs that fail.
        containers: makes the output of a command from (pod, container, command).
    """

    def __init__(self) -> None:
        self.namespace = "default"
        self.objects: dict[str, Object] = {}
        self.texts: dict[str, list[list[str]]] = {}
        self.requests: list[tuple[str, str, Any]] = []
        self.streams: list[Query] = []
        self.outage = 0
        self.containers: Callable[[str, str, Sequence[str]], Iterator[bytes]] = lambda *_: iter(())

    @property
    def kube(self) -> Kube:
        """This cluster with the type that the client expects."""
        return cast("Kube", self)

    def get(self, path: str, **query: str | int) -> Object:
        """See `Kube`. A field selector names one object."""
        if self.outage:
            self.outage -= 1
            raise Unavailable(path)
        if "fieldSelector" in query and path not in self.objects:
            name = str(query["fieldSelector"]).removeprefix("metadata.name=")
            items = [self.objects[f"{path}/{name}"]] if f"{path}/{name}" in self.objects else []
            return {"metadata": {"resourceVersion": "1000"}, "items": items}
        try:
            return cast("Object", json.loads(json.dumps(self.objects[path])))
        except KeyError:
            raise NotFound(path) from None

    def request(self, method: str, path: str, body: Object | None = None, *, query: Query | None = None) -> Object:
        """See `Kube`."""
        self.requests.append((method, path, body))
        if method == "POST" and body is not None:
            if f"{path}/{body['metadata']['name']}" in self.objects:
                raise AlreadyExists(f"{body['metadata']['name']} already exists")
            made = {"uid": "job-uid", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
            created = {**body, "metadata": made | body["metadata"]}
            self.objects[f"{path}/{body['metadata']['name']}"] = {**created, "status": {"phase": "Running"}}
            return created
        if method == "PATCH" and body is not None:
            self.objects[path] = merged(self.get(path), body)
            return self.objects[path]
        return body or {}

    def lines(self, path: str, query: Query, *, silence: float = 0) -> Iterator[str]:
        """See `Kube`."""
        self.streams.append(query)
        found = self.texts.get(path)
        if found is None:
            raise NotFound(path)
        if not found:
            raise Unavailable(path)
        yield from found.pop(0) if len(found) > 1 else found[0]

    def execute(self, namespace: str, pod: str, container: str, command: Sequence[str]) -> Iterator[bytes]:
        """See `Kube`."""
        return self.containers(pod, container, command)


def merged(value: Any, patch: Any) -> Any:
    """Merges a patch as an API server does (RFC 7386)."""
    if not isinstance(patch, dict) or not isinstance(value, dict):
        return patch
    there = {key: merged(value.get(key), item) for key, item in patch.items() if item is not None}
    return {key: item for key, item in value.items() if key not in patch} | there


def stored(job: JobBuilder, version: int = 1, **status: Any) -> Object:
    """The job as an API server returns it."""
    manifest = job.manifest()
    manifest["metadata"] |= {"uid": "job-uid", "resourceVersion": str(version)}
    manifest["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    return {**manifest, "status": status}


def published(*names: str, generation: int = 1) -> Object:
    """A generation with these members in rank order."""
    return {
        "jobUid": "uid",
        "layoutGeneration": generation,
        "stages": 1,
        "pipelines": len(names),
        "members": [{"name": name, "uid": name, "address": "a:1"} for name in names],
        "leader": names[0],
        "nonce": "n",
        "reason": "Start",
    }


def finished(kind: str = "Complete") -> Object:
    """A condition that ends a job."""
    now = "2026-01-01T00:00:00Z"
    return {"type": kind, "status": "True", "reason": "Because", "message": "so it is", "lastTransitionTime": now}
