"""Jobs as kopf's watch shows them, and jobs whose deletion the watch missed.

After a long outage kopf starts its watch with a new list and does not say which jobs that list lacks. A job that was
deleted meanwhile would stay known here, so the known jobs are then compared with a list of names.
"""

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.controller.ports import JobKey
from pipetransformer_operator.kube.client.api import METADATA_ONLY, REQUEST_FAILED, Api
from pipetransformer_operator.kube.events import ClusterListener

from .follow import Awaited
from .pod_watch import PodWatch

logger = logging.getLogger(__name__)
RETRY_SECONDS = 10.0


class JobTrimmer(Protocol):
    """Decides how much of a job stays in memory."""

    def trimmed(self, key: JobKey, body: Mapping[str, Any]) -> Object:
        """The part of the job to keep: only its UID and its resourceVersion if the operator knows this version."""
        ...


class KnownJobs:
    """The jobs that their watch showed and that still exist.

    Args:
        api: client of the API server.
        trimmer: decides how much of a job to keep.
        events: is told which jobs change and which are gone.
    """

    def __init__(self, api: Api, trimmer: JobTrimmer, events: ClusterListener) -> None:
        self._api = api
        self._trimmer = trimmer
        self._events = events
        self._seen: dict[JobKey, dict[str, Object]] = {}
        self._doubted: set[str] = set()
        self._doubt = asyncio.Event()

    def of(self, key: JobKey) -> Object | None:
        """The job of that name. If the watch missed the end of an older job, the newer of the two."""
        return max(self._seen.get(key, {}).values(), key=_version, default=None)

    def keys(self, namespace: str = "") -> list[JobKey]:
        """All jobs, or those of the namespace."""
        return [key for key in self._seen if namespace in ("", key.namespace)]

    def note(self, job: Mapping[str, Any]) -> None:
        """The watch showed the job."""
        key, uid = _key(job), job["metadata"]["uid"]
        of_name = self._seen.setdefault(key, {})
        is_new = uid not in of_name
        of_name[uid] = self._trimmer.trimmed(key, job)
        if is_new or "spec" in of_name[uid]:  # a version without its spec is one that this operator wrote or has read
            self._events.on_job_changed(key)

    def drop(self, job: Mapping[str, Any]) -> None:
        """The object is gone; a newer job of its name may exist."""
        self._drop(_key(job), job["metadata"]["uid"])

    def _drop(self, key: JobKey, uid: str) -> None:
        of_name = self._seen.get(key, {})
        of_name.pop(uid, None)
        if of_name:
            self._events.on_job_changed(key)
        else:
            self._seen.pop(key, None)
            self._events.on_job_gone(key)

    def on_listed(self, path: str) -> None:
        """The watch starts with a list of this path: jobs that were known before may be gone."""
        if self._seen:
            self._doubted.add(path)
            self._doubt.set()

    async def run(self) -> None:
        """Looks for jobs that are gone, until it is cancelled."""
        while True:
            await self._doubt.wait()
            self._doubt.clear()
            doubted, self._doubted = self._doubted, set()
            for path in doubted:
                try:
                    await self._look(path)
                except REQUEST_FAILED as error:
                    logger.warning("cannot list jobs: %s; trying again in %g s", error, RETRY_SECONDS)
                    await asyncio.sleep(RETRY_SECONDS)
                    self.on_listed(path)

    async def _look(self, path: str) -> None:
        """Drops the jobs that a list lacks although the list is newer."""
        there: set[str] = set()
        version = 0
        async for part in self._api.list(path, accept=METADATA_ONLY):
            version = _version(part)
            there.update(job["metadata"]["uid"] for job in part["items"])
        namespace = re.search(r"/namespaces/([^/]+)/", path)
        for key in self.keys(namespace[1] if namespace else ""):
            for uid, job in list(self._seen[key].items()):
                if uid not in there and _version(job) <= version:
                    logger.warning("%s was deleted, but its watch did not show that", key)
                    self._drop(key, uid)


class ListedJobs:
    """The known jobs, but none of them until everything is listed that decisions about them need.

    Without its pods a job would seem to have no workers. Without nodes none would seem cordoned or lost, so a new
    operator would end the drain that the one before began. Without other owners' pods the room would be unknown.

    Args:
        jobs: all jobs, as their watch shows them.
        pods: the watch of workers' pods.
        others: other watches that must have listed their objects, unless the cluster refuses that.
    """

    def __init__(self, jobs: KnownJobs, pods: PodWatch, others: Sequence[Awaited]) -> None:
        self._jobs = jobs
        self._pods = pods
        self._others = others

    def of(self, key: JobKey) -> Object | None:
        """The job as the watch last showed it, or None."""
        listed = self._pods.knows(key.namespace) and all(one.answered for one in self._others)
        return self._jobs.of(key) if listed else None


def _key(job: Mapping[str, Any]) -> JobKey:
    return JobKey(job["metadata"]["namespace"], job["metadata"]["name"])


def _version(job: Object) -> int:
    return int(job["metadata"]["resourceVersion"])
