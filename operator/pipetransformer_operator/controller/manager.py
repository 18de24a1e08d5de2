"""All jobs' loops. A loop starts when its job is first seen, and ends when the job is gone."""

import asyncio
import logging
import secrets
from collections.abc import Iterator, Mapping

from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_contract.api.status import Share
from pipetransformer_operator.channel.board import Board
from pipetransformer_operator.channel.limits.pulse import Pulse
from pipetransformer_operator.clocks import Clock, Token, utc_now
from pipetransformer_operator.plan import allocate, claims_of, demand_of, gang_of, may_demand

from .for_others import ReleaseForOthers, WaitingPods
from .gangs import FREE, Gangs
from .loop import JobLoop, Pace
from .ports import JobKey, JobStore, LoopMetrics, Quota, WorkerPool
from .releases import Releases
from .slots import Slots

logger = logging.getLogger(__name__)


class Controller:
    """Keeps one `JobLoop` for each job. Use it from one event loop only.

    Args:
        store: where jobs are kept.
        pool: where workers run.
        clock: the present time, with its time zone.
        pace: pauses of the loops.
        metrics: is told what the loops do.
        quota: where jobs with a queue request workers; None if jobs have no queue.
        others: knows pods of other owners that wait. Jobs release claimed workers to them. None: jobs release none.
        weigh_namespaces: weights of jobs also count between namespaces.
        token: makes the nonces of generations.
    """

    def __init__(
        self,
        store: JobStore,
        pool: WorkerPool,
        *,
        clock: Clock = utc_now,
        pace: Pace | None = None,
        metrics: LoopMetrics | None = None,
        quota: Quota | None = None,
        others: WaitingPods | None = None,
        weigh_namespaces: bool = False,
        token: Token = secrets.token_hex,
    ) -> None:
        self._store = store
        self._pool = pool
        self._clock = clock
        self._pace = pace or Pace()
        self._metrics = metrics or LoopMetrics()
        self._quota = quota
        self._weigh_namespaces = weigh_namespaces
        self._token = token
        self._release_for_others = ReleaseForOthers(others) if others is not None else None
        self._loops: dict[JobKey, JobLoop] = {}
        self._tasks: dict[JobKey, asyncio.Task[None]] = {}
        self._pulse = Pulse()
        self._slots = Slots(self._pace.parallel_writes)
        self._gangs = Gangs()
        self._releases = Releases()
        self._stopping = False
        self._sharing: asyncio.Task[None] | None = None

    @property
    def boards(self) -> Mapping[tuple[str, str], Board]:
        """A live view of the boards, by (namespace, job name)."""
        return _Boards(self._loops)

    def wake(self, key: JobKey) -> None:
        """The job may have changed, or is new."""
        loop = self._loops.get(key)
        if loop is not None:
            loop.notice()
        elif not self._stopping and self._store.read(key) is not None:
            loop = self._loops[key] = JobLoop(
                key,
                self._store,
                self._pool,
                clock=self._clock,
                pace=self._pace,
                metrics=self._metrics,
                pulse=self._pulse,
                slots=self._slots,
                releases=self._releases,
                quota=self._quota,
                token=self._token,
            )
            task = self._tasks[key] = asyncio.create_task(loop.run(), name=f"job {key}")
            task.add_done_callback(lambda _: self._forget(key))
            if self._sharing is None:
                self._sharing = asyncio.create_task(self._keep_sharing(), name="sharing")

    def wake_known(self, key: JobKey | None) -> None:
        """Something about the job may have changed; None: about any job. Starts no loop for a new job."""
        for known, loop in self._loops.items():
            if key in (None, known):
                loop.notice()

    def note_release(self, by: JobKey | None) -> None:
        """Pods of the job released accelerators; None: a pod of another owner did, or a node has more for pods now."""
        self._releases.note(self._clock(), by)
        self.wake_waiting(by)

    def wake_waiting(self, by: JobKey | None) -> None:
        """There is more room for workers: wakes the jobs that wait for it, except the job `by` that released it.

        A job that pauses after a failed attempt stays asleep. Otherwise such jobs would wake each other."""
        for key, loop in self._loops.items():
            if key != by:
                loop.notice_accelerators()

    def jobs(self) -> Iterator[PipeTrainingJob]:
        """Jobs that this operator manages, as last read or written."""
        for key in list(self._loops):
            job = self._store.read(key)
            if job is not None and job.managed:
                yield job

    async def stop(self) -> None:
        """Ends all loops. Jobs and workers stay as they are."""
        self._stopping = True
        tasks = [*self._tasks.values(), *filter(None, [self._sharing])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def share(self) -> None:
        """Shares workers among the jobs that compete for them. Each loop follows with its next turn."""
        looks: dict[str, tuple[JobLoop, PipeTrainingJob]] = {}
        now = self._clock()
        demands, claims, gangs = [], [], []
        for key, loop in list(self._loops.items()):
            await asyncio.sleep(0)  # observing a thousand jobs takes a third of a second
            if (job := self._store.read(key)) is None:
                continue  # the pool has forgotten it, and would keep what it remembers of it
            looks[name := str(key)] = loop, job
            if self._release_for_others is None and not may_demand(job):
                continue
            try:
                look = (job.spec, loop.observe(job), now)
                demand = demand_of(*look)
                gang = gang_of(*look) if job.status.generation is None else None
                claim = claims_of(*look) if self._release_for_others is not None else None
            except Exception:
                logger.exception("cannot share workers with job %s", name)
                del looks[name]  # it keeps its share
                continue
            demands.append(demand)
            gangs.append(gang)
            claims.append(claim)
        allocated = allocate(list(filter(None, demands)), weigh_namespaces=self._weigh_namespaces)
        shares = {
            name: Share(workers=workers, layout_generation=looks[name][1].status.layout_generation)
            for name, workers in allocated.items()
            if workers is not None
        }
        if self._release_for_others is not None:
            shares |= self._release_for_others.look(list(filter(None, claims)))
        places = self._gangs.look(list(filter(None, gangs)), now)
        for name, (loop, _) in looks.items():
            loop.set_share(shares.get(name))
            loop.set_place(places.get(name, FREE))

    async def _keep_sharing(self) -> None:
        while True:
            await asyncio.sleep(self._pace.sharing)
            try:
                await self.share()
            except Exception:
                logger.exception("cannot share workers among jobs")

    def _forget(self, key: JobKey) -> None:
        self._loops.pop(key).board.close()
        del self._tasks[key]
        self._metrics.on_gone(key)
        self.wake(key)  # there may be a new job of the same name


class _Boards(Mapping[tuple[str, str], Board]):
    def __init__(self, loops: Mapping[JobKey, JobLoop]) -> None:
        self._loops = loops

    def __getitem__(self, key: tuple[str, str]) -> Board:
        return self._loops[JobKey(*key)].board

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._loops)

    def __len__(self) -> int:
        return len(self._loops)
