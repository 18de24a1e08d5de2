"""Workers' pods as the API server shows them: a list, then each change, for as long as the operator leads.

kopf would do it with a task, a queue and a context for each pod, which was a quarter of the operator's time where
thousands start. Changes are taken in their order; after an outage what went unseen is found by a new list.
"""

import asyncio
from collections.abc import Callable, Iterable

from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_operator.controller.ports import JobKey, Refused
from pipetransformer_operator.kube.capacity.free_accelerators import FreeAccelerators
from pipetransformer_operator.kube.client.api import Api, NotFound, Object
from pipetransformer_operator.kube.workers.pods import holds_accelerators, observable

from .follow import follow

_QUERY = {"labelSelector": JOB_LABEL}


class PodWatch:
    """See the module.

    Args:
        api: of the cluster.
        namespaces: to watch; all when empty.
        changed: called with the job whose pod changed.
        gone: called with the job and the UID of a pod that is no more.
        released: called with the job whose pod has ended or is gone, and with it gave back what it had of its node.
        listed: called with each namespace, empty for all, once its pods are known.
        opened: called with the path of each watch that the server opens.
        refused: called with the path of each that it refuses, as where a namespace and the right to see it are gone.
        free: is told of each pod; None where nodes are not watched.
    """

    def __init__(
        self,
        api: Api,
        namespaces: Iterable[str],
        changed: Callable[[JobKey], None],
        gone: Callable[[JobKey, str], None],
        released: Callable[[JobKey], None],
        listed: Callable[[str], None],
        opened: Callable[[str], None],
        refused: Callable[[str], None],
        free: FreeAccelerators | None = None,
    ) -> None:
        self._api = api
        self._unlisted = set(namespaces or [""])
        self._namespaces = tuple(self._unlisted)
        self._changed = changed
        self._gone = gone
        self._released = released
        self._when_listed = listed
        self._opened = opened
        self._refused = refused
        self._free = free
        self._seen: dict[JobKey, dict[str, Object]] = {}
        self._keys: dict[str, JobKey] = {}

    def of(self, key: JobKey) -> Iterable[Object]:
        """Pods with the job's label, as far as anything is ever looked at; see `observable`."""
        return self._seen.get(key, {}).values()

    def knows(self, namespace: str) -> bool:
        """Whether the namespace's pods were listed: before, a job of it seems to have none."""
        return not self._unlisted & {"", namespace}

    async def run(self) -> None:
        """Watches for ever."""
        async with asyncio.TaskGroup() as tasks:
            for namespace in self._namespaces:
                tasks.create_task(self._follow(namespace))

    async def _follow(self, namespace: str) -> None:
        path = f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"

        def failed(error: Exception) -> None:
            if isinstance(error, NotFound | Refused):
                self._refused(path)

        changes = follow(
            self._api,
            path,
            _QUERY,
            relist=lambda: self._list(namespace, path),
            opened=lambda: self._opened(path),
            failed=failed,
        )
        async for pod, deleted in changes:
            if deleted:
                self._drop(pod["metadata"]["uid"])
            else:
                self._note(pod)

    async def _list(self, namespace: str, path: str) -> str:
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
        if namespace in self._unlisted:
            self._unlisted.remove(namespace)
            self._when_listed(namespace)
        return version

    def _note(self, pod: Object) -> None:
        metadata = pod["metadata"]
        uid, key = metadata["uid"], JobKey(metadata["namespace"], metadata["labels"][JOB_LABEL])
        if self._keys.get(uid, key) != key:  # somebody changed its label
            self._drop(uid)
        of_job = self._seen.setdefault(key, {})
        if uid in of_job and of_job[uid]["metadata"]["resourceVersion"] == metadata["resourceVersion"]:
            return
        self._keys[uid] = key
        before, after = of_job.get(uid), observable(pod)
        of_job[uid] = after
        if self._free is not None:
            self._free.note_pod(pod)
        self._changed(key)
        if holds_accelerators(before) and not holds_accelerators(after):
            self._released(key)

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
        self._gone(key, uid)
        if holds_accelerators(before):
            self._released(key)
