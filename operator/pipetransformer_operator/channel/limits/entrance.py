"""Bounds the connections of the channel, in total and by address, so that no job's pods shut out those of others.

Connections are counted when they are accepted, before TLS and before any token: a silent one also takes a file and
memory. A connection above the bounds is closed at once, and the worker tries again.
"""

import asyncio
import logging
import resource
import socket
import ssl
import sys
from collections import Counter

from aiohttp import web

from pipetransformer_operator.channel.listener import NO_LISTENER, ChannelListener

from .rate import Rate

logger = logging.getLogger(__name__)
#: A worker that waits to join keeps one connection. This is enough for the workers of two jobs of the largest size, and
#: for heartbeats. Each connection takes 25 to 37 kB; the chart's memory limit fits all of them and a thousand jobs.
MAX_CONNECTIONS = 12_000
#: Waiting polls may hold this share of the connections. The others are for heartbeats and reports.
POLLS_SHARE = 5 / 6
#: Connections that one address may hold once half of all are taken: enough for a node whose workers share its address.
FEW = 64
#: Open files reserved for everything else.
SPARE_FILES = 256
#: Timeout for TLS to begin or end, and for the first and each next request of a connection.
IDLE_SECONDS = 10.0
SHUTDOWN_SECONDS = 1.0
#: Logged refusals of one address: how many a second in the long run, and how many at once. All are counted.
LOG_RATE = (0.1, 5)


def allow_files() -> int:
    """Raises this process's limit of open files to the hard limit, and returns it.

    Container runtimes set 1,024 by default, and a thousand jobs have more connections.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return sys.maxsize if most == resource.RLIM_INFINITY else most


def listen(host: str, port: int) -> socket.socket:
    """Listens at an address; if it is empty, at all IPv4 and IPv6 addresses of this machine.

    Raises:
        OSError: the port is taken, or the address does not exist.
    """
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


async def serve(
    application: web.Application, listening: socket.socket, context: ssl.SSLContext | None = None
) -> web.AppRunner:
    """Serves the application on the socket until the runner is cleaned up."""
    runner = web.AppRunner(
        application, shutdown_timeout=SHUTDOWN_SECONDS, keepalive_timeout=IDLE_SECONDS, access_log=None
    )
    await runner.setup()
    await _Site(runner, listening, ssl_context=context).start()
    return runner


class _Site(web.SockSite):
    """A site that waits at most `IDLE_SECONDS` for TLS to begin or end. aiohttp's own site waits 60 s and 30 s."""

    async def start(self) -> None:
        await web.BaseSite.start(self)
        seconds = IDLE_SECONDS if self._ssl_context else None
        assert self._runner.server is not None
        self._server = await asyncio.get_running_loop().create_server(
            self._runner.server,
            sock=self._sock,
            ssl=self._ssl_context,
            ssl_handshake_timeout=seconds,
            ssl_shutdown_timeout=seconds,
            backlog=self._backlog,
        )


class Entrance:
    """Counts the open connections of the channel, and says which new ones are admitted.

    Args:
        files: how many files this process may have open.
        listener: is told of each connection that is closed at once.
    """

    def __init__(self, files: int, listener: ChannelListener = NO_LISTENER) -> None:
        self._most = min(MAX_CONNECTIONS, max(files - SPARE_FILES, files // 2))
        self._listener = listener
        self._by_address: Counter[str] = Counter()
        self._open = 0
        self._logged = Rate(*LOG_RATE)

    @property
    def most_polls(self) -> int:
        """How many polls may wait at a time."""
        return int(self._most * POLLS_SHARE)

    @property
    def open(self) -> int:
        """How many connections are open now."""
        return self._open

    def admit(self, address: str) -> bool:
        """Counts one more connection of the address. Returns False, without counting, if too many are open."""
        its = self._by_address[address]
        if self._open >= self._most or (self._open >= self._most // 2 and its >= FEW):
            self._listener.on_shut_out()
            if not self._logged.take(address):
                text = "closing a connection of %s: it has %d open connections, of %d in total and at most %d"
                logger.warning(text, address, its, self._open, self._most)
            return False
        self._open += 1
        self._by_address[address] += 1
        return True

    def leave(self, address: str) -> None:
        """An admitted connection was closed."""
        self._open -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def guard(self, listening: socket.socket) -> socket.socket:
        """The same listening socket, which accepts only admitted connections."""
        return _Guarded(self, listening)


class _Guarded(socket.socket):
    def __init__(self, entrance: Entrance, listening: socket.socket) -> None:
        super().__init__(fileno=listening.detach())
        self._entrance = entrance

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        """Raises ConnectionAbortedError for a connection that is not admitted, which asyncio ignores."""
        connection, peer = super().accept()
        if not self._entrance.admit(peer[0]):
            connection.close()
            raise ConnectionAbortedError
        return _Counted(self._entrance, connection, peer[0]), peer


class _Counted(socket.socket):
    def __init__(self, entrance: Entrance, connection: socket.socket, address: str) -> None:
        super().__init__(connection.family, connection.type, connection.proto, connection.detach())
        self._entrance = entrance
        self._address = address
        self._counted = True

    def close(self) -> None:
        super().close()
        if self._counted:
            self._counted = False
            self._entrance.leave(self._address)
