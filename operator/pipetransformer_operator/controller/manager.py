"""All jobs' loops: started at first sight of a job, ended when it is gone."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime

from ..api import PipeTrainingJob
from ..channel.board import Board
from ..plan import Plan
from .loop import JobLoop, Pace
from .ports import JobKey, JobStore, WorkerPool


def utc_now() -> datetime:
    """The present time in UTC."""
    return datetime.now(UTC)


class Controller:
    """Keeps one `JobLoop` a job. Must be used from one event loop.

    Args:
        store: where jobs are kept.
        pool: where workers run.
        clock: the present time, aware of its zone.
        pace: how quickly loops turn.
        decided: called with a job as read and its plan, once the plan's status is durable.
    """

    def __init__(
        self,
        store: JobStore,
        pool: WorkerPool,
        *,
        clock: Callable[[], datetime] = utc_now,
        pace: Pace | None = None,
        decided: Callable[[PipeTrainingJob, Plan], None] = lambda job, plan: None,
    ) -> None:
        self._store = store
        self._pool = pool
        self._clock = clock
        self._pace = pace or Pace()
        self._decided = decided
        self._loops: dict[JobKey, JobLoop] = {}
        self._tasks: dict[JobKey, asyncio.Task[None]] = {}
        self._stopping = False

    @property
    def boards(self) -> Mapping[tuple[str, str], Board]:
        """By (namespace, job name), for the channel: a live view."""
        return _Boards(self._loops)

    def wake(self, key: JobKey) -> None:
        """Something about the job may have changed, or it is new."""
        loop = self._loops.get(key)
        if loop is not None:
            loop.wake()
        elif not self._stopping and self._store.read(key) is not None:
            loop = self._loops[key] = JobLoop(key, self._store, self._pool, self._clock, self._pace, self._decided)
            task = self._tasks[key] = asyncio.create_task(loop.run(), name=f"job {key}")
            task.add_done_callback(lambda _: self._forget(key))

    def jobs(self) -> Iterator[PipeTrainingJob]:
        """Jobs that have a loop, as last read or written."""
        for key in list(self._loops):
            job = self._store.read(key)
            if job is not None:
                yield job

    async def stop(self) -> None:
        """Ends all loops; jobs and workers stay as they are."""
        self._stopping = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, key: JobKey) -> None:
        del self._loops[key], self._tasks[key]
        self.wake(key)  # a job of the same name may have come meanwhile


class _Boards(Mapping[tuple[str, str], Board]):
    def __init__(self, loops: Mapping[JobKey, JobLoop]) -> None:
        self._loops = loops

    def __getitem__(self, key: tuple[str, str]) -> Board:
        return self._loops[JobKey(*key)].board

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._loops)

    def __len__(self) -> int:
        return len(self._loops)
