"""All jobs' loops: started at first sight of a job, ended when it is gone."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_contract.api.status import Share
from pipetransformer_operator.channel.board import Board
from pipetransformer_operator.channel.limits.pulse import Pulse
from pipetransformer_operator.plan import Waiting, allocate, claims_of, demand_of, gang_of, may_demand

from .gangs import FREE, Gangs
from .loop import JobLoop, Pace
from .ports import JobKey, JobStore, LoopMetrics, Quota, WorkerPool
from .releases import Releases
from .slots import Slots
from .yielding import Yielding

logger = logging.getLogger(__name__)


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
        metrics: told what loops do.
        quota: whom jobs with a queue ask for their workers; None where no queue decides.
        waiting: pods of others that jobs yield claimed workers to; None where they do not.
        weigh_namespaces: jobs' weights count between namespaces as well.
    """

    def __init__(
        self,
        store: JobStore,
        pool: WorkerPool,
        *,
        clock: Callable[[], datetime] = utc_now,
        pace: Pace | None = None,
        metrics: LoopMetrics | None = None,
        quota: Quota | None = None,
        waiting: Callable[[], Sequence[Waiting]] | None = None,
        weigh_namespaces: bool = False,
    ) -> None:
        self._store = store
        self._pool = pool
        self._clock = clock
        self._pace = pace or Pace()
        self._metrics = metrics or LoopMetrics()
        self._quota = quota
        self._weigh_namespaces = weigh_namespaces
        self._yielding = Yielding(waiting) if waiting is not None else None
        self._loops: dict[JobKey, JobLoop] = {}
        self._tasks: dict[JobKey, asyncio.Task[None]] = {}
        self._pulse = Pulse()
        self._writes = Slots(self._pace.parallel_writes)
        self._gangs = Gangs()
        self._releases = Releases()
        self._stopping = False
        self._sharing: asyncio.Task[None] | None = None

    @property
    def boards(self) -> Mapping[tuple[str, str], Board]:
        """By (namespace, job name), for the channel: a live view."""
        return _Boards(self._loops)

    def wake(self, key: JobKey) -> None:
        """Something about the job may have changed, or it is new."""
        loop = self._loops.get(key)
        if loop is not None:
            loop.notice()
        elif not self._stopping and self._store.read(key) is not None:
            loop = self._loops[key] = JobLoop(
                key,
                self._store,
                self._pool,
                self._clock,
                self._pace,
                self._metrics,
                self._pulse,
                self._writes,
                self._quota,
                lambda: self._releases.for_job(key),
            )
            task = self._tasks[key] = asyncio.create_task(loop.run(), name=f"job {key}")
            task.add_done_callback(lambda _: self._forget(key))
            if self._sharing is None:
                self._sharing = asyncio.create_task(self._share_forever(), name="sharing")

    def wake_known(self, key: JobKey | None) -> None:
        """Something that the job asked about may have changed; None: any job. One without a loop is not looked for."""
        for known, loop in self._loops.items():
            if key in (None, known):
                loop.notice()

    def released(self, by: JobKey | None = None) -> None:
        """Accelerators were released by pods of the job, or by anything else (None): a pod of another owner that had
        some ended, or a node appeared or takes pods again. Other jobs that wait for nodes wake."""
        self._releases.note(self._clock(), by)
        for key, loop in self._loops.items():
            if key != by:
                loop.released()

    def accelerators_freed(self) -> None:
        """Something that jobs may wait for became free, or is new."""
        for loop in self._loops.values():
            loop.notice_room()

    def jobs(self) -> Iterator[PipeTrainingJob]:
        """Jobs that are ours and have a loop, as last read or written."""
        for key in list(self._loops):
            job = self._store.read(key)
            if job is not None and job.managed:
                yield job

    async def stop(self) -> None:
        """Ends all loops; jobs and workers stay as they are."""
        self._stopping = True
        tasks = [*self._tasks.values(), *filter(None, [self._sharing])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def share(self) -> None:
        """Shares out workers among the jobs that compete for them; each job's loop obeys in its own time."""
        looks = {str(key): (loop, job) for key, loop in self._loops.items() if (job := self._store.read(key))}
        now = self._clock()
        demands, claims, gangs = [], [], []
        for loop, job in looks.values():
            await asyncio.sleep(0)  # a look at a thousand jobs takes a third of a second
            if self._yielding is None and not may_demand(job):
                continue
            look = (job.spec, loop.observe(job), now)
            demands.append(demand_of(*look))
            if job.status.plan is None:
                gangs.append(gang_of(*look))
            if self._yielding is not None:
                claims.append(claims_of(*look))
        allocated = allocate(
            [demand for demand in demands if demand is not None], weigh_namespaces=self._weigh_namespaces
        )
        shares = {
            name: Share(workers=workers, layout_generation=looks[name][1].status.layout_generation)
            for name, workers in allocated.items()
            if workers is not None
        }
        if self._yielding is not None:
            shares |= self._yielding.look([claim for claim in claims if claim is not None])
        turns = self._gangs.look([gang for gang in gangs if gang is not None], now)
        for name, (loop, _) in looks.items():
            loop.grant(shares.get(name))
            loop.take_turn(turns.get(name, FREE))

    async def _share_forever(self) -> None:
        while True:
            await asyncio.sleep(self._pace.sharing)
            try:
                await self.share()
            except Exception:
                logger.exception("workers could not be shared out")

    def _forget(self, key: JobKey) -> None:
        self._loops.pop(key).board.close()
        del self._tasks[key]
        self._metrics.on_gone(key)
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
