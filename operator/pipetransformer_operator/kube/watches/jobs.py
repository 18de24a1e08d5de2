"""Jobs as kopf's watch shows them, and an end to those that went unseen.

After a longer outage kopf begins its watch anew with a list, and says nothing of what that list lacks: a job that was
deleted meanwhile would live on here. So what is known is compared with a list of names then.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from pipetransformer_operator.controller.ports import Conflict, JobKey, Unavailable
from pipetransformer_operator.kube.client.api import METADATA_ONLY, Api, NotFound, Object

logger = logging.getLogger(__name__)
RETRY_SECONDS = 10.0


class KnownJobs:
    """See the module.

    Args:
        api: of the cluster.
        kept: what is to be kept of a job; its UID and its version at least.
        changed: called with the job of which something new is known.
        gone: called with the job of whose name there is none any more.
    """

    def __init__(
        self,
        api: Api,
        kept: Callable[[JobKey, Mapping[str, Any]], Object],
        changed: Callable[[JobKey], None],
        gone: Callable[[JobKey], None],
    ) -> None:
        self._api = api
        self._kept = kept
        self._changed = changed
        self._gone = gone
        self._seen: dict[JobKey, dict[str, Object]] = {}
        self._doubted: set[str] = set()
        self._doubt = asyncio.Event()

    def of(self, key: JobKey) -> Object | None:
        """The job of that name; the newer one where the end of an older one went unseen."""
        return max(self._seen.get(key, {}).values(), key=_version, default=None)

    def keys(self, namespace: str = "") -> list[JobKey]:
        """All jobs, or those of the namespace."""
        return [key for key in self._seen if namespace in ("", key.namespace)]

    def note(self, job: Mapping[str, Any]) -> None:
        """The watch showed the job."""
        key = _key(job)
        self._seen.setdefault(key, {})[job["metadata"]["uid"]] = self._kept(key, job)
        self._changed(key)

    def drop(self, job: Mapping[str, Any]) -> None:
        """The object is gone; a newer one of its name may be there."""
        self._drop(_key(job), job["metadata"]["uid"])

    def _drop(self, key: JobKey, uid: str) -> None:
        of_name = self._seen.get(key, {})
        of_name.pop(uid, None)
        if of_name:
            self._changed(key)
        else:
            self._seen.pop(key, None)
            self._gone(key)

    def listed(self, path: str) -> None:
        """The watch begins with a list of this path: of what is known from before, some may be gone."""
        if self._seen:
            self._doubted.add(path)
            self._doubt.set()

    async def run(self) -> None:
        """Looks for ever for jobs that are gone."""
        while True:
            await self._doubt.wait()
            self._doubt.clear()
            doubted, self._doubted = self._doubted, set()
            for path in doubted:
                try:
                    await self._look(path)
                except (Conflict, NotFound, Unavailable) as error:
                    logger.warning("jobs cannot be listed now: %s; again in %g s", error, RETRY_SECONDS)
                    await asyncio.sleep(RETRY_SECONDS)
                    self.listed(path)

    async def _look(self, path: str) -> None:
        """Drops what a list lacks although it is newer."""
        there: set[str] = set()
        version = 0
        async for part in self._api.list(path, accept=METADATA_ONLY):
            version = _version(part)
            there.update(job["metadata"]["uid"] for job in part["items"])
        namespace = re.search(r"/namespaces/([^/]+)/", path)
        for key in self.keys(namespace[1] if namespace else ""):
            for uid, job in list(self._seen[key].items()):
                if uid not in there and _version(job) <= version:
                    logger.warning("%s is gone, and its watch did not say so", key)
                    self._drop(key, uid)


def _key(job: Mapping[str, Any]) -> JobKey:
    return JobKey(job["metadata"]["namespace"], job["metadata"]["name"])


def _version(job: Object) -> int:
    return int(job["metadata"]["resourceVersion"])
