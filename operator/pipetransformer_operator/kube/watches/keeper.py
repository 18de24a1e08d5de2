"""What a job needs besides its pods, kept against others: who deletes or changes it is undone.

Watches tell. Nothing is listed at first, for what is kept is what this operator wrote, once after its start. Where a
watch broke, a list tells what happened meanwhile.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_operator.controller.ports import Conflict, JobKey, Unavailable
from pipetransformer_operator.kube.client.api import Api, NotFound, Object, Query
from pipetransformer_operator.kube.trust.authority import CA_CONFIG_MAP, Publisher
from pipetransformer_operator.kube.workers.protection import Protection

from .follow import follow

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
        self._changed: dict[str, tuple[Object, bool]] = {}

    async def run(self) -> None:
        """Watches for ever."""
        async with asyncio.TaskGroup() as tasks:
            for namespace in self._namespaces or [""]:
                where = f"/namespaces/{namespace}" if namespace else ""
                for folder, kind in (
                    ("/apis/networking.k8s.io/v1", "networkpolicies"),
                    ("/apis/policy/v1", "poddisruptionbudgets"),
                ):
                    written = partial(self._protection.written, folder, namespace)
                    seen = partial(self._protection_seen, folder)
                    tasks.create_task(self._follow(f"{folder}{where}/{kind}", _PROTECTION, written, seen))
                written = partial(self._publisher.written, namespace)
                seen = partial(self._authority_seen, tasks)
                tasks.create_task(self._follow(f"/api/v1{where}/configmaps", _AUTHORITY, written, seen))

    async def _follow(
        self,
        path: str,
        query: Query,
        written: Callable[[], Iterable[Object]],
        seen: Callable[[Object, bool], Awaitable[None]],
    ) -> None:
        began = False

        async def relist() -> str:
            nonlocal began
            if not began:
                began = True
                first = await self._api.get(path, {**query, "limit": "1"})
                return str(first["metadata"]["resourceVersion"])
            missing = {_name(one): one for one in written()}
            version = ""
            async for part in self._api.list(path, query):
                version = part["metadata"]["resourceVersion"]
                for one in part["items"]:
                    missing.pop(_name(one), None)
                    await seen(one, False)
            for one in missing.values():
                await seen(one, True)
            return version

        async for one, deleted in follow(self._api, path, query, relist=relist):
            await seen(one, deleted)

    async def _protection_seen(self, folder: str, one: Object, deleted: bool) -> None:
        metadata = one["metadata"]
        key = JobKey(metadata["namespace"], metadata["labels"][JOB_LABEL])
        if self._protection.forget_if_touched(key, folder, metadata, deleted=deleted):
            self._wake(key)

    async def _authority_seen(self, tasks: asyncio.TaskGroup, one: Object, deleted: bool) -> None:
        """Each namespace for itself: one that is slow, or is changed again and again, holds up no other."""
        namespace = one["metadata"]["namespace"]
        if namespace not in self._changed:
            tasks.create_task(self._restore(namespace))
        self._changed[namespace] = one, deleted

    async def _restore(self, namespace: str) -> None:
        """Puts back what was seen last, until nothing newer is."""
        seen = None
        while seen is not self._changed[namespace]:
            one, deleted = seen = self._changed[namespace]
            try:
                await self._publisher.restore(one, deleted=deleted)
            except (Conflict, NotFound, Unavailable) as error:
                # The namespace goes, too, or it is tried again with the next worker.
                logger.warning("%s of namespace %s is not restored: %s", CA_CONFIG_MAP, namespace, error)
        del self._changed[namespace]


def _name(one: Object) -> tuple[str, str]:
    return one["metadata"]["namespace"], one["metadata"]["name"]
