"""kopf's connection to the API server, which tells listeners of each request and answer."""

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Protocol

import aiohttp
import kopf
from yarl import URL

from pipetransformer_operator.kube.client.api import RequestListener, proxy
from pipetransformer_operator.kube.client.verbs import describe

FIRST_BACKOFFS = (0.5, 1.0, 2.0, 5.0)
LONGEST_BACKOFF = 10.0


class Backoffs:
    """Endless pauses between attempts of one request, because an operator outlives any outage of the API server."""

    def __iter__(self) -> Iterator[float]:
        yield from FIRST_BACKOFFS
        while True:
            yield LONGEST_BACKOFF


class AnswerListener(Protocol):
    """Is told of the API server's answers to kopf."""

    def on_answer(self, path: str, code: int, *, watch: bool) -> None:
        """A request for this path was answered with the HTTP status code. `watch`: it opens a watch."""
        ...


class Logins:
    """Opens kopf's connections, later and later if the API server refuses the credentials of each.

    kopf itself would log in again at once, endlessly, because it compares sessions and not credentials.

    Args:
        answers: is told of each answer.
        requests: is told of each request.
    """

    def __init__(self, answers: AnswerListener, requests: RequestListener) -> None:
        self._answers = answers
        self._requests = requests
        self._refused = False
        self._pauses = iter(Backoffs())

    async def log_in(self, **kwargs: Any) -> kopf.AiohttpSession | None:
        """Opens a session with the credentials that kopf finds; None if it finds none.

        Args:
            kwargs: what kopf passes to a login handler.
        """
        if self._refused:
            await asyncio.sleep(next(self._pauses))
        info = kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)
        if info is None:
            return None
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
            headers=info.as_http_headers(),
            proxy=info.proxy_url or proxy(info.server),
            trace_configs=[_Trace(self, self._requests).config()],
        )
        return kopf.AiohttpSession(
            server=info.server,
            aiohttp_session=session,
            default_namespace=info.default_namespace,
            expiration=info.expiration,
        )

    def on_answer(self, path: str, code: int, *, watch: bool) -> None:
        """See `AnswerListener`."""
        self._refused = code == 401
        if not self._refused:
            self._pauses = iter(Backoffs())
        self._answers.on_answer(path, code, watch=watch)


class _Trace:
    """Passes aiohttp's events of each request on to the listeners."""

    def __init__(self, answers: AnswerListener, requests: RequestListener) -> None:
        self._answers = answers
        self._requests = requests

    def config(self) -> aiohttp.TraceConfig:
        trace = aiohttp.TraceConfig()
        trace.on_request_start.append(self._on_start)
        trace.on_request_end.append(self._on_end)
        trace.on_request_exception.append(self._on_exception)
        return trace

    async def _on_start(
        self, session: aiohttp.ClientSession, context: SimpleNamespace, request: aiohttp.TraceRequestStartParams
    ) -> None:
        context.started = time.perf_counter()

    async def _on_end(
        self, session: aiohttp.ClientSession, context: SimpleNamespace, request: aiohttp.TraceRequestEndParams
    ) -> None:
        code = request.response.status
        self._tell(request.method, request.url, context, code)
        self._answers.on_answer(request.url.path, code, watch=_watches(request.url))

    async def _on_exception(
        self, session: aiohttp.ClientSession, context: SimpleNamespace, request: aiohttp.TraceRequestExceptionParams
    ) -> None:
        self._tell(request.method, request.url, context, None)

    def _tell(self, method: str, url: URL, context: SimpleNamespace, code: int | None) -> None:
        verb, resource = describe(method, url.path, watch=_watches(url))
        self._requests.on_api_request(verb, resource, code, time.perf_counter() - context.started)


def _watches(url: URL) -> bool:
    return url.query.get("watch") == "true"
