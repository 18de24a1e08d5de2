"""Workloads of our jobs, as last seen. Kueue's outages are frequent and silent, so nothing waits for this watch.

Until each namespace was listed once nothing is known; from then on what was seen last is what is known. While Kueue is
away its API answers with errors, and an open watch says nothing: it is opened anew often, each time with a list.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import quote

from ..controller.ports import Conflict, JobKey, Unavailable
from ..kube.api import Api, NotFound, Object
from ..plan.accounting import JOB_LABEL
from .workload import API

logger = logging.getLogger(__name__)
#: Of each request: a Kueue that hangs must not hold anything else up.
TIMEOUT_SECONDS = 5.0
WATCH_SECONDS = 60
FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 10.0


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

    @property
    def problem(self) -> str:
        """Why nothing is known; empty from the first complete lists on."""
        return next(filter(None, self._problems.values()), "")

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
        path = f"/apis/{API}{where}/workloads?labelSelector={quote(JOB_LABEL)}"
        retry = FIRST_RETRY_SECONDS
        while True:
            try:
                version = await self._list(namespace, path)
                retry = FIRST_RETRY_SECONDS
                async for event in self._api.watch(path, version, WATCH_SECONDS):
                    (self.drop if event["type"] == "DELETED" else self.note)(event["object"])
            except (Conflict, NotFound, Unavailable) as error:
                logger.warning("Kueue cannot be watched now: %s; again in %g s", error, retry)
                if self._problems[namespace]:
                    self._problems[namespace] = f"Kueue does not answer: {error}"
                    self._changed(None)
                await asyncio.sleep(retry)
                retry = min(2 * retry, LONGEST_RETRY_SECONDS)

    async def _list(self, namespace: str, path: str) -> str:
        listed = await self._api.get(path, timeout=TIMEOUT_SECONDS)
        there = {item["metadata"]["uid"]: item for item in listed["items"]}
        known = [seen for _, seen in self.all() if namespace in ("", seen["metadata"]["namespace"])]
        for workload in known:
            old = int(workload["metadata"]["resourceVersion"]) <= int(listed["metadata"]["resourceVersion"])
            if workload["metadata"]["uid"] not in there and old:
                self.drop(workload)
        for workload in there.values():
            self.note(workload)
        self._gone.clear()
        if self._problems[namespace]:
            self._problems[namespace] = ""
            self._changed(None)
        version: str = listed["metadata"]["resourceVersion"]
        return version


def _key(workload: Object) -> JobKey:
    metadata = workload["metadata"]
    return JobKey(metadata["namespace"], metadata["labels"][JOB_LABEL])


def _version(workload: Object) -> int:
    return int(workload["metadata"]["resourceVersion"])
