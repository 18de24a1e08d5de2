"""One operator in a process of its own: its real parts, on the simulated way to the API server and to its workers.

Two things stand in for real ones: `_Kopf` for kopf's watch of jobs, and `Front` for sockets and TLS.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

import aiohttp
from aiohttp import web
from kubernetes.aio import client

from pipetransformer_contract.api.requests import jobs_path
from pipetransformer_operator.assembly import Assembly
from pipetransformer_operator.clocks import Sources
from pipetransformer_operator.controller.ports import Unavailable
from pipetransformer_operator.health import Health
from pipetransformer_operator.kube.client.api import REQUEST_FAILED, Api
from pipetransformer_operator.kube.client.lease import Lease, LeaseLost
from pipetransformer_operator.kube.watched import AWAITED
from pipetransformer_operator.kube.watches.follow import WATCH_SECONDS
from pipetransformer_operator.kube.workers.protection import release_budgets
from pipetransformer_operator.settings import Settings

from .loop import Process
from .network import Client, Network
from .trace import Trace
from .trainer import NoAnswer, Said, Worker

logger = logging.getLogger(__name__)
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
NAMESPACE = "default"
LEASE_SECONDS = 15
_CONNECT_SECONDS, _ANSWER_SECONDS = 3.0, 30.0
_RETRIES = (0.5, 1.0, 2.0, 5.0, 10.0)


def virtual_now() -> datetime:
    """The time of the running loop."""
    return EPOCH + timedelta(seconds=asyncio.get_running_loop().time())


class _Trusted:
    """Certificates that never change."""

    trusted = b"certificate"


class Operator:
    """See the module.

    Args:
        name: of its process.
        network: to the API server.
        random: of its ids.
        on_lost: called when it ends because it lost the Lease.
    """

    def __init__(self, name: str, network: Network, random: Random, on_lost: Callable[[], object]) -> None:
        self.name = name
        self._on_lost = on_lost
        self.process = Process(name)
        self.ended = False
        #: Whether it ever knew that it holds the Lease.
        self.led = False
        #: Not a set: it would have the order of the futures' addresses in memory, which differ between processes.
        self.calls: dict[asyncio.Future[Said], None] = {}
        self._network = network
        sources = Sources(
            now=virtual_now,
            seconds=asyncio.get_running_loop().time,
            token=lambda size: f"{random.getrandbits(8 * size):0{2 * size}x}",
        )
        settings = Settings(
            namespace="system", identity=name, channel_url="https://channel", lease_seconds=LEASE_SECONDS
        )
        way = cast(client.ApiClient, Client(network, name))
        self.lease = Lease(Api(way), "system", f"system/{name}", seconds=LEASE_SECONDS, sources=sources)
        self._api = Api(way, self.lease)
        kinds, patience = ["pipetrainingjobs", "pods"], 2 * WATCH_SECONDS + 30
        self.health = Health(kinds, self.lease, refusable=AWAITED, patience=patience, clock=sources.seconds)
        self.assembly = Assembly(settings, self._api, self.lease, _Trusted(), self.health, sources=sources)
        self._front = _Front(self.assembly)
        self._parts: list[asyncio.Task[None]] = []
        self._running = self.process.start(self._run())

    @property
    def serves(self) -> bool:
        """Whether workers are sent to it."""
        return not self.ended and self.process.alive and self.health.ready

    @property
    def stays(self) -> bool:
        """Whether it serves, and was not told to end."""
        return self.serves and not self._running.cancelling()

    def kill(self) -> None:
        """Its process ends without notice."""
        self.process.kill()
        self._hang_up()

    def stop(self) -> None:
        """It is told to end. To be told again changes nothing, as with a second SIGTERM."""
        if not self._running.cancelling():
            self._running.cancel()

    async def answer(self, call: "_Call") -> Said:
        """What its channel says to a worker. Runs in its process."""
        return await self._front.answer(call)

    def _hang_up(self) -> None:
        self.ended = True
        for watch in [watch for watch in self._network.server.watches if watch.client == self.name]:
            self._network.server.close(watch)
        for call in list(self.calls):
            if not call.done():
                call.set_exception(NoAnswer("the connection broke"))

    async def _run(self) -> None:
        """As `handlers.operate` and `service.Service` do. No `finally`, because a killed process runs none."""
        try:
            await self.lease.acquire()
            self.led = True
            kopf = _Kopf(self._api, self.assembly, self.health)
            parts = [self.lease.keep(), self._watch(), kopf.run()]
            self._parts = [asyncio.create_task(part) for part in parts]
            await asyncio.wait(self._parts, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            logger.info("%s is told to end", self.name)
        for task in self._parts:
            task.cancel()
        ends = await asyncio.gather(*self._parts, return_exceptions=True)
        await self._stop()
        self._hang_up()
        for end in ends:
            if isinstance(end, LeaseLost):
                self._on_lost()
            elif isinstance(end, Exception):
                raise end

    async def _watch(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for one in self.assembly.watching:
                tasks.create_task(one.run())

    async def _stop(self) -> None:
        await self.assembly.controller.stop()
        if self.lease.held:
            try:
                async with asyncio.timeout(15):
                    await release_budgets(self._api, [])
            except (Unavailable, TimeoutError):
                pass
        await self.lease.release()


class _Kopf:
    """Watches as kopf does: after a failure it lists again, and does not say which objects are gone."""

    def __init__(self, api: Api, assembly: Assembly, health: Health) -> None:
        self._api = api
        self._assembly = assembly
        self._health = health

    async def run(self) -> None:
        """Watches the jobs endlessly."""
        path, jobs, failures = jobs_path(None), self._assembly.cluster.jobs, 0
        while True:
            try:
                version = await self._list(path)
                failures = 0
                while True:
                    watch = self._api.watch(
                        path, version, WATCH_SECONDS, opened=lambda: self._health.on_watch_opened(path)
                    )
                    async for event in watch:
                        version = event["object"]["metadata"]["resourceVersion"]
                        if event["type"] != "BOOKMARK":
                            (jobs.drop if event["type"] == "DELETED" else jobs.note)(event["object"])
            except REQUEST_FAILED:
                await asyncio.sleep(_RETRIES[min(failures, len(_RETRIES) - 1)])
                failures += 1

    async def _list(self, path: str) -> str:
        version, jobs = "", self._assembly.cluster.jobs
        async for part in self._api.list(path):
            version = part["metadata"]["resourceVersion"]
            jobs.on_listed(path)
            for one in part["items"]:
                jobs.note(one)
        return version


class _Front:
    """Calls the channel's own routes with requests that came by no socket."""

    def __init__(self, assembly: Assembly) -> None:
        app = assembly.channel.application()
        self._middleware: Any = app.middlewares[0]
        self._routes = {
            (route.method, route.resource.canonical): route
            for route in app.router.routes()
            if route.resource is not None
        }

    async def answer(self, call: "_Call") -> Said:
        """The answer to one request."""
        url = urlsplit(call.path)
        route = self._routes[call.method, url.path]
        request = _Request(call.worker, call.method, url.path, dict(parse_qsl(url.query)), call.body, route)
        response: web.StreamResponse = await self._middleware(request, route.handler)
        if isinstance(response, web.Response):
            text = response.body
            return Said(response.status, text if isinstance(text, bytes) else b"")
        return Said(response.status, bytes(request.written))


