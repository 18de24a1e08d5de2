"""kopf's part: watches jobs, and tells the service what it sees. Nothing is decided here.

Watches start only when this operator holds the lease, so they show everything that the operator before it wrote.
"""

import asyncio
import logging
import signal
from collections.abc import Coroutine
from typing import Any

import kopf

from pipetransformer_contract.api import GROUP, PLURAL, VERSION
from pipetransformer_operator.kube.client.api import LISTED_AT_ONCE
from pipetransformer_operator.kube.watches.follow import WATCH_SECONDS
from pipetransformer_operator.service import Service
from pipetransformer_operator.settings import Settings

from .session import Backoffs, Logins

CONNECT_SECONDS = 10
#: How long kopf keeps the newest event of an object.
IDLE_SECONDS = 1.0


async def operate(settings: Settings) -> None:
    """Runs the operator until a signal tells it to stop.

    Raises:
        CannotStart: see `Service.start`.
        LeaseLost: another operator took over.
    """
    stopped = asyncio.Event()
    # kopf takes the signal once it watches. Until then Linux would drop it, because a container's process has the id 1
    # and no default action. A spare operator would outlive the leader, and take the lease from it.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    service = await Service.start(settings)
    registry = kopf.OperatorRegistry()
    _register(registry, service)
    watching = kopf.operator(
        registry=registry,
        settings=_kopf_settings(),
        standalone=True,
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
        stop_flag=stopped,
    )
    try:
        await until_one_ends(service.lead(), stopped.wait())
        if not stopped.is_set():
            await until_one_ends(service.keep_leading(), service.run(), _watch_jobs(service, watching))
    finally:
        watching.close()
        await service.stop()


async def _watch_jobs(service: Service, watching: Coroutine[Any, Any, None]) -> None:
    """Watches jobs once the cluster serves them. kopf looks for their kind only once, and the CRD may have gone while
    this operator waited for the lease."""
    await service.until_served()
    await watching


async def until_one_ends(*parts: Coroutine[Any, Any, object]) -> None:
    """Runs the parts until one ends, and cancels the rest. Raises what that one raised."""
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
    # The operator has no right to see namespaces and CRDs, and needs none.
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.posting.level = logging.ERROR
    settings.persistence.diffbase_storage = NothingToCompare()
    return settings


class NothingToCompare(kopf.DiffBaseStorage):
    """Saves kopf a copy of each object at each event: no handler here asks what changed since the last one."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        """See `kopf.DiffBaseStorage`."""
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> None:
        """See `kopf.DiffBaseStorage`."""

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """See `kopf.DiffBaseStorage`."""


class _Answers:
    """Tells health and jobs of the API server's answers to kopf."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def on_answer(self, path: str, code: int, *, watch: bool) -> None:
        """See `AnswerListener`."""
        if watch and code == 200:
            self._service.health.on_watch_opened(path)
        elif code in (403, 404):
            self._service.health.on_watch_refused(path)
        elif path.endswith(f"/{PLURAL}") and code == 200:
            self._service.jobs.on_listed(path)


def _register(registry: kopf.OperatorRegistry, service: Service) -> None:
    logins = Logins(_Answers(service), service.metrics)

    @kopf.on.login(registry=registry)
    async def login(**kwargs: Any) -> kopf.AiohttpSession | None:
        return await logins.log_in(**kwargs)

    # All handlers are coroutines, because kopf runs functions in threads.
    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job_changed(*, body: kopf.Body, type: str, **_: Any) -> None:
        (service.jobs.drop if type == "DELETED" else service.jobs.note)(body)
