"""The channel's HTTP side: checks the sender, its rate and the body of a request, and passes it to the job's board.

200 and 204 mean success (204 on `GET generation`: nothing new). Everything else is a `Refusal`, which has a status code
and a name in the metrics.
"""

import asyncio
import logging
import math
import sys
import time
from collections.abc import Mapping
from typing import TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import ValidationError

from pipetransformer_contract.messages import Heartbeat, HeartbeatReply, Ready, Report, ReportReply
from pipetransformer_contract.wire import ChannelPath, Wire
from pipetransformer_operator.clocks import Stopwatch

from .announcement import Announcement
from .authenticator import Authenticator, CannotTell, Identity, Unauthenticated
from .board import Board, Ended, NotYetDurable
from .limits.rate import Rate
from .listener import NO_LISTENER, ChannelListener
from .refusal import Refusal, RefusedError
from .tls.buffers import WRITE_BYTES

logger = logging.getLogger(__name__)
MAX_BODY_BYTES = 64 * 1024
MAX_POLL_SECONDS = 60.0
DURABLE_SECONDS = 10.0
#: Seconds until a worker may try again if too many polls wait.
FULL_SECONDS = 20.0
#: Polls of members and leavers may exceed the limit of waiting polls by this percentage of it.
MEMBERS_EXTRA_PERCENT = 10
#: Timeout for reading an answer with all members.
WHOLE_SECONDS = 10.0
#: Timeout for receiving the body of a request.
BODY_SECONDS = 10.0
JSON = "application/json"
JOB_HEADER = "X-Pipetransformer-Job"
WORKER_HEADER = "X-Pipetransformer-Worker"
#: Requests of one worker: how many a second in the long run, and how many at once. A worker sends a heartbeat every
#: 2 s, polls every 20 s, and reports at most a few times a second.
WORKER_RATE = (50.0, 100)
#: Bad or unknown tokens from one address: how many a second in the long run, and how many at once. Each costs the API
#: server a review.
BAD_TOKEN_RATE = (1.0, 20)
#: Status codes of refusals that are logged.
LOGGED = (401, 403, 429)
#: Logged refusals of one kind to one address: how many a second in the long run, and how many at once. All are counted.
LOG_RATE = (0.1, 5)

Message = TypeVar("Message", bound=Wire)


