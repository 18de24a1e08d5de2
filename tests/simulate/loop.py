"""An event loop without sockets or threads: time is virtual, and a seed decides which ready callback runs next.

Each callback belongs to the process in whose context it was scheduled. A paused process keeps its callbacks until it
continues, as after SIGSTOP. A killed process loses them: not even its `finally` blocks run.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import Any, TypeVar

#: A life has some thousand callbacks: more than this many never end.
MOST_STEPS = 100_000
#: Each callback takes time: otherwise a pause that is too short for a float would never end.
TICK_SECONDS = 1e-6
_Result = TypeVar("_Result")
_PROCESS: ContextVar["Process | None"] = ContextVar("simulated process", default=None)


class Process:
    """A simulated operating system process: the tasks that were started in its context.

    Attributes:
        name: of the process.
        context: callbacks in it, and in copies of it, belong to the process.
        alive: it was not killed.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.context: Context = copy_context()
        self.context.run(_PROCESS.set, self)
        self.alive = True
        self._paused = False
        self._kept: list[asyncio.Handle] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, running: Coroutine[Any, Any, _Result]) -> "asyncio.Task[_Result]":
        """Runs a coroutine in this process."""
        task = asyncio.get_running_loop().create_task(running, context=self.context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def pause(self) -> None:
        """Nothing of the process runs until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Everything that became ready meanwhile is ready now."""
        self._paused = False
        kept, self._kept = self._kept, []
        asyncio.get_running_loop()._ready.extend(kept)  # type: ignore[attr-defined]

    def kill(self) -> None:
        """Nothing of the process runs ever again."""
        self.alive = False
        self._kept.clear()

    def takes(self, handle: asyncio.Handle) -> bool:
        """Whether the callback may run now. Otherwise it is kept, or dropped if the process is dead."""
        if self.alive and not self._paused:
            return True
        if self.alive:
            self._kept.append(handle)
        return False


class _Handle(asyncio.TimerHandle):
    """A callback, ready or timed, without what asyncio keeps to debug it: a life makes some thousand."""

    def __init__(
        self,
        callback: Callable[..., object],
        arguments: tuple[object, ...],
        loop: asyncio.AbstractEventLoop,
        context: Context | None,
        when: float = 0.0,
    ) -> None:
        self._callback, self._args, self._loop = callback, arguments, loop
        self._context = context or copy_context()
        self._when = when
        self._cancelled = False

    def cancel(self) -> None:
        """See `asyncio.Handle`."""
        self._cancelled = True


class _Task(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address in memory."""

    _numbers = itertools.count()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._number = next(self._numbers)
        super().__init__(*arguments, **options)

    def __hash__(self) -> int:
        return self._number


class SeededLoop(asyncio.BaseEventLoop):
    """See the module.

    Args:
        random: decides which ready callback runs next.

    Attributes:
        steps: callbacks that have run.
        errors: what tasks raised although nobody waits for them.
    """

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._now = 0.0
        self._pick = random.random
        self.steps = 0
        self.errors: list[BaseException] = []
        _Task._numbers = itertools.count()
        self._ready: list[asyncio.Handle] = []  # not a deque: any of them may be next
        self._scheduled: list[tuple[float, int, _Handle]] = []
        self._numbers = itertools.count()
        self.set_task_factory(_make_task)  # type: ignore[arg-type]
        self.set_exception_handler(_note_error)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.Handle:
        """See `asyncio.AbstractEventLoop`."""
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio.AbstractEventLoop`."""
        handle = _Handle(callback, args, self, context, when)
        heapq.heappush(self._scheduled, (when, next(self._numbers), handle))
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio.AbstractEventLoop`."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def _run_once(self) -> None:
        """Runs until the loop is told to stop: one call for each callback would take a tenth of a life."""
        ready, scheduled, pick = self._ready, self._scheduled, self._pick
        while not self._stopping:  # type: ignore[attr-defined]
            if not ready and scheduled and scheduled[0][0] > self._now:
                self._now = scheduled[0][0]
            while scheduled and scheduled[0][0] <= self._now:
                ready.append(heapq.heappop(scheduled)[2])
            if not ready:
                raise RuntimeError("deadlock: nothing is ready, and nothing is scheduled")
            place = int(pick() * len(ready))
            handle, ready[place] = ready[place], ready[-1]
            ready.pop()
            if handle._cancelled:
                continue
            process = handle._context.get(_PROCESS)  # type: ignore[attr-defined]
            if process is None or process.takes(handle):
                self.steps += 1
                self._now += TICK_SECONDS
                if self.steps > MOST_STEPS:
                    raise RuntimeError(f"livelock: {MOST_STEPS} callbacks ran in one life, the last of {handle!r}")
                handle._run()

    def abandon(self) -> None:
        """Drops everything that has not run: the life is over."""
        self.close()

    def _check_closed(self) -> None:
        """What abandoned coroutines schedule while they are destroyed is never run."""

    def _write_to_self(self) -> None:
        """Nothing waits for a socket."""

    def _process_events(self, events: object) -> None:
        """There are no sockets."""


def _make_task(loop: asyncio.AbstractEventLoop, running: Coroutine[Any, Any, Any], **options: Any) -> _Task:
    return _Task(running, loop=loop, **options)


def _note_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Keeps what a task raised although nobody waits for it. Tasks of killed processes just stay unfinished."""
    error = context.get("exception")
    if error is not None:
        assert isinstance(loop, SeededLoop)
        loop.errors.append(error)
