"""What the kubelet asks: is this process worth keeping (`/healthz`), and is it the one to talk to (`/readyz`)?

A watch can die without an error. Each stream is opened anew every few minutes; one that was not, while the API server
answers, is stuck, and only a restart helps. While the API server is away, or refuses the stream, a restart would not
help: it would lose what workers have said.
"""

import math
import time
from collections.abc import Callable, Iterable

from aiohttp import web


class Health:
    """See the module.

    Args:
        kinds: plural names of what must be watched before this operator is ready.
        held: whether the API server answers this operator, and lets it write.
        patience: seconds after which a stream that was not opened again is stuck.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        kinds: Iterable[str],
        held: Callable[[], bool],
        *,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kinds = frozenset(kinds)
        self._held = held
        self._patience = patience
        self._clock = clock
        self._opened: dict[str, float] = {}
        self._refused: set[str] = set()

    def opened(self, stream: str) -> None:
        """The watch at this path was opened: what it watches was listed before."""
        self._opened[stream] = self._clock()
        self._refused.discard(stream)

    def refused(self, stream: str) -> None:
        """The server does not let it be opened: the namespace was deleted, with the right to see it."""
        self._refused.add(stream)

    @property
    def ready(self) -> bool:
        """Whether everything is being watched: only the holder of the lease watches."""
        return self._kinds <= {stream.rpartition("/")[2] for stream in self._opened}

    @property
    def opened_times(self) -> dict[str, float]:
        """By plural name, when its watch was opened, seconds since the epoch; of several the longest ago."""
        times: dict[str, float] = {}
        offset = time.time() - self._clock()
        for stream, opened in self._opened.items():
            kind = stream.rpartition("/")[2]
            times[kind] = min(times.get(kind, math.inf), opened + offset)
        return times

    @property
    def stuck(self) -> list[str]:
        """Streams that only a restart will open again."""
        if not self._held():
            return []
        old = {stream for stream, time in self._opened.items() if self._clock() > time + self._patience}
        return sorted(old - self._refused)

    def application(self) -> web.Application:
        """A new application with both routes."""

        async def healthz(request: web.Request) -> web.Response:
            stuck = self.stuck
            return _answer(not stuck, f"watches are stuck: {', '.join(stuck)}")

        async def readyz(request: web.Request) -> web.Response:
            return _answer(self.ready, "another operator holds the lease, or the first lists are not read")

        app = web.Application()
        app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz)])
        return app


def _answer(good: bool, otherwise: str) -> web.Response:
    return web.Response(text="ok") if good else web.Response(status=503, text=otherwise)
