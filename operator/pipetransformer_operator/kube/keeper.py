"""What a job needs besides its pods, kept against others: who deletes or changes it is undone.

Watches tell; nothing is listed, for what is kept is what this operator wrote, once after its start. Where a watch
broke, nobody knows what happened meanwhile, so everything is written again in its job's next turn.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from ..controller.ports import Conflict, JobKey, Unavailable
from ..plan.accounting import JOB_LABEL
from .api import Api, NotFound, Object, Query
from .authority import CA_CONFIG_MAP, Publisher
from .follow import follow
from .protection import Protection

logger = logging.getLogger(__name__)
_PROTECTION = {"labelSelector": JOB_LABEL}
_AUTHORITY = {"fieldSelector": f"metadata.name={CA_CONFIG_MAP}"}


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
        protection = _PROTECTION, self._protection_seen, self._protection.forget_all
        async with asyncio.TaskGroup() as tasks:
            for where in [f"/namespaces/{name}" for name in self._namespaces] or [""]:
                for path, query, seen, missed in (
                    (f"/apis/networking.k8s.io/v1{where}/networkpolicies", *protection),
                    (f"/apis/policy/v1{where}/poddisruptionbudgets", *protection),
                    (f"/api/v1{where}/configmaps", _AUTHORITY, self._authority_seen, self._publisher.forget_all),
                ):
                    tasks.create_task(self._follow(path, query, seen, missed))

    async def _follow(
        self, path: str, query: Query, seen: Callable[[Object, bool], Awaitable[None]], missed: Callable[[], None]
    ) -> None:
        began = False

        async def relist() -> str:
            nonlocal began
            version: str = (await self._api.get(path, {**query, "limit": "1"}))["metadata"]["resourceVersion"]
            if began:
                missed()
            began = True
            return version

        async for one, deleted in follow(self._api, path, query, relist=relist, often=False):
            await seen(one, deleted)

    async def _protection_seen(self, one: Object, deleted: bool) -> None:
        metadata = one["metadata"]
        key = JobKey(metadata["namespace"], metadata["labels"][JOB_LABEL])
        if self._protection.forget_if_touched(key, one, deleted=deleted):
            self._wake(key)

    async def _authority_seen(self, one: Object, deleted: bool) -> None:
        try:
            await self._publisher.restore(one, deleted=deleted)
        except (Conflict, NotFound, Unavailable) as error:
            # The namespace goes, too, or it is tried again with the next worker.
            logger.warning("%s is not restored: %s", CA_CONFIG_MAP, error)
