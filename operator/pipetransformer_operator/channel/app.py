"""The channel's HTTP side: who asks, is the body sound, which board, which status code.

Status codes: 200 and 204 done; 204 on `GET generation` nothing new; 400 no JSON, 413 too long, 422 JSON that does not
fit (the text names the field); 401 the token is refused; 403 the token is another worker's or another job's; 409 the
report speaks of a generation that was never published; 410 on `GET generation` the job has ended; 503 ask again later.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from aiohttp import web
from pydantic import ValidationError

from pipetransformer_contract.messages import Heartbeat, HeartbeatReply, Ready, Report, ReportReply
from pipetransformer_contract.wire import Path, Wire

from .authenticator import Authenticator, CannotTell, Unauthenticated
from .board import Board, Ended, NotYetDurable, Reporter

MAX_BODY_BYTES = 64 * 1024
MAX_POLL_SECONDS = 60.0
DURABLE_SECONDS = 10.0
JOB_HEADER = "X-Pipetransformer-Job"
WORKER_HEADER = "X-Pipetransformer-Worker"

#: Counts a request by path and status code.
Count = Callable[[str, int], None]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Message = TypeVar("Message", bound=Wire)


class Channel:
    """Routes of `/v1`.

    Args:
        boards: by (namespace, job name); read at each request.
        authenticator: who holds a token.
        count: called after each request.
    """

    def __init__(
        self,
        boards: Mapping[tuple[str, str], Board],
        authenticator: Authenticator,
        count: Count = lambda path, code: None,
    ) -> None:
        self._boards = boards
        self._authenticator = authenticator
        self._count = count

    def application(self) -> web.Application:
        """A new application with all routes."""

        @web.middleware
        async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
            code = 500
            try:
                response = await handler(request)
                code = response.status
                return response
            except web.HTTPException as refusal:
                code = refusal.status
                raise
            finally:
                resource = request.match_info.route.resource
                self._count(resource.canonical if resource else "unknown", code)

        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[counted])
        app.add_routes(
            [
                web.post(Path.READY, self._ready),
                web.get(Path.GENERATION, self._generation),
                web.post(Path.HEARTBEAT, self._heartbeat),
                web.post(Path.REPORT, self._report),
            ]
        )
        return app

    async def _ready(self, request: web.Request) -> web.Response:
        board, reporter = await self._identify(request)
        board.put_ready(reporter, await _body(request, Ready))
        return web.Response(status=204)

    async def _generation(self, request: web.Request) -> web.Response:
        board, reporter = await self._identify(request)
        after = int(_number(request, "after"))
        timeout = min(_number(request, "timeoutSeconds"), MAX_POLL_SECONDS)
        try:
            generation = await board.generation_after(reporter, after, timeout=timeout)
        except Ended as error:
            raise web.HTTPGone(text=str(error)) from error
        return web.json_response(generation.to_wire()) if generation else web.Response(status=204)

    async def _heartbeat(self, request: web.Request) -> web.Response:
        board, reporter = await self._identify(request)
        board.put_heartbeat(reporter, await _body(request, Heartbeat))
        return web.json_response(HeartbeatReply(layout_generation=board.layout_generation).to_wire())

    async def _report(self, request: web.Request) -> web.Response:
        board, reporter = await self._identify(request)
        report = await _body(request, Report)
        if not board.belongs(reporter):
            raise web.HTTPForbidden(text=f"worker {reporter.name} is no member of the published generation")
        if report.layout_generation > board.layout_generation:
            raise web.HTTPConflict(
                text=f"layoutGeneration: {report.layout_generation} was never published,"
                f" the newest is {board.layout_generation}"
            )
        try:
            await board.put_report(reporter, report, timeout=DURABLE_SECONDS)
        except NotYetDurable as error:
            raise web.HTTPServiceUnavailable(text=str(error)) from error
        return web.json_response(ReportReply(layout_generation=board.layout_generation).to_wire())

    async def _identify(self, request: web.Request) -> tuple[Board, Reporter]:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise web.HTTPUnauthorized(text="Authorization: a bearer token is needed")
        try:
            identity = await self._authenticator.identify(token.strip())
        except Unauthenticated as error:
            raise web.HTTPUnauthorized(text=f"Authorization: {error}") from error
        except CannotTell as error:
            raise web.HTTPServiceUnavailable(text=str(error)) from error
        namespace, _, job = request.headers.get(JOB_HEADER, "").partition("/")
        if namespace != identity.namespace:
            raise web.HTTPForbidden(text=f"{JOB_HEADER}: the token belongs to a pod of namespace {identity.namespace}")
        if request.headers.get(WORKER_HEADER, identity.name) != identity.name:
            raise web.HTTPForbidden(text=f"{WORKER_HEADER}: the token belongs to pod {identity.name}")
        board = self._boards.get((namespace, job))
        if board is None or not board.shown:
            raise web.HTTPServiceUnavailable(text=f"{JOB_HEADER}: job {namespace}/{job} is not known here yet")
        reporter = Reporter(identity.name, identity.uid)
        if not board.knows(reporter):
            raise web.HTTPForbidden(text=f"pod {identity.name} is no worker of job {namespace}/{job}")
        return board, reporter


def _number(request: web.Request, name: str) -> float:
    text = request.query.get(name, "0")
    try:
        number = float(text)
    except ValueError as error:
        raise web.HTTPBadRequest(text=f"{name}: {text!r} is no number") from error
    if not 0 <= number < 2**53:
        raise web.HTTPBadRequest(text=f"{name}: {text!r} is out of range")
    return number


async def _body(request: web.Request, kind: type[Message]) -> Message:
    text = await request.text()
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        message = f"{field}: {first['msg']}" if field else first["msg"]
        if first["type"] == "json_invalid":
            raise web.HTTPBadRequest(text=message) from error
        raise web.HTTPUnprocessableEntity(text=message) from error
