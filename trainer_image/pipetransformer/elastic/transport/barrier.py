"""A barrier after work of unknown length, such as reading from storage.

All workers of a group vote again and again until each has finished its work. They wait for slow storage as long as it
takes. A worker that hangs misses a vote, so the watchdogs of the other workers end the wait.
"""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from .connections import Connections
from .exchange import Exchange
from .groups import GenerationGroups
from .watchdog import ROUND, Deadline, Watchdog

T = TypeVar("T")
#: Work of unknown length, which a thread does.
Work = Callable[[], T]
#: Returns the numbers that this worker adds to a vote. The argument is the result of its work: None while the worker
#: still works, or if it only waits.
Numbers = Callable[[T | None], Sequence[float]]
#: Does this worker's work in a thread, waits until all members have done theirs, and sums numbers over the members.
SumBarrier = Callable[[Work[bool] | None, Numbers[bool]], Sequence[float]]

#: Pause between two votes of a worker that still works. Workers that have finished wait in the vote.
_VOTE_SECONDS = 0.02


class Barrier:
    """The barrier of one worker, for all its generations.

    It has one thread. Work that a broken generation left there ends before other work begins.
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="barrier")

    def pass_after(self, work: Work[T] | None, groups: GenerationGroups) -> T | None:
        """Do this worker's work in a thread, and wait until all members have done theirs. All of them call this.

        Args:
            work: the work; None if this worker only waits. It must not refer to the groups, because it may outlive
                them.
            groups: groups of the generation.

        Returns:
            The result of `work`.

        Raises:
            RuntimeError: a connection broke, or a member hangs.
            Exception: any error of `work`. The other workers still wait then, so the caller must close this worker's
                connections.
        """
        return self._pass(work, groups.exchange, Deadline("barrier", 0.0), groups.connections)[0]

    def sum_after(self, work: Work[T] | None, numbers: Numbers[T], groups: GenerationGroups) -> Sequence[float]:
        """Like `pass_after`, but returns sums over all members of `numbers` in the last vote. All members get the same.
        The vote carries the numbers, because the watchdog would not watch another exchange after it."""
        return self._pass(work, groups.exchange, Deadline("barrier", 0.0), groups.connections, numbers)[1]

    def pass_within(self, work: Work[T] | None, exchange: Exchange, deadline: Deadline) -> T | None:
        """Like `pass_after`, for all ranks of `exchange`. The caller has its connections watched until `deadline`. Each
        vote puts `deadline` off."""
        return self._pass(work, exchange, deadline, None)[0]

    def sum_within(
        self, work: Work[T] | None, numbers: Numbers[T], exchange: Exchange, deadline: Deadline
    ) -> Sequence[float]:
        """Like `sum_after`, with `exchange` and `deadline` as in `pass_within`."""
        return self._pass(work, exchange, deadline, None, numbers)[1]

    def _pass(
        self,
        work: Work[T] | None,
        exchange: Exchange,
        deadline: Deadline,
        connections: Connections | None,
        numbers: Numbers[T] = lambda _: (),
    ) -> tuple[T | None, Sequence[float]]:
        """Vote until all ranks are done. Watch `connections` in each vote; None if the caller watches them. Returns the
        result of `work`, and the sums of `numbers` in the last vote."""
        done = None if work is None else self._thread.submit(work)
        while True:
            if done is not None:
                wait([done], _VOTE_SECONDS)
            busy = done is not None and not done.done()
            result = None if done is None or busy else done.result()
            deadline.put_off(self._watchdog.limit(ROUND))
            with self._watching(connections, deadline):
                still_busy, *sums = exchange.sum([float(busy), *numbers(result)])
            if not still_busy:
                return result, sums

    def _watching(self, connections: Connections | None, deadline: Deadline) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if connections is None else self._watchdog.watching(connections, deadline)
