"""kopf's part: it watches jobs and nodes and tells what it sees. No decision is made here.

Watches start only once this operator holds the lease, so they show all that an operator before it wrote.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import kopf

from pipetransformer_contract.api import GROUP, PLURAL, VERSION
from pipetransformer_operator.kube.client.api import LISTED_AT_ONCE
from pipetransformer_operator.kube.watches.follow import WATCH_SECONDS
from pipetransformer_operator.service import Service
from pipetransformer_operator.settings import Settings

from .session import Backoffs, log_in

CONNECT_SECONDS = 10
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
    watching = kopf.operator(
        registry=registry,
        settings=_kopf_settings(),
        standalone=True,
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
    )
    try:
        await service.lead()
        await until_one_ends(service.keep_leading(), service.run(), watching)
    finally:
        watching.close()
        await service.stop()


async def until_one_ends(*parts: Coroutine[Any, Any, None]) -> None:
    """Runs them until one ends, as it does; the others are cancelled."""
    tasks = {asyncio.create_task(part) for part in parts}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


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
