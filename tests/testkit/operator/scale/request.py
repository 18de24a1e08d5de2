"""HTTPS requests to the channel as a trainer sends them, for little processor time.

Thousands of workers live in one process here, so each connection must be cheap: TLS on memory buffers, no streams.
"""

import asyncio
import contextlib
import gzip
import json
import ssl
from collections.abc import AsyncIterator
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

    @contextlib.asynccontextmanager
    async def line(self, sender: str = "127.0.0.1") -> AsyncIterator["Line"]:
        """Requests one after another, on one connection until one of them fails. `sender` is its address of loopback:
        the channel limits what one address may ask, and each pod has its own."""
        line = Line(self._context, self._port, sender)
        try:
            yield line
        finally:
            line.close()


class Line:
    """See `ChannelClient.line`."""

    def __init__(self, context: ssl.SSLContext, port: int, sender: str) -> None:
        self._context = context
        self._port = port
        self._sender = sender
        self._connection: _Connection | None = None

    async def send(
        self, method: str, path: str, headers: dict[str, str], body: dict[str, Any] | None, timeout: float
    ) -> Any:
        """Sends one request; the JSON that was answered, None for 204.

        Raises:
            Refused: any status code but 2xx.
            OSError: no connection, or no answer within `timeout` seconds.
        """
        content = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}", "", ""]
        well = False
        try:
            async with asyncio.timeout(timeout):
                code, answered, text = await (await self._connected()).exchange("\r\n".join(lines).encode() + content)
            well = code < 300
        finally:
            if not well:
                self.close()
        if not well:
            raise Refused(code, text.decode(), float(answered.get("retry-after", 0)))
        if answered.get("content-encoding") == "gzip":
            text = gzip.decompress(text)
        return json.loads(text) if text else None

    def close(self) -> None:
        """Closes the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    async def _connected(self) -> "_Connection":
        if self._connection is None:
            loop = asyncio.get_running_loop()
            connection = _Connection(self._context)
            await loop.create_connection(lambda: connection, "127.0.0.1", self._port, local_addr=(self._sender, 0))
            self._connection = connection
        return self._connection


class _Connection(asyncio.Protocol):
    def __init__(self, context: ssl.SSLContext) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname="localhost")
        self._request: bytes | None = None
        self._answer: asyncio.Future[tuple[int, dict[str, str], bytes]] | None = None
        self._shaken = False
        self._read = b""

    async def exchange(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        """Sends it; status code, headers and body of the answer."""
        if self._transport.is_closing():
            raise ConnectionError("the channel closed the connection")
        self._request, self._read = request, b""
        self._answer = asyncio.get_running_loop().create_future()
        self._step()
        return await self._answer

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._in.write(data)
        self._step()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(error or ConnectionError("the channel closed the connection"))

    def _step(self) -> None:
        try:
            if not self._shaken:
                self._tls.do_handshake()
                self._shaken = True
            if self._request is not None:
                self._tls.write(self._request)
                self._request = None
            while data := self._tls.read(READ_BYTES):
                self._read += data
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        except ssl.SSLError as error:
            self._fail(error)
        if ready := self._out.read():
            self._transport.write(ready)
        self._parse()

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def _parse(self) -> None:
        head, separator, body = self._read.partition(b"\r\n\r\n")
        if not separator or self._answer is None or self._answer.done():
            return
        status, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if len(body) >= int(headers.get("content-length", 0)):
            self._answer.set_result((int(status.split()[1]), headers, body))
