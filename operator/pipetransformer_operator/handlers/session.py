"""kopf's connection to the API server, with an ear on its watches."""

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import kopf
from yarl import URL

from pipetransformer_operator.kube.client.api import Count
from pipetransformer_operator.kube.client.verbs import describe

FIRST_BACKOFFS = (0.5, 1.0, 2.0, 5.0)
LONGEST_BACKOFF = 10.0


class Backoffs:
    """Waits between attempts of one request, without an end: an operator outlives any outage of the API server."""

    def __iter__(self) -> Iterator[float]:
        yield from FIRST_BACKOFFS
        while True:
            yield LONGEST_BACKOFF


async def log_in(answered: Callable[[str, bool, int], None], count: Count, **kwargs: Any) -> kopf.AiohttpSession | None:
    """A session with the credentials that kopf finds.

    Args:
        answered: told of each answer: the path, whether it is a watch, and the HTTP status code.
        count: told of each request.
        kwargs: kopf's.
    """
    info = kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)
    if info is None:
        return None

    async def began(
        session: aiohttp.ClientSession, context: SimpleNamespace, request: aiohttp.TraceRequestStartParams
    ) -> None:
        context.started = time.perf_counter()

    async def ended(
        session: aiohttp.ClientSession, context: SimpleNamespace, request: aiohttp.TraceRequestEndParams
    ) -> None:
        note(request, context, request.response.status)
        answered(request.url.path, _watches(request.url), request.response.status)

    async def failed(
        session: aiohttp.ClientSession, context: SimpleNamespace, request: aiohttp.TraceRequestExceptionParams
    ) -> None:
        note(request, context, None)

    def note(
        request: aiohttp.TraceRequestEndParams | aiohttp.TraceRequestExceptionParams,
        context: SimpleNamespace,
        code: int | None,
    ) -> None:
        verb, resource = describe(request.method, request.url.path, watch=_watches(request.url))
        count(verb, resource, code, time.perf_counter() - context.started)

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(began)
    trace.on_request_end.append(ended)
    trace.on_request_exception.append(failed)
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        trace_configs=[trace],
    )
    return kopf.AiohttpSession(
        server=info.server,
        aiohttp_session=session,
        default_namespace=info.default_namespace,
        expiration=info.expiration,
    )


def _watches(url: URL) -> bool:
    return url.query.get("watch") == "true"
