"""The operator on a cluster, from its start to its stop.

While it waits for the lease, the operator already serves its metrics, and answers workers with 503.
"""

import asyncio
import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from pipetransformer_contract.api import PLURAL, PipeTrainingJob

from .assembly import Assembly
from .channel.authenticator import CannotTell, Unauthenticated
from .channel.limits.entrance import Entrance, allow_files, listen, serve
from .channel.tls import buffers
from .channel.tls.certificate import Certificate, MountedCertificate, Validity
from .controller.manager import Controller
from .controller.ports import Unavailable
from .health import Health
from .kube.client.api import REQUEST_FAILED, Api, NotFound
from .kube.client.lease import Lease
from .kube.node_health.health import NodeHealth
from .kube.store import why_not_served
from .kube.trust.authority import Publisher, SecretCertificate
from .kube.trust.scrapers import PATH as METRICS_PATH
from .kube.trust.scrapers import Forbidden, Scrapers
from .kube.watched import AWAITED
from .kube.watches.follow import WATCH_SECONDS
from .kube.workers.protection import release_budgets
from .kueue.quota import KueueQuota, NoKueue
from .metrics import Metrics
from .metrics.lag import watch_lag
from .settings import Settings

logger = logging.getLogger(__name__)
#: A watch that was not opened for this long is stuck: twice its lifetime, and kopf's longest pause between attempts.
WATCH_PATIENCE_SECONDS = 2 * WATCH_SECONDS + 30
CRD_POLL_SECONDS = 2.0
CERTIFICATE_SECONDS = 600.0
#: Time to delete all budgets when the operator stops; its pod has 30 s to end.
RELEASE_SECONDS = 15.0


class CannotStart(Exception):
    """The operator cannot begin its work. The message says why; a kubelet starts it again."""


class Service:
    """A running operator: its lease, controller, channel, metrics and health, put together.

    Attributes:
        health: tell it of each watch that is opened.
        metrics: tell it of requests to the API server.
        jobs: tell it what the watch of jobs shows.
    """

    def __init__(
        self,
        apis: list[Api],
        lease: Lease,
        health: Health,
        metrics: Metrics,
        assembly: Assembly,
        runners: list[web.AppRunner],
        always: Sequence[asyncio.Task[None]],
        namespaces: Sequence[str],
    ) -> None:
        self.health = health
        self.metrics = metrics
        self.jobs = assembly.cluster.jobs
        self._apis = apis
        self._unguarded, self._guarded = apis[0], apis[-1]  # only a leader may write by the guarded one
        self._lease = lease
        self._assembly = assembly
        self._runners = runners
        self._always = always
        self._namespaces = namespaces

    @classmethod
    async def start(cls, settings: Settings) -> "Service":
        """Connects to the cluster and listens.

        Raises:
            CannotStart: there is no cluster to connect to, the API server does not answer or refuses, the channel's
                certificate cannot be used, or it cannot listen on a port.
        """
        buffers.shrink()
        metrics = Metrics()
        entrance = Entrance(allow_files(), metrics)
        # A separate connection pool, so that the lease never waits behind other requests.
        try:
            own = await Api.connect(listener=metrics)
        except Unavailable as error:
            raise CannotStart(str(error)) from error
        identity = f"{settings.namespace}/{settings.identity}"
        lease = Lease(own, settings.lease_namespace, identity, seconds=settings.lease_seconds)
        refusable = () if settings.namespaces else AWAITED
        health = Health([PLURAL, "pods"], lease, refusable=refusable, patience=WATCH_PATIENCE_SECONDS)
        certificate = _certificate(own, settings)
        try:
            await certificate.refresh()
        except (Unavailable, NotFound, ValueError) as error:
            await own.close()
            raise CannotStart(str(error)) from error
        # Any client may send tokens to the metrics page, so their reviews delay neither the lease nor jobs.
        reviews = await Api.connect(listener=metrics)
        api = await Api.connect(lease, metrics, settings.api_limiter())
        assembly = Assembly(
            settings,
            api,
            lease,
            trust=certificate,
            watcher=health,
            metrics=metrics,
            requests=metrics,
            most_polls=entrance.most_polls,
        )
        controller, cluster = assembly.controller, assembly.cluster
        metrics.show(_State(controller, lease, health, entrance, cluster.nodes, certificate, assembly.quota))
        guarded = entrance.guard(_listen(settings, settings.channel_port))
        runners = [
            await serve(assembly.channel.application(), guarded, certificate.context),
            await _serve_metrics(metrics, settings, reviews, certificate),
            await serve(health.application(), _listen(settings, settings.health_port)),
        ]
        always = [
            asyncio.create_task(_renew(certificate, assembly.publisher, controller), name="certificate"),
            asyncio.create_task(watch_lag(metrics), name="event-loop-lag"),
        ]
        return cls([own, reviews, api], lease, health, metrics, assembly, runners, always, settings.namespaces)

    async def lead(self) -> None:
        """Waits until the cluster serves our jobs and this operator holds the lease."""
        await self.until_served()
        await self._lease.acquire()

    async def until_served(self) -> None:
        """Waits until the cluster serves our jobs. The log says why it waits, once for each reason."""
        said = ""
        while why := await why_not_served(self._unguarded):
            if why != said:
                logger.warning("waiting: %s", why)
            said = why
            await asyncio.sleep(CRD_POLL_SECONDS)

    async def run(self) -> None:
        """Watches everything except jobs. Call it once this operator leads; it raises a fault of any part."""
        async with asyncio.TaskGroup() as tasks:
            for one in self._assembly.watching:
                tasks.create_task(one.run())
            await asyncio.gather(*self._always)

    async def keep_leading(self) -> None:
        """Renews the lease until it is lost.

        Raises:
            LeaseLost: another operator took over.
        """
        await self._lease.keep()

    async def stop(self) -> None:
        """Stops everything; jobs and workers continue."""
        for task in self._always:
            task.cancel()
        await self._assembly.controller.stop()
        await self._release_budgets()
        await self._lease.release()
        for runner in self._runners:
            await runner.cleanup()
        for api in self._apis:
            await api.close()

    async def _release_budgets(self) -> None:
        """Deletes the jobs' budgets, so that nodes can be drained. The next operator that leads creates them again."""
        if not self._lease.held:
            return
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await release_budgets(self._guarded, self._namespaces)
        except (Unavailable, TimeoutError) as error:
            logger.warning(
                "cannot delete PodDisruptionBudgets, which refuse evictions while no operator runs: %r", error
            )


