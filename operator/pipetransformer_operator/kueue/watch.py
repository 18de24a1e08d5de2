"""Workloads of our jobs, as last seen. Kueue's outages are frequent and silent, so nothing waits for this watch.

Until a namespace was listed once nothing is known of it; from then on what was seen last is what is known. While Kueue
is away its API answers with errors, and an open watch says nothing: it is opened anew often, each time with a list.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping

from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_operator.controller.ports import JobKey
from pipetransformer_operator.kube.client.api import Api, Object
from pipetransformer_operator.kube.watches.follow import follow

from .workload import API

#: Of each request: a Kueue that hangs must not hold anything else up.
TIMEOUT_SECONDS = 5.0
WATCH_SECONDS = 60
QUERY = {"labelSelector": JOB_LABEL}


class Workloads:
    """See the module.

    Args:
        api: of the cluster.
        namespaces: to watch; all when empty.
        changed: called with the job whose Workload changed, with None where it may be any.
    """

    def __init__(self, api: Api, namespaces: Iterable[str], changed: Callable[[JobKey | None], None]) -> None:
        self._api = api
        self._problems = dict.fromkeys(namespaces or [""], "Kueue was not asked yet")
        self._changed = changed
        self._seen: dict[JobKey, dict[str, Object]] = {}
        self._gone: set[str] = set()

    def problem(self, namespace: str) -> str:
        """Why nothing is known of the namespace; empty from its first complete list on."""
        return self._problems[namespace if namespace in self._problems else ""]

    def of(self, key: JobKey) -> Mapping[str, Object]:
        """Workloads with the job's label, by name."""
        return self._seen.get(key, {})

    def all(self) -> list[tuple[JobKey, Object]]:
        """Each with the job that its label names."""
        return [(key, workload) for key, of_job in self._seen.items() for workload in of_job.values()]

    def note(self, workload: Object) -> None:
        """This is newer than what was seen before, unless that has a higher version, or the object is gone."""
        key, name = _key(workload), workload["metadata"]["name"]
        if workload["metadata"]["uid"] in self._gone:
            return
        before = self._seen.setdefault(key, {}).get(name)
        if before is None or _version(workload) > _version(before):
            self._seen[key][name] = workload
            self._changed(key)

    def drop(self, workload: Object) -> None:
        """The object is gone."""
        key, name, uid = _key(workload), workload["metadata"]["name"], workload["metadata"]["uid"]
        self._gone.add(uid)
        of_job = self._seen.get(key, {})
        if name in of_job and of_job[name]["metadata"]["uid"] == uid:
            del of_job[name]
            if not of_job:
                del self._seen[key]
        self._changed(key)

    async def run(self) -> None:
        """Watches for ever."""
        await asyncio.gather(*(self._follow(namespace) for namespace in self._problems))

    async def _follow(self, namespace: str) -> None:
        where = f"/namespaces/{namespace}" if namespace else ""
        path = f"/apis/{API}{where}/workloads"

        def failed(error: Exception) -> None:
            if self._problems[namespace]:
                self._problems[namespace] = f"Kueue does not answer: {error}"
                self._changed(None)

        changes = follow(
            self._api,
            path,
            QUERY,
            relist=lambda: self._list(namespace, path),
            watch_seconds=WATCH_SECONDS,
            relists_always=True,
            failed=failed,
        )
        async for workload, deleted in changes:
            (self.drop if deleted else self.note)(workload)

    async def _list(self, namespace: str, path: str) -> str:
        there: dict[str, Object] = {}
        version = ""
        async for part in self._api.list(path, QUERY, timeout=TIMEOUT_SECONDS):
            version = part["metadata"]["resourceVersion"]
            there |= {item["metadata"]["uid"]: item for item in part["items"]}
        for _, known in self.all():
            mine = namespace in ("", known["metadata"]["namespace"])
            if mine and known["metadata"]["uid"] not in there and _version(known) <= int(version):
                self.drop(known)
        for workload in there.values():
            self.note(workload)
        self._gone.clear()
        if self._problems[namespace]:
            self._problems[namespace] = ""
            self._changed(None)
        return version


def _key(workload: Object) -> JobKey:
    metadata = workload["metadata"]
    return JobKey(metadata["namespace"], metadata["labels"][JOB_LABEL])


def _version(workload: Object) -> int:
    return int(workload["metadata"]["resourceVersion"])
