"""Workloads of our jobs, as last seen. Kueue's outages are frequent and silent, so nothing waits for this watch.

Until the first list of a namespace nothing is known of it. While Kueue is away its API answers with errors, and an open
watch is silent. So the watch is opened often, each time after a list, and what was last seen stays known.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.controller.ports import JobKey
from pipetransformer_operator.kube.client.api import Api
from pipetransformer_operator.kube.events import ClusterListener
from pipetransformer_operator.kube.watches.follow import Followed, follow

from .workload import API

#: Timeout of each request, so that a Kueue that hangs delays nothing else.
TIMEOUT_SECONDS = 5.0
WATCH_SECONDS = 60
QUERY = {"labelSelector": JOB_LABEL}


class Workloads:
    """Watches the Workloads of our jobs, and remembers what it last saw of them.

    Args:
        api: client of the API server.
        namespaces: names of the namespaces to watch; all when empty.
        events: is told whose Workload changed.
    """

    def __init__(self, api: Api, namespaces: Iterable[str], events: ClusterListener) -> None:
        self._api = api
        self._problems = dict.fromkeys(namespaces or [""], "Kueue was not asked yet")
        self._answered: dict[str, bool] = {}
        self._events = events
        self._seen: dict[JobKey, dict[str, Object]] = {}
        self._gone: set[str] = set()

    def problem(self, namespace: str) -> str:
        """Why nothing is known of the namespace; empty once it was listed completely."""
        return self._problems[namespace if namespace in self._problems else ""]

    @property
    def answers(self) -> bool | None:
        """Whether the newest attempt to list or watch succeeded in each namespace; None before the first."""
        return all(self._answered.values()) if self._answered else None

    def of(self, key: JobKey) -> Mapping[str, Object]:
        """Workloads with the job's label, by name."""
        return self._seen.get(key, {})

    def all(self) -> Sequence[tuple[JobKey, Object]]:
        """All Workloads, each with the job that its label names."""
        return [(key, workload) for key, of_job in self._seen.items() for workload in of_job.values()]

    def note(self, workload: Object) -> None:
        """Takes a Workload, unless a newer version was seen or the object is gone."""
        key, name = _key(workload), workload["metadata"]["name"]
        if workload["metadata"]["uid"] in self._gone:
            return
        before = self._seen.setdefault(key, {}).get(name)
        if before is None or _version(workload) > _version(before):
            self._seen[key][name] = workload
            self._events.on_quota_changed(key)

    def drop(self, workload: Object) -> None:
        """The object is gone."""
        key, name, uid = _key(workload), workload["metadata"]["name"], workload["metadata"]["uid"]
        self._gone.add(uid)
        of_job = self._seen.get(key, {})
        if name in of_job and of_job[name]["metadata"]["uid"] == uid:
            del of_job[name]
            if not of_job:
                del self._seen[key]
        self._events.on_quota_changed(key)

    async def run(self) -> None:
        """Watches until it is cancelled."""
        await asyncio.gather(*(self._follow(namespace) for namespace in self._problems))

    async def _follow(self, namespace: str) -> None:
        followed = _WorkloadsOf(namespace, self)
        async for workload, deleted in follow(self._api, followed, watch_seconds=WATCH_SECONDS, relists_always=True):
            (self.drop if deleted else self.note)(workload)

    def on_failed(self, namespace: str, error: Exception) -> None:
        """The namespace's Workloads could not be listed or watched."""
        self._answered[namespace] = False
        if self._problems[namespace]:
            self._problems[namespace] = f"Kueue does not answer: {error}"
            self._events.on_quota_changed(None)

    async def list(self, namespace: str, path: str) -> str:
        """Lists the namespace's Workloads, drops those that are gone, and returns the list's resourceVersion."""
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
        self._answered[namespace] = True
        if self._problems[namespace]:
            self._problems[namespace] = ""
            self._events.on_quota_changed(None)
        return version


class _WorkloadsOf(Followed):
    """Workloads of one namespace; of all when it is empty."""

    def __init__(self, namespace: str, workloads: Workloads) -> None:
        where = f"/namespaces/{namespace}" if namespace else ""
        super().__init__(f"/apis/{API}{where}/workloads", QUERY)
        self._namespace = namespace
        self._workloads = workloads

    async def relist(self) -> str:
        """See `Followed`."""
        return await self._workloads.list(self._namespace, self.path)

    def on_failed(self, error: Exception) -> None:
        """See `Followed`."""
        self._workloads.on_failed(self._namespace, error)


def _key(workload: Object) -> JobKey:
    metadata = workload["metadata"]
    return JobKey(metadata["namespace"], metadata["labels"][JOB_LABEL])


def _version(workload: Object) -> int:
    return int(workload["metadata"]["resourceVersion"])
