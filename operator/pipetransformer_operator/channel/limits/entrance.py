"""How many connections the channel keeps open, of one address and of all: no job's pods shut out those of others.

They are counted where they are accepted, before TLS and long before a token is seen: one that never says a word takes
a file and memory, too. One above the bounds is closed at once; a worker comes again.
"""

import asyncio
import logging
import resource
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Callable

from aiohttp import web

from .rate import Rate

logger = logging.getLogger(__name__)
#: Who waits to join keeps one, and a start waits for those that find no place: workers of two jobs of the largest size
#: fit, with some left for heartbeats. Each takes 25 to 37 kB: the chart's limit holds all besides a thousand jobs.
MAX_CONNECTIONS = 12_000
#: Of six connections so many may belong to polls that wait: the rest is for who has something to say.
POLLS_OF_SIX = 5
#: What one address may hold once half of all are taken: a node whose workers share its address needs no more.
FEW = 64
#: Open files that are left for all else.
SPARE_FILES = 256
#: A connection is closed when TLS, its first request, or the next one takes longer to come, or the end of TLS.
IDLE_SECONDS = 10.0
SHUTDOWN_SECONDS = 1.0
#: Connections of one address whose end is logged; all are counted.
LOG_RATE = (0.1, 5)


def allow_files() -> int:
    """Lets this process open as many files as it may be let to, and returns how many.

    Container runtimes give 1,024 to who does not ask, and a thousand jobs have more connections.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return sys.maxsize if most == resource.RLIM_INFINITY else most


def listen(host: str, port: int) -> socket.socket:
    """Listens at an address, or at all of this machine where it is empty, of IPv4 and of IPv6.

    Raises:
        OSError: the port is taken, or there is no such address.
    """
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


async def serve(
    application: web.Application, listening: socket.socket, context: ssl.SSLContext | None = None
) -> web.AppRunner:
    """Serves the application there, to whom has something to ask, until the runner is cleaned up."""
    runner = web.AppRunner(
        application, shutdown_timeout=SHUTDOWN_SECONDS, keepalive_timeout=IDLE_SECONDS, access_log=None
    )
    await runner.setup()
    await _Site(runner, listening, ssl_context=context).start()
    return runner


class _Site(web.SockSite):
    """aiohttp's own leaves a minute for the handshake, and half of one for the end of TLS."""

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
    """See the module.

    Args:
        files: that this process may have open.
        refused: called for each connection that is closed at once.
    """

    def __init__(self, files: int, refused: Callable[[], None]) -> None:
        self._most = min(MAX_CONNECTIONS, max(files - SPARE_FILES, files // 2))
        self._refused = refused
        self._by_address: Counter[str] = Counter()
        self._open = 0
        self._logged = Rate(*LOG_RATE)

    @property
    def most_polls(self) -> int:
        """Polls that may wait at a time."""
        return self._most * POLLS_OF_SIX // 6

    @property
    def open(self) -> int:
        """Connections that are open now."""
        return self._open

    def admit(self, address: str) -> bool:
        """Counts one more connection of the address, unless there are too many."""
        its = self._by_address[address]
        if self._open >= self._most or (self._open >= self._most // 2 and its >= FEW):
            self._refused()
            if not self._logged.take(address):
                text = "a connection of %s is closed at once: %d of it and %d in all are open, of %d at most"
                logger.warning(text, address, its, self._open, self._most)
            return False
        self._open += 1
        self._by_address[address] += 1
        return True

    def leave(self, address: str) -> None:
        """A connection that was admitted is closed."""
        self._open -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def guard(self, listening: socket.socket) -> socket.socket:
        """The same listening socket, which accepts only what is admitted."""
        return _Guarded(self, listening)


class _Guarded(socket.socket):
    def __init__(self, entrance: Entrance, listening: socket.socket) -> None:
        super().__init__(fileno=listening.detach())
        self._entrance = entrance

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        """Raises ConnectionAbortedError where it is not admitted: asyncio then goes on as if nobody had come."""
        connection, peer = super().accept()
        if not self._entrance.admit(peer[0]):
            connection.close()
            raise ConnectionAbortedError
        return _Counted(self._entrance, connection, peer[0]), peer


class _Counted(socket.socket):
    def __init__(self, entrance: Entrance, connection: socket.socket, address: str) -> None:
        super().__init__(connection.family, connection.type, connection.proto, connection.detach())
        self._leave: Callable[[], None] | None = lambda: entrance.leave(address)

    def close(self) -> None:
        super().close()
        leave, self._leave = self._leave, None
        if leave:
            leave()
