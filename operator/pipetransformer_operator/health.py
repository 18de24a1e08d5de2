"""The kubelet's probes: whether this process is alive (`/healthz`), and whether workers may connect to it (`/readyz`).

A watch can die without an error. Each watch is reopened every few minutes. One that is not reopened while the API
server answers is stuck, and only a restart helps. If the API server is away, or refuses the watch, a restart would not
help: it would lose the workers' reports.
"""

import math
import time
from collections.abc import Iterable

from aiohttp import web

from .clocks import Stopwatch
from .kube.client.api import Leadership
from .kube.events import ClusterListener


class Health(ClusterListener):
    """Answers the kubelet's probes according to the watches that were opened.

    Args:
        kinds: plural names of the resources that must be watched before this operator is ready.
        leadership: held while the API server answers this operator.
        refusable: names of watches that must be open too, unless the API server refuses them.
        patience: seconds after which a watch that was not reopened is stuck.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        kinds: Iterable[str],
        leadership: Leadership,
        *,
        refusable: Iterable[str] = (),
        patience: float,
        clock: Stopwatch = time.monotonic,
    ) -> None:
        self._kinds = frozenset(kinds)
        self._refusable = frozenset(refusable)
        self._leadership = leadership
        self._patience = patience
        self._clock = clock
        self._opened: dict[str, float] = {}
        self._refused: set[str] = set()

    def on_watch_opened(self, path: str) -> None:
        """See `ClusterListener`."""
        self._opened[path] = self._clock()
        self._refused.discard(path)

    def on_watch_refused(self, path: str) -> None:
        """See `ClusterListener`."""
        self._refused.add(path)

    @property
    def ready(self) -> bool:
        """Whether all kinds are watched, so that jobs are decided. Only the holder of the lease watches."""
        return self._kinds <= set(map(_kind, self._opened)) and self._refusable <= self._opened.keys() | self._refused

    @property
    def opened_times(self) -> dict[str, float]:
        """When the watches of each plural name were opened, seconds since the epoch: the oldest of several.

        A refused watch counts only if all of its name are refused: one alone may be of a namespace that was deleted."""
        times: dict[str, float] = {}
        offset = time.time() - self._clock()
        answered = {_kind(path) for path in self._opened.keys() - self._refused}
        for path, opened in self._opened.items():
            kind = _kind(path)
            if path not in self._refused or kind not in answered:
                times[kind] = min(times.get(kind, math.inf), opened + offset)
        return times

    @property
    def stuck(self) -> list[str]:
        """Paths of watches that only a restart will reopen."""
        if not self._leadership.held:
            return []
        old = {path for path, time in self._opened.items() if self._clock() > time + self._patience}
        return sorted(old - self._refused)

    def application(self) -> web.Application:
        """Serves both probes."""

        async def healthz(request: web.Request) -> web.Response:
            stuck = self.stuck
            return _answer(not stuck, f"watches are stuck: {', '.join(stuck)}")

        async def readyz(request: web.Request) -> web.Response:
            return _answer(self.ready, "another operator holds the lease, or the first lists are not read")

        app = web.Application()
        app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz)])
        return app


def _kind(path: str) -> str:
    """The plural name of what the path lists."""
    return path.rpartition("/")[2]


def _answer(good: bool, otherwise: str) -> web.Response:
    return web.Response(text="ok") if good else web.Response(status=503, text=otherwise)