@dataclass(frozen=True)
class _State:
    """See `OperatorState`."""

    controller: Controller
    lease: Lease
    health: Health
    entrance: Entrance
    nodes: NodeHealth
    certificate: Certificate
    quota: KueueQuota | NoKueue

    def jobs(self) -> Iterator[PipeTrainingJob]:
        return self.controller.jobs()

    @property
    def leads(self) -> bool:
        return self.lease.held

    @property
    def watches(self) -> Mapping[str, float]:
        return self.health.opened_times

    @property
    def connections(self) -> int:
        return self.entrance.open

    @property
    def avoided_nodes(self) -> Mapping[str, datetime]:
        return self.nodes.avoided

    @property
    def certificates(self) -> Mapping[str, Validity]:
        return self.certificate.validities

    @property
    def kueue_answers(self) -> bool | None:
        return self.quota.answers


def _listen(settings: Settings, port: int) -> socket.socket:
    """Listens at a port of the settings' address.

    Raises:
        CannotStart: the port is taken, or the address does not exist.
    """
    try:
        return listen(settings.host, port)
    except OSError as error:
        raise CannotStart(f"cannot listen on port {port}: {error}") from error


def _certificate(api: Api, settings: Settings) -> Certificate:
    if settings.certificate_dir:
        return MountedCertificate(Path(settings.certificate_dir))
    return SecretCertificate(api, settings.namespace, settings.channel_hosts)


async def _renew(certificate: Certificate, publisher: Publisher, controller: Controller) -> None:
    """Renews the channel's certificate endlessly, and each time tells namespaces of running jobs what to trust."""
    while True:
        await asyncio.sleep(CERTIFICATE_SECONDS)
        try:
            await certificate.refresh()
        except (*REQUEST_FAILED, ValueError) as error:
            logger.warning("cannot renew certificates: %s; trying again in %g s", error, CERTIFICATE_SECONDS)
        await publisher.republish({job.metadata.namespace for job in controller.jobs()})


async def _serve_metrics(metrics: Metrics, settings: Settings, api: Api, certificate: Certificate) -> web.AppRunner:
    """Serves metrics to any client; with `secure_metrics` over TLS, and only to clients that the API server allows."""
    scrapers = Scrapers(api) if settings.secure_metrics else None

    async def scrape(request: web.Request) -> web.Response:
        if scrapers is not None:
            try:
                await scrapers.check(request.headers.get("Authorization", "").removeprefix("Bearer "))
            except Unauthenticated as error:
                raise web.HTTPUnauthorized(text=str(error), headers={"WWW-Authenticate": "Bearer"}) from error
            except Forbidden as error:
                raise web.HTTPForbidden(text=str(error)) from error
            except CannotTell as error:
                raise web.HTTPServiceUnavailable(text=str(error)) from error
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get(METRICS_PATH, scrape)])
    context = None if scrapers is None else certificate.context
    return await serve(app, _listen(settings, settings.metrics_port), context)
