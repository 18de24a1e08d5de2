"""One HTTPS request to the channel on a connection of its own, as a trainer sends it, for little processor time.

Thousands of workers live in one process here, so each connection must be cheap: TLS on memory buffers, no streams.
"""

import asyncio
import json
import ssl
from typing import Any

READ_BYTES = 65536


class Refused(Exception):
    """The channel did not serve the request."""

    def __init__(self, code: int, text: str, retry_after: float) -> None:
        super().__init__(f"{code} {text}")
        self.code = code
        self.retry_after = retry_after


class ChannelClient:
    """A channel as one process of many workers sees it.

    Args:
        port: on loopback.
        trusted: PEM of the authorities that sign it.
    """

    def __init__(self, port: int, trusted: str) -> None:
        self._port = port
        self._context = ssl.create_default_context(cadata=trusted)

    async def send(
        self, method: str, path: str, headers: dict[str, str], body: dict[str, Any] | None, timeout: float
    ) -> Any:
        """Sends one request; the JSON that was answered, None for 204.

        Raises:
            Refused: any status code but 2xx.
            OSError: no connection, or no answer within `timeout` seconds.
        """
        content = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}", "", ""]
        loop = asyncio.get_running_loop()
        exchange = _Exchange(self._context, "\r\n".join(lines).encode() + content, loop.create_future())
        async with asyncio.timeout(timeout):
            transport, _ = await loop.create_connection(lambda: exchange, "127.0.0.1", self._port)
            try:
                code, answered, text = await exchange.answer
            finally:
                exchange.answer.cancel()  # nobody waits any more
                transport.close()
        if code >= 300:
            raise Refused(code, text.decode(), float(answered.get("retry-after", 0)))
        return json.loads(text) if text else None


class _Exchange(asyncio.Protocol):
    def __init__(
        self, context: ssl.SSLContext, request: bytes, answer: "asyncio.Future[tuple[int, dict[str, str], bytes]]"
    ) -> None:
        self.answer = answer
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname="localhost")
        self._request: bytes | None = request
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._step()

    def data_received(self, data: bytes) -> None:
        self._in.write(data)
        self._step()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.answer.done():
            self.answer.set_exception(error or ConnectionError("the channel closed the connection"))

    def _step(self) -> None:
        try:
            if self._request is not None:
                self._tls.do_handshake()
                self._tls.write(self._request)
                self._request = None
            while data := self._tls.read(READ_BYTES):
                self._read += data
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        except ssl.SSLError as error:
            if not self.answer.done():
                self.answer.set_exception(error)
        if ready := self._out.read():
            self._transport.write(ready)
        self._parse()

    def _parse(self) -> None:
        head, separator, body = self._read.partition(b"\r\n\r\n")
        if not separator or self.answer.done():
            return
        status, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if len(body) >= int(headers.get("content-length", 0)):
            self.answer.set_result((int(status.split()[1]), headers, body))