class _Request:
    """What the channel uses of aiohttp's request, and of the writer of its answer."""

    version = aiohttp.HttpVersion11
    keep_alive = True
    remote = "10.0.0.1"

    def __init__(self, worker: Worker, method: str, path: str, query: Mapping[str, str], body: Any, route: Any) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = {
            "Authorization": f"Bearer {token_of(worker)}",
            "X-Pipetransformer-Job": f"{worker.namespace}/{worker.job_name}",
            "X-Pipetransformer-Worker": worker.name,
        }
        self.match_info = SimpleNamespace(route=route)
        self.transport = self.writer = self._payload_writer = self
        self.written = bytearray()
        self.length: int | None = None
        self._body = body

    async def read(self) -> bytes:
        return json.dumps(self._body).encode()

    async def _prepare_hook(self, response: object) -> None:
        """There are no signals."""

    async def write_headers(self, *_: object) -> None:
        """Nobody reads them."""

    def send_headers(self) -> None:
        """Nobody reads them."""

    def set_write_buffer_limits(self, high: int) -> None:
        """There is no buffer."""

    async def write(self, chunk: bytes) -> None:
        self.written += chunk

    async def drain(self) -> None:
        """Nothing waits."""


def token_of(worker: Worker) -> str:
    """The pod's token: it never expires in a life, and names its pod."""
    return f"x.eyJleHAiOiA5ZTl9.{worker.uid}"


@dataclass(frozen=True, slots=True)
class _Call:
    """A request of a worker that is on its way to an operator, or back."""

    worker: Worker
    method: str
    path: str
    body: dict[str, Any] | None
    answer: "asyncio.Future[Said]"


class Service:
    """The way from workers to the operator that serves (`Way`).

    Args:
        process: in whose context messages travel.
        network: of the operators, for its latency.
        trace: is told of each message.

    Attributes:
        operators: all, the newest last.
        cut_nodes: names of nodes whose workers reach no operator.
    """

    def __init__(self, process: Process, network: Network, trace: Trace) -> None:
        self.operators: list[Operator] = []
        self.cut_nodes: set[str] = set()
        self._process = process
        self._network = network
        self._trace = trace

    async def call(self, worker: Worker, method: str, path: str, body: dict[str, Any] | None) -> Said:
        """See `Way`."""
        operator = next((one for one in self.operators if one.serves), None)
        if operator is None or worker.node in self.cut_nodes:
            await asyncio.sleep(_CONNECT_SECONDS if worker.node in self.cut_nodes else 0.05)
            raise NoAnswer
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Said] = loop.create_future()
        operator.calls[answer] = None
        timer = loop.call_later(_ANSWER_SECONDS, _give_up, answer)
        call = _Call(worker, method, path, body, answer)
        loop.call_later(self._latency(), self._arrive, operator, call, context=self._process.context)
        try:
            said = await answer
        finally:
            timer.cancel()
            operator.calls.pop(answer, None)
        self._trace.note(worker.name, method, path, said.code)
        return said

    def _latency(self) -> float:
        return self._network.latency()

    def _arrive(self, operator: Operator, call: _Call) -> None:
        if operator.process.alive and not operator.ended:
            operator.process.start(self._handle(operator, call))

    async def _handle(self, operator: Operator, call: _Call) -> None:
        said = await operator.answer(call)
        loop, context = asyncio.get_running_loop(), self._process.context
        loop.call_later(self._latency(), self._come_back, call, said, context=context)

    def _come_back(self, call: _Call, said: Said) -> None:
        if not call.answer.done() and call.worker.node not in self.cut_nodes:
            call.answer.set_result(said)


def _give_up(answer: "asyncio.Future[Said]") -> None:
    if not answer.done():
        answer.set_exception(NoAnswer("timeout"))
