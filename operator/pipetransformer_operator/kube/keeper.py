"""What a job needs besides its pods, kept against others: who deletes or changes it is undone.

Watches tell; nothing is listed, for what is kept is what this operator wrote, once after its start. Where a watch
broke, nobody knows what happened meanwhile, so everything is written again in its job's next turn.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlencode

from ..controller.ports import Conflict, JobKey, Unavailable
from ..plan.accounting import JOB_LABEL
from .api import Api, NotFound, Object
from .authority import Publisher
from .pods import CA_CONFIG_MAP
from .protection import Protection

logger = logging.getLogger(__name__)
WATCH_SECONDS = 120
RETRY_SECONDS = 10.0
_PROTECTION = urlencode({"labelSelector": JOB_LABEL})
_AUTHORITY = urlencode({"fieldSelector": f"metadata.name={CA_CONFIG_MAP}"})


class Keeper:
    """See the module.

    Args:
        api: of the cluster.
        namespaces: to watch; all when empty.
        protection: knows what it wrote of each job.
        publisher: knows what it wrote into each namespace.
        wake: called with a job that has to be protected anew.
    """

    def __init__(
        self,
        api: Api,
        namespaces: Sequence[str],
        protection: Protection,
        publisher: Publisher,
        wake: Callable[[JobKey], None],
    ) -> None:
        self._api = api
        self._namespaces = namespaces
        self._protection = protection
        self._publisher = publisher
        self._wake = wake

    async def run(self) -> None:
        """Watches for ever."""
        following = []
        for where in [f"/namespaces/{name}" for name in self._namespaces] or [""]:
            for folder in ("/apis/networking.k8s.io/v1{}/networkpolicies", "/apis/policy/v1{}/poddisruptionbudgets"):
                path = f"{folder.format(where)}?{_PROTECTION}"
                following.append(self._follow(path, self._protection_seen, self._protection.forget_all))
            path = f"/api/v1{where}/configmaps?{_AUTHORITY}"
            following.append(self._follow(path, self._authority_seen, self._publisher.forget_all))
        await asyncio.gather(*following)

    async def _follow(
        self, path: str, seen: Callable[[Object, bool], Awaitable[None]], missed: Callable[[], None]
    ) -> None:
        version, broke = "", False
        while True:
            try:
                if not version:
                    version = (await self._api.get(f"{path}&limit=1"))["metadata"]["resourceVersion"]
                    if broke:
                        missed()
                async for event in self._api.watch(f"{path}&allowWatchBookmarks=true", version, WATCH_SECONDS):
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        await seen(event["object"], event["type"] == "DELETED")
            except (Conflict, NotFound, Unavailable) as error:
                logger.warning(
                    "what jobs need besides pods is not watched now: %s; again in %g s", error, RETRY_SECONDS
                )
                version, broke = "", True
                await asyncio.sleep(RETRY_SECONDS)

    async def _protection_seen(self, one: Object, deleted: bool) -> None:
        metadata = one["metadata"]
        key = JobKey(metadata["namespace"], metadata["labels"][JOB_LABEL])
        if self._protection.is_not_as_applied(key, one, deleted=deleted):
            self._wake(key)

    async def _authority_seen(self, one: Object, deleted: bool) -> None:
        try:
            await self._publisher.restore(one, deleted=deleted)
        except (NotFound, Unavailable) as error:  # the namespace goes, too, or it is tried again with the next worker
            logger.warning("%s is not restored: %s", CA_CONFIG_MAP, error)