class Channel:
    """Routes of `/v1`.

    Args:
        boards: by (namespace, job name); read at each request.
        authenticator: identifies the sender of a request.
        listener: is told of each request and each refusal.
        most_polls: polls that may wait at a time. Members may have a few more, because they must hear of the next
            generation at once.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        boards: Mapping[tuple[str, str], Board],
        authenticator: Authenticator,
        listener: ChannelListener = NO_LISTENER,
        most_polls: int = sys.maxsize,
        clock: Stopwatch = time.monotonic,
    ) -> None:
        self._boards = boards
        self._authenticator = authenticator
        self._listener = listener
        self._most_polls = most_polls
        self._polls = 0
        self._workers = Rate(*WORKER_RATE, clock)
        self._bad_tokens = Rate(*BAD_TOKEN_RATE, clock)
        self._logged = Rate(*LOG_RATE, clock)

    @property
    def polls(self) -> int:
        """How many long-polls wait for an answer now."""
        return self._polls

    def application(self) -> web.Application:
        """A new application with all routes."""

        @web.middleware
        async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
            started, code = time.perf_counter(), 500
            try:
                response = await handler(request)
                code = response.status
                return response
            except RefusedError as error:
                code = error.kind.code
                return self._refused(request, error)
            except Ended as error:
                code = Refusal.ENDED.code
                return self._refused(request, RefusedError(Refusal.ENDED, str(error)))
            except web.HTTPException as unknown:  # no such path or method
                code = unknown.status
                raise
            finally:
                resource = request.match_info.route.resource
                path = resource.canonical if resource else "unknown"
                self._listener.on_request(path, code, time.perf_counter() - started)

        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[counted])
        app.add_routes(
            [
                web.post(ChannelPath.READY, self._ready),
                web.get(ChannelPath.GENERATION, self._generation),
                web.post(ChannelPath.HEARTBEAT, self._heartbeat),
                web.post(ChannelPath.REPORT, self._report),
            ]
        )
        return app

    async def _ready(self, request: web.Request) -> web.Response:
        board, sender = await self._identify(request)
        board.put_ready(sender, await _body(request, Ready))
        return web.Response(status=204)

    async def _generation(self, request: web.Request) -> web.StreamResponse:
        board, sender = await self._identify(request)
        after = int(_number(request, "after"))
        timeout = min(_number(request, "timeoutSeconds"), MAX_POLL_SECONDS)
        extra = math.ceil(self._most_polls * MEMBERS_EXTRA_PERCENT / 100) if board.belongs(sender) else 0
        full = self._polls >= self._most_polls + extra
        self._polls += 1
        try:
            announced = await board.generation_after(sender, after, timeout=0 if full else timeout)
        finally:
            self._polls -= 1
        if full and timeout and announced is None:
            text = f"{self._most_polls + extra} workers already wait for a generation"
            raise RefusedError(Refusal.TOO_MANY, text, retry_after=FULL_SECONDS)
        if announced is None:
            return web.Response(status=204)
        if request.query.get("members") == "true":
            return await _whole(request, announced)
        return web.Response(body=announced.notice, content_type=JSON)

    async def _heartbeat(self, request: web.Request) -> web.Response:
        board, sender = await self._identify(request)
        pause = board.put_heartbeat(sender, await _body(request, Heartbeat))
        reply = HeartbeatReply(
            layout_generation=board.layout_generation,
            next_seconds=pause,
            stop=board.stop,
            checkpoint_request=board.checkpoint_request,
        )
        return web.json_response(reply.to_wire())

    async def _report(self, request: web.Request) -> web.Response:
        board, sender = await self._identify(request)
        report = await _body(request, Report)
        if not board.belongs(sender):
            text = f"worker {sender.name} is not a member of the published generation"
            raise RefusedError(Refusal.NOT_MEMBER, text)
        if report.job_uid != board.job_uid:
            text = f"jobUid: {report.job_uid!r} is not the UID of the present job"
            raise RefusedError(Refusal.FOREIGN_JOB, text)
        if report.layout_generation > board.layout_generation:
            raise RefusedError(
                Refusal.UNPUBLISHED,
                f"layoutGeneration: {report.layout_generation} was never published,"
                f" the newest is {board.layout_generation}",
            )
        if report.boundary > report.num_layers:
            text = f"boundary: cannot freeze {report.boundary} of {report.num_layers} layers"
            raise RefusedError(Refusal.DOES_NOT_FIT, text)
        try:
            await board.put_report(sender, report, timeout=DURABLE_SECONDS)
        except NotYetDurable as error:
            raise RefusedError(Refusal.NOT_DURABLE, str(error)) from error
        reply = ReportReply(
            layout_generation=board.layout_generation,
            next_seconds=board.pulse.report_seconds,
            checkpoint_request=board.checkpoint_request,
        )
        return web.json_response(reply.to_wire())

    async def _identify(self, request: web.Request) -> tuple[Board, Identity]:
        identity = await self._authenticate(request)
        if wait := self._workers.take(identity.uid):
            raise RefusedError(Refusal.TOO_MANY, f"worker {identity.name} asks too often", retry_after=wait)
        namespace, _, job = request.headers.get(JOB_HEADER, "").partition("/")
        if namespace != identity.namespace:
            text = f"{JOB_HEADER}: the token belongs to a pod of namespace {identity.namespace}"
            raise RefusedError(Refusal.FOREIGN_NAMESPACE, text)
        if request.headers.get(WORKER_HEADER, identity.name) != identity.name:
            text = f"{WORKER_HEADER}: the token belongs to pod {identity.name}"
            raise RefusedError(Refusal.FOREIGN_WORKER, text)
        board = self._boards.get((namespace, job))
        if board is None or not board.shown:
            text = f"{JOB_HEADER}: this operator does not know job {namespace}/{job} yet"
            raise RefusedError(Refusal.UNKNOWN_JOB, text)
        if not board.knows(identity):
            text = f"pod {identity.name} is not a worker of job {namespace}/{job}"
            raise RefusedError(Refusal.FOREIGN_JOB, text)
        return board, identity

    async def _authenticate(self, request: web.Request) -> Identity:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        token = token.strip() if scheme.lower() == "bearer" and token.isascii() else ""
        if known := self._authenticator.known(token):
            return known
        # A token counts as bad until its review ends; otherwise all tokens that arrive together would be reviewed.
        if wait := self._bad_tokens.take(request.remote):
            raise RefusedError(Refusal.TOO_MANY, "too many unknown tokens from this address", retry_after=wait)
        if not token:
            raise RefusedError(Refusal.NO_TOKEN, "Authorization: a bearer token is required")
        try:
            identity = await self._authenticator.identify(token)
        except Unauthenticated as error:
            raise RefusedError(Refusal.INVALID_TOKEN, f"Authorization: {error}") from error
        except CannotTell as error:
            self._bad_tokens.undo(request.remote)
            raise RefusedError(Refusal.CANNOT_TELL, str(error)) from error
        self._bad_tokens.undo(request.remote)
        return identity

    def _refused(self, request: web.Request, error: RefusedError) -> web.Response:
        """Counts a refusal and returns its answer. For refusals of the codes `LOGGED`, a rate-limited line logs the job
        and the worker that the sender claims to be, but never the token."""
        self._listener.on_refusal(error.kind)
        text = error.text.encode(errors="backslashreplace").decode()  # it may quote a header of any bytes
        # All addresses share one log budget, because 10,000 workers that wait to join have as many addresses.
        sender = None if error.kind is Refusal.TOO_MANY else request.remote
        if error.kind.code in LOGGED and not self._logged.take((sender, error.kind)):
            claims = {name: request.headers.get(name, "")[:300] for name in (JOB_HEADER, WORKER_HEADER)}
            logger.warning("%s %s from %s: %r: %s", request.method, request.path, request.remote, claims, text)
        headers = {"Retry-After": str(math.ceil(error.retry_after))} if error.retry_after else {}
        return web.Response(status=error.kind.code, text=text, headers=headers)


async def _whole(request: web.Request, announced: Announcement) -> web.StreamResponse:
    """Answers with all members. Only a few such answers are in flight at a time, because thousands would take memory.
    If the worker does not read the answer in time, the connection is aborted."""
    compressed = "gzip" in request.headers.get("Accept-Encoding", "")
    body = announced.compressed if compressed else announced.whole
    response = web.StreamResponse(headers={"Content-Encoding": "gzip"} if compressed else {})
    response.content_type, response.content_length = JSON, len(body)
    async with announced.slots:
        await asyncio.sleep(0)
        if (transport := request.transport) is None:
            return response  # the worker has gone
        transport.set_write_buffer_limits(high=WRITE_BYTES)
        try:
            async with asyncio.timeout(WHOLE_SECONDS):
                await response.prepare(request)
                for first in range(0, len(body), WRITE_BYTES):
                    await response.write(body[first : first + WRITE_BYTES])
                    await request.writer.drain()
        except (TimeoutError, ConnectionError):
            transport.abort()
    return response


def _number(request: web.Request, name: str) -> float:
    text = request.query.get(name, "0")
    try:
        number = float(text)
    except ValueError as error:
        raise RefusedError(Refusal.BAD_QUERY, f"{name}: {text!r} is not a number") from error
    if not 0 <= number < 2**53:
        raise RefusedError(Refusal.BAD_QUERY, f"{name}: {text!r} is out of range")
    return number


async def _body(request: web.Request, kind: type[Message]) -> Message:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await request.read()
    except TimeoutError as error:
        raise RefusedError(Refusal.NO_JSON, f"the body did not arrive within {BODY_SECONDS:g} s") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise RefusedError(Refusal.TOO_LONG, f"the body has more than {MAX_BODY_BYTES} bytes") from error
    except web.RequestPayloadError as error:
        raise RefusedError(Refusal.NO_JSON, f"the body cannot be read: {error}") from error
    except ConnectionError as error:
        raise RefusedError(Refusal.NO_JSON, "the connection broke before the body was complete") from error
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        words = first["msg"].removeprefix("Value error, ")
        message = f"{field}: {words}" if field else words
        wrong = Refusal.NO_JSON if first["type"] == "json_invalid" else Refusal.DOES_NOT_FIT
        raise RefusedError(wrong, message) from error
