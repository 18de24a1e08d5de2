"""The operator on a cluster, put together: controller, channel and metrics, between one start and one stop."""

from collections.abc import Callable, Iterable

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from .channel.app import Channel
from .channel.certificate import server_context
from .controller.manager import Controller
from .controller.ports import JobKey
from .kube.api import Api, Object
from .kube.authority import Publisher, obtain_authority
from .kube.pool import KubePool
from .kube.store import KubeStore
from .kube.tokens import TokenReviewer
from .metrics import Metrics
from .settings import Settings

SHUTDOWN_SECONDS = 1.0


class Service:
    """See the module. The event sources call `job_changed`, `pod_changed` and `pod_gone`."""

    def __init__(
        self, api: Api, controller: Controller, pool: KubePool, tokens: TokenReviewer, runners: list[web.AppRunner]
    ) -> None:
        self._api = api
        self._controller = controller
        self._pool = pool
        self._tokens = tokens
        self._runners = runners

    @classmethod
    async def start(
        cls,
        settings: Settings,
        watched_job: Callable[[JobKey], Object | None],
        watched_pods: Callable[[JobKey], Iterable[Object]],
    ) -> "Service":
        """Connects to the cluster and listens.

        Args:
            settings: from the environment.
            watched_job: a job as the watch last showed it.
            watched_pods: pods with a job's label as the watch last showed them.

        Raises:
            Unavailable: the API server does not let the operator start now.
            OSError: a port is taken.
        """
        api = await Api.connect()
        authority = await obtain_authority(api, settings.namespace)
        tokens = TokenReviewer(api)
        pool = KubePool(api, watched_pods, settings.channel_url, Publisher(api, authority).publish)
        metrics = Metrics(lambda: controller.jobs())
        controller = Controller(KubeStore(api, watched_job), pool, decided=metrics.decided)
        channel = web.AppRunner(
            Channel(controller.boards, tokens, metrics.requested).application(),
            shutdown_timeout=SHUTDOWN_SECONDS,
            access_log=None,
        )
        exporter = web.AppRunner(_exporter(metrics), access_log=None)
        for runner in (channel, exporter):
            await runner.setup()
        tls = server_context(authority, settings.channel_hosts)
        await web.TCPSite(channel, settings.host, settings.channel_port, ssl_context=tls).start()
        await web.TCPSite(exporter, settings.host, settings.metrics_port).start()
        return cls(api, controller, pool, tokens, [channel, exporter])

    async def stop(self) -> None:
        """Stops everything; jobs and workers go on."""
        await self._controller.stop()
        for runner in self._runners:
            await runner.cleanup()
        await self._api.close()

    def job_changed(self, key: JobKey, *, deleted: bool) -> None:
        """The watch showed something new of a job."""
        if deleted:
            self._pool.forget(key)
        self._controller.wake(key)

    def pod_changed(self, key: JobKey) -> None:
        """The watch showed something new of a worker's pod."""
        self._controller.wake(key)

    def pod_gone(self, key: JobKey, uid: str) -> None:
        """The watch showed that a worker's pod is gone."""
        self._pool.gone(key, uid)
        self._tokens.forget(uid)
        self._controller.wake(key)


def _exporter(metrics: Metrics) -> web.Application:
    async def scrape(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/metrics", scrape)])
    return app
