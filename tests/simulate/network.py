"""The way between an operator and the API server: each request and each answer takes its time, or is lost.

It stands in for the HTTP client of the Kubernetes library, so the operator's own `Api` runs on it unmodified.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, Self

import aiohttp

from .api_server import ApiServer, Stream
from .loop import Process
from .trace import Trace

_MUTATING = ("POST", "PUT", "PATCH", "DELETE")


@dataclass
class Weather:
    """What is wrong with the way to the API server now.

    Attributes:
        away: no request arrives, and no answer.
        slow: seconds that requests take at most.
        lost_answers: share of writes that are done although their answer is lost.
        errors: share of requests that the server answers with 503.
        cut: names of operators that do not reach the server.
    """

    away: bool = False
    slow: float = 0.02
    lost_answers: float = 0.0
    errors: float = 0.0
    cut: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Write:
    """A request that changes something, as it was sent."""

    client: str
    sent: float
    method: str
    url: str
    body: Mapping[str, Any] | None


class Network:
    """See the module.

    Args:
        server: of the cluster.
        process: in whose context the server works.
        random: of latencies and losses.
        trace: is told of each request.
        late_answers: seconds that the answer to a write of a pod takes at most, beyond what every message takes.

    Attributes:
        writes: all writes that the server answered, with the status codes.
        failed: when a request last failed, in virtual seconds.
        on_sent: called with each write when it is sent.
        on_done: called with each write and its status code when the server has answered.
    """

    def __init__(self, server: ApiServer, process: Process, random: Random, trace: Trace, late_answers: float) -> None:
        self.server = server
        self.weather = Weather()
        self.writes: list[tuple[Write, int]] = []
        self.failed = float("-inf")
        self.on_sent: list[Callable[[Write], None]] = []
        self.on_done: list[Callable[[Write, int], None]] = []
        self._process = process
        self._random = random
        self._trace = trace
        self._late_answers = late_answers

    def latency(self) -> float:
        """Of one message, in seconds: mostly short, now and then as long as the weather allows."""
        return 0.001 + self.weather.slow * self._random.random() ** 2

    def unreachable(self, client: str) -> bool:
        """Whether nothing passes between the client and the server."""
        return self.weather.away or client in self.weather.cut

    def send(
        self,
        client: str,
        method: str,
        url: str,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        timeout: float,
    ) -> "asyncio.Future[Answer]":
        """Sends a request. The answer is an error if it does not come within `timeout` seconds."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        kind, accept = headers.get("Content-Type", ""), headers.get("Accept", "")
        context, there, back = self._process.context, self.latency(), self.latency()
        if "/pods" in url and method in _MUTATING:
            back += self._late_answers * self._random.random()
        write = Write(client, loop.time(), method, url, body) if method in _MUTATING else None
        if write is not None:
            for listener in self.on_sent:
                listener(write)
        if self.unreachable(client):
            loop.call_later(min(there, timeout), self._fail, answer, _connection_error(), context=context)
            return answer
        if there + back > timeout:
            loop.call_later(timeout, self._fail, answer, TimeoutError(), context=context)

        def arrive() -> None:
            if self.unreachable(client):
                loop.call_later(0.01, self._fail, answer, _connection_error())
                return
            if self._random.random() < self.weather.errors:
                code, text = 503, b"{}"
            else:
                code, text = self.server.answer(method, url, body, kind, accept, client)
            self._trace.note(client, method, url, code)
            if code >= 400:
                self.failed = loop.time()
            if write is not None:
                self.writes.append((write, code))
                for listener in self.on_done:
                    listener(write, code)
            lost = write is not None and self._random.random() < self.weather.lost_answers
            if lost or self.unreachable(client):
                loop.call_later(back, self._fail, answer, _connection_error())
            else:
                loop.call_later(back, _resolve, answer, Answer(code, text))

        loop.call_later(there, arrive, context=context)
        return answer

    def open(self, client: str, url: str, silence: float) -> "asyncio.Future[Answer]":
        """Opens a watch, which breaks after `silence` seconds without an event."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()

        def arrive() -> None:
            if self.unreachable(client):
                self._fail(answer, _connection_error())
                return
            self._trace.note(client, "WATCH", url, 200)
            _resolve(answer, Answer(200, b"", self.server.watch(url, client), silence))

        loop.call_later(self.latency(), arrive, context=self._process.context)
        return answer

    def _fail(self, answer: "asyncio.Future[Answer]", error: Exception) -> None:
        if not answer.done():
            self.failed = asyncio.get_running_loop().time()
            answer.set_exception(error)


class Answer:
    """An answer, with what the operator's client uses of aiohttp's."""

    def __init__(self, status: int, text: bytes, stream: Stream | None = None, silence: float = 0.0) -> None:
        self.status = status
        self.reason = str(status)
        self._text = text
        self._stream = stream
        self._silence = silence

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open."""

    async def read(self) -> bytes:
        return self._text

    @property
    def content(self) -> Self:
        return self

    def iter_any(self) -> AsyncIterator[bytes]:
        assert self._stream is not None
        return self._stream.iter_any(self._silence)


class Client:
    """What the operator's `Api` uses of the library's `ApiClient`.

    Args:
        network: to the API server.
        name: of the operator.
    """

    def __init__(self, network: Network, name: str) -> None:
        self.default_headers: dict[str, str] = {}
        self.configuration = SimpleNamespace(host="")
        self.rest_client = self
        self._network = network
        self._name = name

    async def update_params_for_auth(self, *_: object) -> None:
        """There are no credentials."""

    async def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Mapping[str, Any] | None,
        _request_timeout: float | aiohttp.ClientTimeout,
    ) -> SimpleNamespace:
        if isinstance(_request_timeout, aiohttp.ClientTimeout):
            return SimpleNamespace(response=await self._network.open(self._name, url, _request_timeout.sock_read or 0))
        sent = self._network.send(self._name, method, url, body, headers, _request_timeout)
        return SimpleNamespace(response=await sent)


def _connection_error() -> Exception:
    return aiohttp.ClientConnectionError("the connection broke")


def _resolve(answer: "asyncio.Future[Answer]", value: Answer) -> None:
    if not answer.done():
        answer.set_result(value)
