"""Limits what runs at once for all namespaces together, so that no namespace takes everything.

If a namespace's admission does not answer, each request there lasts until its timeout, and a job has thousands. So a
namespace takes another slot only while it holds fewer slots than are free. One busy namespace gets half of all slots,
two get a third each, and the rest stays free for namespaces that answer quickly.
"""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """Slots that namespaces take and return. Among namespaces that may take a slot, the oldest request comes first.

    Args:
        number: how many slots there are. A namespace has at most half of them, rounded up.
    """

    def __init__(self, number: int) -> None:
        self._free = number
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}
        self._arrivals = itertools.count()

    @asynccontextmanager
    async def of(self, namespace: str) -> AsyncIterator[None]:
        """Waits for a slot and holds it. Requests without a namespace share the empty one."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, deque()).append((next(self._arrivals), turn))
        self._deal()
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():
                self._free += 1
                self._held[namespace] -= 1
                if not self._held[namespace]:
                    del self._held[namespace]
            self._deal()

    def _deal(self) -> None:
        while (namespace := self._next()) is not None:
            waiting = self._waiting[namespace]
            _, turn = waiting.popleft()
            if not waiting:
                del self._waiting[namespace]
            if not turn.cancelled():
                self._free -= 1
                self._held[namespace] += 1
                turn.set_result(None)

    def _next(self) -> str | None:
        """The namespace that gets the next slot."""
        may = (one for one in self._waiting if self._held[one] < self._free)
        return min(may, key=lambda one: self._waiting[one][0][0], default=None)
