"""Workers' pods as the API server shows them: a list, then each change, as long as this operator leads.

kopf would need a task, a queue and a context for each pod, which was a quarter of the operator's time when thousands
start. Changes are taken in order; after an outage a new list finds what was missed.
"""

import asyncio
from collections.abc import Iterable

from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.controller.ports import JobKey
from pipetransformer_operator.kube.capacity.free_accelerators import FreeAccelerators
from pipetransformer_operator.kube.client.api import Api
from pipetransformer_operator.kube.events import ClusterListener
from pipetransformer_operator.kube.workers.pods import holds_accelerators, observable

from .follow import Reported, follow

_QUERY = {"labelSelector": JOB_LABEL}


class PodWatch:
    """Watches workers' pods, and keeps what the operator uses of them, by job.

    Args:
        api: client of the API server.
        namespaces: names of the namespaces to watch; all when empty.
        events: is told which pods change and go, what they release, and how the watches do.
        free: is told of each pod; None if nodes are not watched.
    """

    def __init__(
        self, api: Api, namespaces: Iterable[str], events: ClusterListener, free: FreeAccelerators | None = None
    ) -> None:
        self._api = api
        self._unlisted = set(namespaces or [""])
        self._namespaces = tuple(self._unlisted)
        self._events = events
        self._free = free
        self._seen: dict[JobKey, dict[str, Object]] = {}
        self._versions: dict[str, int] = {}
        self._keys: dict[str, JobKey] = {}

    def of(self, key: JobKey) -> Iterable[Object]:
        """Pods with the job's label, reduced to what is used; see `observable`."""
        return self._seen.get(key, {}).values()

    def listed_version(self, namespace: str) -> int:
        """Resource version of the newest list of the namespace's pods; 0 before the first."""
        return self._versions.get(namespace, self._versions.get("", 0))

    def knows(self, namespace: str) -> bool:
        """Whether the namespace's pods were listed. Before that its jobs seem to have none."""
        return not self._unlisted & {"", namespace}

    @property
    def listed(self) -> bool:
        """Whether the pods of all namespaces were listed."""
        return self.knows("")

    async def run(self) -> None:
        """Watches until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for namespace in self._namespaces:
                tasks.create_task(self._follow(namespace))

    async def _follow(self, namespace: str) -> None:
        async for pod, deleted in follow(self._api, _PodsOf(namespace, self, self._events)):
            if deleted:
                self._drop(pod["metadata"]["uid"])
            else:
                self._note(pod)

    async def list(self, namespace: str, path: str) -> str:
        """Lists the namespace's pods, drops those that are gone, and returns the list's resourceVersion."""
        there: set[str] = set()
        version = ""
        async for part in self._api.list(path, _QUERY):
            version = part["metadata"]["resourceVersion"]
            for pod in part["items"]:
                there.add(pod["metadata"]["uid"])
                self._note(pod)
        for uid, key in list(self._keys.items()):
            if uid not in there and namespace in ("", key.namespace):
                self._drop(uid)
        self._versions[namespace] = int(version)
        if namespace in self._unlisted:
            self._unlisted.remove(namespace)
            self._events.on_pods_listed(namespace)
        return version

    def _note(self, pod: Object) -> None:
        metadata = pod["metadata"]
        uid, key = metadata["uid"], JobKey(metadata["namespace"], metadata["labels"][JOB_LABEL])
        if self._keys.get(uid, key) != key:  # its label was changed
            self._drop(uid)
        of_job = self._seen.setdefault(key, {})
        if uid in of_job and of_job[uid]["metadata"]["resourceVersion"] == metadata["resourceVersion"]:
            return
        self._keys[uid] = key
        before, after = of_job.get(uid), observable(pod)
        of_job[uid] = after
        if self._free is not None:
            self._free.note_pod(pod)
        self._events.on_pod_changed(key)
        if holds_accelerators(before) and not holds_accelerators(after):
            self._events.on_accelerators_released(key)

    def _drop(self, uid: str) -> None:
        key = self._keys.pop(uid, None)
        if key is None:
            return
        of_job = self._seen[key]
        before = of_job.pop(uid)
        if not of_job:
            del self._seen[key]
        if self._free is not None:
            self._free.drop_pod(uid)
        self._events.on_pod_gone(key, uid)
        if holds_accelerators(before):
            self._events.on_accelerators_released(key)


class _PodsOf(Reported):
    """Workers' pods of one namespace; of all when it is empty."""

    def __init__(self, namespace: str, pods: PodWatch, events: ClusterListener) -> None:
        super().__init__(f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods", events, _QUERY)
        self._namespace = namespace
        self._pods = pods

    async def relist(self) -> str:
        """See `Followed`."""
        return await self._pods.list(self._namespace, self.path)
