"""kopf's part: it watches jobs and nodes and tells what it sees. No decision is made here.

Watches start only once this operator holds the lease, so they show all that an operator before it wrote.
"""

import asyncio
import contextlib
import logging
from typing import Any

import kopf

from ..api import GROUP, PLURAL, VERSION
from ..service import WATCH_SECONDS, Service
from ..settings import Settings
from .session import Backoffs, log_in

CONNECT_SECONDS = 10
#: Objects of one answer to a list.
LISTED_AT_ONCE = 250
#: kopf keeps an object's newest event for so long.
IDLE_SECONDS = 1.0


async def operate(settings: Settings) -> None:
    """Runs the operator until a signal tells it to stop.

    Raises:
        LeaseLost: another operator took over.
    """
    service = await Service.start(settings)
    registry = kopf.OperatorRegistry()
    _register(registry, service)
    if not settings.namespaces:
        _register_nodes(registry, service)
    keeping = None
    try:
        await service.lead()
        keeping = asyncio.create_task(service.keep_leading())
        watching = asyncio.create_task(_watch(settings, service, registry))
        await asyncio.wait({keeping, watching}, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        if keeping.done():
            keeping.result()
    finally:
        if keeping is not None:
            keeping.cancel()
        await service.stop()


async def _watch(settings: Settings, service: Service, registry: kopf.OperatorRegistry) -> None:
    """Watches until a signal tells kopf to stop."""
    async with asyncio.TaskGroup() as tasks:
        pods = tasks.create_task(service.pods.run())
        await kopf.operator(
            registry=registry,
            settings=_kopf_settings(),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
        )
        pods.cancel()


def _kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.client_timeout = WATCH_SECONDS + 30
    settings.watching.connect_timeout = CONNECT_SECONDS
    settings.watching.chunk_size = LISTED_AT_ONCE
    settings.queueing.idle_timeout = IDLE_SECONDS
    settings.networking.error_backoffs = Backoffs()
    # Neither namespaces nor definitions are watched: the operator needs no right to see them.
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.posting.level = logging.ERROR
    settings.persistence.diffbase_storage = NothingToCompare()
    return settings


class NothingToCompare(kopf.DiffBaseStorage):
    """kopf copies each object at each event to find what changed since it was handled last; no handler here asks."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        """See `kopf.DiffBaseStorage`."""
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> None:
        """See `kopf.DiffBaseStorage`."""

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """See `kopf.DiffBaseStorage`."""


def _register(registry: kopf.OperatorRegistry, service: Service) -> None:
    def answered(path: str, watch: bool, code: int) -> None:
        if watch and code == 200:
            service.health.opened(path)
        elif code in (403, 404):
            service.health.refused(path)
        elif path.endswith(f"/{PLURAL}") and code == 200:
            service.jobs.listed(path)

    @kopf.on.login(registry=registry)
    async def login(**kwargs: Any) -> kopf.AiohttpSession | None:
        return await log_in(answered, service.metrics.asked, **kwargs)

    # All handlers are coroutines: kopf runs others in threads.
    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job_changed(*, body: kopf.Body, type: str, **_: Any) -> None:
        (service.jobs.drop if type == "DELETED" else service.jobs.note)(body)


def _register_nodes(registry: kopf.OperatorRegistry, service: Service) -> None:
    @kopf.on.event("nodes", registry=registry)
    async def node_changed(*, body: kopf.Body, type: str, **_: Any) -> None:
        service.node_changed(body, deleted=type == "DELETED")
