"""A worker's client of the operator's channel: readiness, generations, heartbeats and reports over HTTP(S)."""

import contextlib
import gzip
import http.client
import json
import ssl
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import TypeVar
from urllib.parse import urlsplit

from pipetransformer_contract.messages import (
    Generation,
    GenerationNotice,
    Heartbeat,
    HeartbeatReply,
    Ready,
    Report,
    ReportReply,
)
from pipetransformer_contract.wire import ChannelPath, Wire

Answer = TypeVar("Answer", bound=Wire)

#: Longest pause between two attempts.
MAX_BACKOFF_SECONDS = 10.0
#: Timeout for opening a connection, including TLS. It is short, because the address of a deleted pod never answers.
CONNECT_SECONDS = 3.0


class ChannelUnavailableError(RuntimeError):
    """A request to the operator failed. Try again, but not within `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class JobEndedError(RuntimeError):
    """The operator answered that the job has ended (HTTP 410)."""


class _Connection(http.client.HTTPConnection):
    """A connection with two timeouts: `CONNECT_SECONDS` to open it, and `expect_within` for answers."""

    _answer_seconds: float | None = None

    def expect_within(self, seconds: float) -> None:
        """Set the timeout of the next answers, in seconds."""
        self._answer_seconds = seconds
        if self.sock is not None:
            self.sock.settimeout(seconds)

    def connect(self) -> None:
        self.timeout = CONNECT_SECONDS
        super().connect()
        self.sock.settimeout(self._answer_seconds)


class _SecureConnection(_Connection, http.client.HTTPSConnection):
    """The same over TLS."""


@dataclass(slots=True)
class _Kept:
    """Holds the connection that stays open between requests; None before the first and after a failure."""

    connection: _Connection | None = None

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None


@dataclass(frozen=True, slots=True)
class ChannelClient:
    """A client of the operator's HTTP API. Requests raise only `ChannelUnavailableError` and `JobEndedError`.

    Attributes:
        url: base URL of the operator.
        job: namespace/name of the job.
        worker: name of this worker.
        token_file: file with the bearer token; None to send none. It is read again for each request, because projected
            tokens are rotated in place.
        ca_file: file with the operator's certificate authorities; None for those of the system.
    """

    url: str
    job: str
    worker: str
    token_file: FilePath | None = None
    ca_file: FilePath | None = None
    _kept: _Kept | None = None

    @contextlib.contextmanager
    def kept(self) -> Iterator["ChannelClient"]:
        """Yield this channel with a connection that stays open between requests. Only one thread may use it.

        A failed request closes the connection, so that the next one can reach another replica of the operator.
        """
        kept = _Kept()
        try:
            yield replace(self, _kept=kept)
        finally:
            kept.close()

    def ready(self, address: str) -> None:
        """Tell the operator that this worker is warm and that its store listens at `address` (host:port)."""
        self._call("POST", ChannelPath.READY, Ready(address=address), 10)

    def notice(self, after: int, timeout_seconds: int) -> GenerationNotice | None:
        """Wait for a generation above `after` that names this worker, and return the notice of the newest one. None if
        none came within `timeout_seconds`."""
        body = self._poll(after, timeout_seconds)
        return _read(GenerationNotice, body) if body else None

    def generation(self, after: int, timeout_seconds: int) -> Generation | None:
        """Like `notice`, but return the generation with all its members. Call this on the leader, or if the leader is
        silent."""
        body = self._poll(after, timeout_seconds, "&members=true")
        return _read(Generation, body) if body else None

    def _poll(self, after: int, timeout_seconds: int, more: str = "") -> bytes:
        path = f"{ChannelPath.GENERATION}?after={after}&timeoutSeconds={timeout_seconds}{more}"
        return self._call("GET", path, None, timeout_seconds + 10)

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        """Send a heartbeat. Returns the operator's answer, which has the newest published generation."""
        return _read(HeartbeatReply, self._call("POST", ChannelPath.HEARTBEAT, beat, 10))

    def report(self, report: Report) -> ReportReply:
        """Send the leader's report. The operator answers once the job's status contains it."""
        return _read(ReportReply, self._call("POST", ChannelPath.REPORT, report, 30))

    def _call(self, method: str, path: str, message: Wire | None, timeout: float) -> bytes:
        data = None if message is None else json.dumps(message.to_wire()).encode()
        try:
            response, body = self._request(method, path, data, timeout)
        # The token's or the authorities' file may be unreadable too. It may be repaired before the next request.
        except (OSError, EOFError, ValueError, zlib.error, http.client.HTTPException) as error:
            raise ChannelUnavailableError(f"{method} {path}: {error}") from error
        if response.status == http.HTTPStatus.GONE:
            raise JobEndedError(f"{self.job} has ended")
        if response.status >= http.HTTPStatus.BAD_REQUEST:
            said = f"{method} {path}: HTTP {response.status} {response.reason}"
            raise ChannelUnavailableError(said, _retry_after(response.headers.get("Retry-After")))
        return body

    def _request(
        self, method: str, path: str, data: bytes | None, timeout: float
    ) -> tuple[http.client.HTTPResponse, bytes]:
        headers = {
            "X-Pipetransformer-Job": self.job,
            "X-Pipetransformer-Worker": self.worker,
            "Accept-Encoding": "gzip",
        }
        if self.token_file is not None:
            headers["Authorization"] = f"Bearer {self.token_file.read_text().strip()}"
        if data is not None:
            headers["Content-Type"] = "application/json"
        server, kept = urlsplit(self.url), self._kept or _Kept()
        connection, kept.connection = kept.connection or self._connection(), None
        try:
            connection.expect_within(timeout)
            connection.request(method, server.path.rstrip("/") + path, data, headers)
            response = connection.getresponse()
            body = response.read()
            if response.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self._kept is not None and response.status < http.HTTPStatus.BAD_REQUEST:
                kept.connection = connection
        finally:
            if kept.connection is None:
                connection.close()
        return response, body

    def _connection(self) -> _Connection:
        server = urlsplit(self.url)
        if server.scheme != "https":
            return _Connection(server.netloc)
        trust = ssl.create_default_context(cafile=str(self.ca_file) if self.ca_file else None)
        return _SecureConnection(server.netloc, context=trust)


def _read(kind: type[Answer], body: bytes) -> Answer:
    """Parse an answer. Raises `ChannelUnavailableError` if something else sent it, such as a proxy."""
    try:
        return kind.model_validate_json(body)
    except ValueError as error:
        raise ChannelUnavailableError(f"the answer is not a valid {kind.__name__}: {error}") from error


def _retry_after(said: str | None) -> float:
    """Return the seconds of a `Retry-After` header, at most 60; 0 without one. The operator never sends a date."""
    text = (said or "").strip()
    return min(60.0, float(text)) if text.isdecimal() else 0.0


class Backoff:
    """Pauses between attempts, which double from half a second to `MAX_BACKOFF_SECONDS`. A pause ends early when `stop`
    is set."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._seconds = 0.5

    def wait(self, at_least: float = 0.0) -> None:
        """Pause, for `at_least` seconds if the operator asked for them."""
        self._stop.wait(max(self._seconds, at_least))
        self._seconds = min(self._seconds * 2, MAX_BACKOFF_SECONDS)

    def reset(self) -> None:
        """Begin with the shortest pause again, after a success."""
        self._seconds = 0.5
