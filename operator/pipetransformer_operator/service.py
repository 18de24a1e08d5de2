"""The operator on a cluster, put together: lease, controller, channel, metrics and health, from start to stop.

An operator that waits for the lease listens already, so that its metrics show, but it answers workers with 503.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from pipetransformer_contract.api import PLURAL, PipeTrainingJob

from .channel.app import Channel
from .channel.limits.entrance import Entrance, allow_files, listen, serve
from .channel.tls import buffers
from .channel.tls.certificate import Certificate, MountedCertificate
from .controller.manager import Controller
from .controller.ports import Conflict, JobKey, Refused, Unavailable
from .health import Health
from .kube.capacity.free_accelerators import FreeAccelerators
from .kube.capacity.reservations import Reservations
from .kube.client.api import Api, NotFound, Object
from .kube.client.lease import Lease
from .kube.store import KubeStore, served
from .kube.trust.authority import KeptAuthority, Publisher
from .kube.trust.tokens import TokenReviewer
from .kube.watches.follow import WATCH_SECONDS
from .kube.watches.jobs import KnownJobs
from .kube.watches.keeper import Keeper
from .kube.watches.nodes import Nodes
from .kube.watches.other_pods import OtherPods
from .kube.watches.pod_watch import PodWatch
from .kube.workers.pool import KubePool
from .kube.workers.protection import release_budgets
from .kube.workers.rendering import PriorityClasses
from .kueue.quota import KueueQuota, NoKueue
from .metrics import Metrics
from .settings import Settings

logger = logging.getLogger(__name__)
#: A watch that was not opened for so long is stuck: two of its lives, and kopf's longest pause between attempts.
WATCH_PATIENCE_SECONDS = 2 * WATCH_SECONDS + 30
CRD_POLL_SECONDS = 2.0
CERTIFICATE_SECONDS = 600.0
#: For the budgets that an operator takes with it; its pod has 30 s to end.
RELEASE_SECONDS = 15.0


class _Watching(Protocol):
    async def run(self) -> None:
        """Watches for ever."""


class Service:
    """See the module. The watch of nodes calls `on_node_changed`.

    Attributes:
        health: is to be told of each watch that is opened.
        metrics: is to be told of requests to the API server.
        jobs: is to be told what the watch of jobs shows.
    """

    def __init__(
        self,
        apis: list[Api],
        lease: Lease,
        health: Health,
        metrics: Metrics,
        controller: Controller,
        jobs: KnownJobs,
        nodes: Nodes,
        free: FreeAccelerators,
        watching: list[_Watching],
        runners: list[web.AppRunner],
        renewing: asyncio.Task[None],
        namespaces: Sequence[str],
    ) -> None:
        self.health = health
        self.metrics = metrics
        self.jobs = jobs
        self._apis = apis
        self._lease = lease
        self._controller = controller
        self._nodes = nodes
        self._free = free
        self._watching = watching
        self._runners = runners
        self._renewing = renewing
        self._namespaces = namespaces

    @classmethod
    async def start(cls, settings: Settings) -> "Service":
        """Connects to the cluster and listens.

        Raises:
            Unavailable: the API server does not let the operator start now.
            OSError: a port is taken.
            ValueError: the mounted certificate cannot be used.
        """
        buffers.shrink()
        metrics = Metrics()
        entrance = Entrance(allow_files(), metrics.on_shut_out)
        # A pool of its own, so that the lease never waits behind other requests.
        own = await Api.connect(listener=metrics)
        identity = f"{settings.namespace}/{settings.identity}"
        lease = Lease(own, settings.lease_namespace, identity, seconds=settings.lease_seconds)
        health = Health([PLURAL, "pods"], lease, patience=WATCH_PATIENCE_SECONDS)
        certificate = _certificate(own, settings)
        await certificate.refresh()
        api = await Api.connect(lease, metrics)
        tokens = TokenReviewer(api)
        publisher = Publisher(api, lambda: certificate.trusted)
        nodes = Nodes(appeared=lambda: controller.released(), signals=settings.signals)
        classes = PriorityClasses(
            settings.base_priority_class, settings.claim_priority_class, settings.autoscaled_priority_class
        )
        quota: KueueQuota | NoKueue = NoKueue(api, settings.namespaces)
        if settings.kueue:
            quota = KueueQuota(api, settings.namespaces, lambda key: controller.wake_known(key))

        def freed() -> None:
            controller.accelerators_freed()

        def attend(namespace: str) -> None:
            for key in jobs.keys(namespace):
                controller.wake(key)

        def job_gone(key: JobKey) -> None:
            pool.forget(key)
            quota.forget(key)
            controller.wake(key)

        def watched_job(key: JobKey) -> Object | None:
            return jobs.of(key) if pods.knows(key.namespace) else None

        def pod_gone(key: JobKey, uid: str) -> None:
            pool.gone(key, uid)
            tokens.forget(uid)
            controller.wake(key)

        free = FreeAccelerators(nodes.is_closed, freed)
        store = KubeStore(api, watched_job)
        jobs = KnownJobs(api, store.kept, lambda key: controller.wake(key), job_gone)
        pods = PodWatch(
            api,
            settings.namespaces,
            lambda key: controller.wake(key),
            pod_gone,
            lambda key: controller.released(key),
            attend,
            health.on_watch_opened,
            health.on_watch_refused,
            None if settings.namespaces else free,
        )
        others = None if settings.namespaces else OtherPods(api, free, released=lambda: controller.released())
        pool = KubePool(
            api,
            pods.of,
            settings.channel_url,
            publisher.publish,
            None if settings.namespaces else nodes,
            classes,
            settings.scraper_namespace,
            quota.assigned,
            reservations=Reservations(free, lambda: others.listed and pods.knows(""), freed) if others else None,
        )
        controller = Controller(
            store,
            pool,
            metrics=metrics,
            quota=quota,
            waiting=others.waiting if others and settings.yields else None,
            weigh_namespaces=settings.weigh_namespaces,
        )
        lease.add(controller)
        metrics.show(_State(controller, lease, health, entrance, nodes))
        keeper = Keeper(api, settings.namespaces, pool.protection, publisher, controller.wake_known)
        channel = Channel(controller.boards, tokens, metrics.on_request, metrics.on_refusal, entrance.most_polls)
        guarded = entrance.guard(listen(settings.host, settings.channel_port))
        runners = [
            await serve(channel.application(), guarded, certificate.context),
            await serve(_exporter(metrics), listen(settings.host, settings.metrics_port)),
            await serve(health.application(), listen(settings.host, settings.health_port)),
        ]
        renewing = asyncio.create_task(_renew(certificate, publisher, controller), name="certificate")
        return cls(
            [own, api],
            lease,
            health,
            metrics,
            controller,
            jobs,
            nodes,
            free,
            [jobs, pods, keeper, quota, *filter(None, [others])],
            runners,
            renewing,
            settings.namespaces,
        )

    async def lead(self) -> None:
        """Waits until the cluster serves our jobs and this operator is the one: what is read from then on is whole."""
        while not await served(self._apis[0]):
            logger.info("the cluster does not serve %s yet", PLURAL)
            await asyncio.sleep(CRD_POLL_SECONDS)
        await self._lease.acquire()

    async def run(self) -> None:
        """Watches all but jobs and nodes, once this operator leads, for ever: a fault in any part is raised."""
        async with asyncio.TaskGroup() as tasks:
            for one in self._watching:
                tasks.create_task(one.run())
            await self._renewing

    async def keep_leading(self) -> None:
        """Runs for ever.

        Raises:
            LeaseLost: another operator took over.
        """
        await self._lease.keep()

    async def stop(self) -> None:
        """Stops everything; jobs and workers go on."""
        self._renewing.cancel()
        await self._controller.stop()
        await self._release_budgets()
        await self._lease.release()
        for runner in self._runners:
            await runner.cleanup()
        for api in self._apis:
            await api.close()

    async def _release_budgets(self) -> None:
        """Lets nodes be drained until an operator leads again, which makes the budgets anew."""
        if not self._lease.held:
            return
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await release_budgets(self._apis[-1], self._namespaces)
        except (Refused, Unavailable, TimeoutError) as error:
            logger.warning("budgets of jobs are left, and refuse evictions while no operator runs: %r", error)

    def on_node_changed(self, node: Mapping[str, Any], *, deleted: bool) -> None:
        """The watch showed a node, or its end."""
        news = self._nodes.note(node, deleted=deleted)
        self._free.note_node(node, deleted=deleted)  # it asks `Nodes` whether the node takes pods
        if news:
            self._controller.wake_known(None)


@dataclass(frozen=True)
class _State:
    """See `OperatorState`."""

    controller: Controller
    lease: Lease
    health: Health
    entrance: Entrance
    nodes: Nodes

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


def _certificate(api: Api, settings: Settings) -> Certificate:
    if settings.certificate_dir:
        return MountedCertificate(Path(settings.certificate_dir))
    return KeptAuthority(api, settings.namespace, settings.channel_hosts)


async def _renew(certificate: Certificate, publisher: Publisher, controller: Controller) -> None:
    """Renews for ever what the channel shows, and tells namespaces of running jobs what to trust, anew each time."""
    while True:
        await asyncio.sleep(CERTIFICATE_SECONDS)
        try:
            await certificate.refresh()
        except (Conflict, NotFound, Unavailable, ValueError) as error:
            logger.warning("certificates are not renewed: %s; again in %g s", error, CERTIFICATE_SECONDS)
        await publisher.publish_anew({job.metadata.namespace for job in controller.jobs()})


def _exporter(metrics: Metrics) -> web.Application:
    async def scrape(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/metrics", scrape)])
    return app
