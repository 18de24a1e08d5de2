"""kopf's connection to the API server, with an ear on its watches."""

from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import kopf

FIRST_BACKOFFS = (0.5, 1.0, 2.0, 5.0)
LONGEST_BACKOFF = 10.0


class Backoffs:
    """Waits between attempts of one request, without an end: an operator outlives any outage of the API server."""

    def __iter__(self) -> Iterator[float]:
        yield from FIRST_BACKOFFS
        while True:
            yield LONGEST_BACKOFF


async def log_in(opened: Callable[[str], None], **kwargs: Any) -> kopf.AiohttpSession | None:
    """A session with the credentials that kopf finds, which tells the path of each watch that the server opens."""
    info = kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)
    if info is None:
        return None

    async def ended(session: aiohttp.ClientSession, context: object, request: aiohttp.TraceRequestEndParams) -> None:
        if request.response.status == 200 and request.url.query.get("watch") == "true":
            opened(request.url.path)

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(ended)
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
