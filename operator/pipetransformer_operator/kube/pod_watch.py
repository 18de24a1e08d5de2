"""Workers' pods as the API server shows them: a list, then each change, for as long as the operator leads.

kopf would do it with a task, a queue and a context for each pod, which was a quarter of the operator's time where
thousands start. Changes are taken in their order; after an outage what went unseen is found by a new list.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from urllib.parse import urlencode

from ..controller.ports import Conflict, JobKey, Refused, Unavailable
from ..plan.accounting import JOB_LABEL
from .api import Api, NotFound, Object
from .pods import observable

logger = logging.getLogger(__name__)
#: Pods of one answer to a list: 8,000 in one took 400 MB.
LISTED_AT_ONCE = 250
FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 10.0


class PodWatch:
    """See the module.

    Args:
        api: of the cluster.
        namespaces: to watch; all when empty.
        seconds: after which a watch is opened anew.
        changed: called with the job whose pod changed.
        gone: called with the job and the UID of a pod that is no more.
        listed: called with each namespace, empty for all, once its pods are known.
        opened: called with the path of each watch that the server opens.
        refused: called with the path of each that it refuses, as where a namespace and the right to see it are gone.
    """

    def __init__(
        self,
        api: Api,
        namespaces: Iterable[str],
        seconds: int,
        changed: Callable[[JobKey], None],
        gone: Callable[[JobKey, str], None],
        listed: Callable[[str], None],
        opened: Callable[[str], None],
        refused: Callable[[str], None],
    ) -> None:
        self._api = api
        self._unlisted = set(namespaces or [""])
        self._namespaces = tuple(self._unlisted)
        self._seconds = seconds
        self._changed = changed
        self._gone = gone
        self._when_listed = listed
        self._opened = opened
        self._refused = refused
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
        retry = FIRST_RETRY_SECONDS
        while True:
            try:
                version = await self._list(namespace, path)
                retry = FIRST_RETRY_SECONDS
                while True:
                    version = await self._watch(path, version)
            except (Conflict, NotFound, Refused, Unavailable) as error:
                logger.warning("pods cannot be watched now: %s; again in %g s", error, retry)
                if isinstance(error, NotFound | Refused):
                    self._refused(path)
                await asyncio.sleep(retry)
                retry = min(2 * retry, LONGEST_RETRY_SECONDS)

    async def _list(self, namespace: str, path: str) -> str:
        query = {"labelSelector": JOB_LABEL, "limit": str(LISTED_AT_ONCE)}
        there: set[str] = set()
        while True:
            listed = await self._api.get(f"{path}?{urlencode(query)}")
            for pod in listed["items"]:
                there.add(pod["metadata"]["uid"])
                self._note(pod)
            following = listed["metadata"].get("continue")
            if not following:
                break
            query["continue"] = following
        for uid, key in list(self._keys.items()):
            if uid not in there and namespace in ("", key.namespace):
                self._drop(uid)
        if namespace in self._unlisted:
            self._unlisted.remove(namespace)
            self._when_listed(namespace)
        version: str = listed["metadata"]["resourceVersion"]
        return version

    async def _watch(self, path: str, version: str) -> str:
        """Follows changes after `version` until the server ends the watch; returns the version that it came to."""
        listed, opened = f"{path}?{urlencode({'labelSelector': JOB_LABEL})}", lambda: self._opened(path)
        events = self._api.watch(listed, version, self._seconds, bookmarks=True, opened=opened)
        async for event in events:
            pod = event["object"]
            version = pod["metadata"]["resourceVersion"]
            if event["type"] == "DELETED":
                self._drop(pod["metadata"]["uid"])
            elif event["type"] != "BOOKMARK":
                self._note(pod)
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
        of_job[uid] = observable(pod)
        self._changed(key)

    def _drop(self, uid: str) -> None:
        key = self._keys.pop(uid, None)
        if key is None:
            return
        of_job = self._seen[key]
        del of_job[uid]
        if not of_job:
            del self._seen[key]
        self._gone(key, uid)
