"""Keeps what a job needs in addition to its pods: undoes what other clients change or delete.

Watches show such changes. Nothing is listed at first, because this operator wrote what it keeps after its own start.
When a watch breaks, a list shows what happened meanwhile.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.controller.ports import JobKey
from pipetransformer_operator.kube.client.api import REQUEST_FAILED, Api, Query
from pipetransformer_operator.kube.events import ClusterListener
from pipetransformer_operator.kube.trust.authority import CA_CONFIG_MAP, Publisher
from pipetransformer_operator.kube.workers.protection import Protection

from .follow import Followed, follow

logger = logging.getLogger(__name__)
_PROTECTION = {"labelSelector": JOB_LABEL}
_AUTHORITY = {"fieldSelector": f"metadata.name={CA_CONFIG_MAP}"}
_PROTECTION_KINDS = {
    "/apis/networking.k8s.io/v1": "networkpolicies",
    "/apis/policy/v1": "poddisruptionbudgets",
}


class Keeper:
    """Watches what this operator wrote for workers, and has it written again if another client touched it.

    Args:
        api: client of the API server.
        namespaces: names of the namespaces to watch; all when empty.
        protection: knows what it wrote for each job.
        publisher: knows what it wrote into each namespace.
        events: is told whose protection was touched.
    """

    def __init__(
        self,
        api: Api,
        namespaces: Sequence[str],
        protection: Protection,
        publisher: Publisher,
        events: ClusterListener,
    ) -> None:
        self._api = api
        self._namespaces = namespaces
        self._protection = protection
        self._publisher = publisher
        self._events = events

    async def run(self) -> None:
        """Watches until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            authorities = _Authorities(self._publisher, tasks)
            for namespace in self._namespaces or [""]:
                where = f"/namespaces/{namespace}" if namespace else ""
                for api_path, kind in _PROTECTION_KINDS.items():
                    protections = _Protections(self._protection, api_path, self._events)
                    path = f"{api_path}{where}/{kind}"
                    tasks.create_task(self._keep(_Kept(self._api, path, _PROTECTION, namespace, protections)))
                path = f"/api/v1{where}/configmaps"
                tasks.create_task(self._keep(_Kept(self._api, path, _AUTHORITY, namespace, authorities)))

    async def _keep(self, kept: "_Kept") -> None:
        async for one, deleted in follow(self._api, kept):
            kept.writer.on_seen(one, deleted=deleted)


class _Writer(Protocol):
    """Knows what was written, and restores it."""

    def written(self, namespace: str) -> Iterable[Object]:
        """Objects that were written in the namespace; in all when it is empty."""
        ...

    def on_seen(self, one: Object, *, deleted: bool) -> None:
        """A watch or a list showed the object, or its deletion."""
        ...


class _Kept(Followed):
    """Objects of one kind in one namespace; in all when it is empty."""

    def __init__(self, api: Api, path: str, query: Query, namespace: str, writer: _Writer) -> None:
        super().__init__(path, query)
        self.writer = writer
        self._api = api
        self._namespace = namespace
        self._began = False

    async def relist(self) -> str:
        """See `Followed`. The first call lists nothing: it only asks for the version to watch from."""
        if not self._began:
            self._began = True
            first = await self._api.get(self.path, {**self.query, "limit": "1"})
            return str(first["metadata"]["resourceVersion"])
        missing = {_name(one): one for one in self.writer.written(self._namespace)}
        version = ""
        async for part in self._api.list(self.path, self.query):
            version = part["metadata"]["resourceVersion"]
            for one in part["items"]:
                missing.pop(_name(one), None)
                self.writer.on_seen(one, deleted=False)
        for one in missing.values():
            self.writer.on_seen(one, deleted=True)
        return version


class _Protections:
    """Objects of one kind that protect jobs' workers. The job's next turn writes them again."""

    def __init__(self, protection: Protection, api_path: str, events: ClusterListener) -> None:
        self._protection = protection
        self._api_path = api_path
        self._events = events

    def written(self, namespace: str) -> Iterable[Object]:
        """See `_Writer`."""
        return self._protection.written(self._api_path, namespace)

    def on_seen(self, one: Object, *, deleted: bool) -> None:
        """See `_Writer`."""
        metadata = one["metadata"]
        key = JobKey(metadata["namespace"], metadata["labels"][JOB_LABEL])
        if self._protection.forget_if_touched(key, self._api_path, metadata, deleted=deleted):
            self._events.on_protection_touched(key)


class _Authorities:
    """The channel's certificates in all namespaces. One task a namespace, so that a slow one delays no other."""

    def __init__(self, publisher: Publisher, tasks: asyncio.TaskGroup) -> None:
        self._publisher = publisher
        self._tasks = tasks
        self._changed: dict[str, tuple[Object, bool]] = {}

    def written(self, namespace: str) -> Iterable[Object]:
        """See `_Writer`."""
        return self._publisher.written(namespace)

    def on_seen(self, one: Object, *, deleted: bool) -> None:
        """See `_Writer`."""
        namespace = one["metadata"]["namespace"]
        if namespace not in self._changed:
            self._tasks.create_task(self._restore(namespace))
        self._changed[namespace] = one, deleted

    async def _restore(self, namespace: str) -> None:
        """Restores what was seen last, until nothing newer was seen."""
        seen = None
        while seen is not self._changed[namespace]:
            one, deleted = seen = self._changed[namespace]
            try:
                await self._publisher.restore(one, deleted=deleted)
            except REQUEST_FAILED as error:
                # The namespace is being deleted, or the next worker's creation tries again.
                logger.warning("cannot restore %s of namespace %s: %s", CA_CONFIG_MAP, namespace, error)
        del self._changed[namespace]


def _name(one: Object) -> tuple[str, str]:
    return one["metadata"]["namespace"], one["metadata"]["name"]
