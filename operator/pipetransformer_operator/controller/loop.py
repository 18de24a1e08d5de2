"""The loop of one job: observe, plan, apply; woken by events and by time, and by nothing else.

It lives from the first sight of the job to its disappearance. Each turn recomputes everything from what exists, so a
wake-up too many costs a turn and one too few costs a resync. The order of writes is what makes a crash harmless: status
first, then the channel shows what is durable, then creations, deletions and events.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_contract.api.status import Share
from pipetransformer_operator.channel.board import Board
from pipetransformer_operator.channel.limits.pulse import Pulse
from pipetransformer_operator.plan import Deletion, Observed, Plan, Worker, plan, worker_name

from .deletions import Deletions
from .gangs import FREE, Turn
from .ports import (
    Conflict,
    Invalid,
    JobKey,
    JobStore,
    NameConflict,
    Quota,
    Recorder,
    Refused,
    TurnResult,
    Unavailable,
    WorkerPool,
)
from .slots import Slots

logger = logging.getLogger(__name__)
#: The finalizer by which Kubernetes takes a deleted owner from its dependents (`kubectl delete --cascade=orphan`).
ORPHAN = "orphan"


@dataclass(frozen=True, slots=True)
class Pace:
    """How quickly a loop turns, in seconds."""

    debounce: float = 0.05  #: events this close together are one wake-up
    resync: float = 30.0  #: a turn without any event
    first_retry: float = 0.5  #: after a failed turn; doubles
    longest_retry: float = 30.0
    longest_conflict: float = 5.0  #: after turns that a change which is not seen yet refused; from `debounce`, doubled
    parallel_writes: int = 32  #: creations or deletions in flight, of all jobs together; see `Slots`
    sharing: float = 10.0  #: between two looks at all jobs together


class JobLoop:
    """See the module.

    Args:
        key: of the job.
        store: where jobs are kept.
        pool: where workers run.
        clock: the present time, aware of its zone.
        pace: how quickly to turn.
        recorder: told what the loop does.
        pulse: of all jobs' workers.
        writes: taken for each creation or deletion, of all jobs: in turn, so that one job's workers exist before the
            next job's, and few workers wait for others of theirs; but slow ones of one namespace do not stop the rest.
        quota: whom jobs with a queue ask for their workers; None where no queue decides.
        released: when anything but this job last released accelerators; None: not yet.
    """

    def __init__(
        self,
        key: JobKey,
        store: JobStore,
        pool: WorkerPool,
        clock: Callable[[], datetime],
        pace: Pace,
        recorder: Recorder,
        pulse: Pulse,
        writes: Slots,
        quota: Quota | None = None,
        released: Callable[[], datetime | None] = lambda: None,
    ) -> None:
        self.key = key
        self.board = Board(self.wake, clock, pulse, self._workers)
        self._store = store
        self._pool = pool
        self._clock = clock
        self._pace = pace
        self._recorder = recorder
        self._quota = quota
        self._noticed = asyncio.Event()
        self._noticed.set()
        self._woken = asyncio.Event()
        self._conflicts: set[str] = set()
        self._refusal = ""
        self._deletions = Deletions(pace.first_retry, pace.longest_retry)
        self._grant: tuple[Share | None] | None = None
        self._turn = FREE
        self._released = released
        self._waits_for_nodes = False
        self._written = float("-inf")
        self._writes = writes
        self._waits_for_room = False

    def wake(self) -> None:
        """Somebody waits for an answer: a turn follows at once."""
        self._noticed.set()
        self._woken.set()

    def notice(self) -> None:
        """Something may have changed, and more may follow, as pods come by the dozen: a turn follows soon."""
        self._noticed.set()

    def notice_room(self) -> None:
        """Accelerators became free: of use to a job that waits for some."""
        if self._waits_for_room:
            self.notice()

    def grant(self, share: Share | None) -> None:
        """What the job may have of the workers that several jobs share; until it is said, what the status says."""
        if self._grant != (share,):
            self._grant = (share,)
            self.notice()

    def take_turn(self, turn: Turn) -> None:
        """Whether the job gives way to another that waits, or others to this one."""
        if turn != self._turn:
            self._turn = turn
            self.notice()

    def released(self) -> None:
        """Accelerators were released, or a node appeared."""
        if self._waits_for_nodes:
            self.notice()

    async def run(self) -> None:
        """Turns until the job is gone, or another has its name: what is known here is of no use to that one."""
        uid: str | None = None
        pause = self._pace.resync
        retry, conflict = self._pace.first_retry, self._pace.debounce
        while True:
            await self._wait(pause)
            job = self._store.read(self.key)
            if job is None or uid not in (None, job.metadata.uid):
                return
            uid = job.metadata.uid
            started = time.perf_counter()
            try:
                requeue = await self.turn(job)
            except Conflict as error:
                logger.debug("%s: %s", self.key, error)
                result, pause, conflict = TurnResult.CONFLICT, conflict, min(2 * conflict, self._pace.longest_conflict)
            except Unavailable as error:
                logger.warning("%s: %s; again in %g s", self.key, error, retry)
                result, pause, retry = TurnResult.UNAVAILABLE, retry, min(2 * retry, self._pace.longest_retry)
            except Exception:
                logger.exception("%s: a turn failed; again in %g s", self.key, retry)
                result, pause, retry = TurnResult.ERROR, retry, min(2 * retry, self._pace.longest_retry)
            else:
                result, retry, conflict = TurnResult.DONE, self._pace.first_retry, self._pace.debounce
                pause = self._pace.resync if requeue is None else min(requeue, self._pace.resync)
            self._recorder.turned(result, time.perf_counter() - started)

    async def turn(self, job: PipeTrainingJob) -> float | None:
        """One turn on the job as it was read; returns after how many seconds time alone asks for another.

        Raises:
            Conflict: the job changed meanwhile.
            Unavailable: a write did not succeed.
        """
        if not job.spec.managed or (job.metadata.deletion_timestamp and ORPHAN in job.metadata.finalizers):
            return None  # whoever deletes a job and orphans its pods wants them to stay as they are
        arrived = self.board.arrived
        observed = self.observe(job)
        try:
            decided, words_wait = await self._decide(job, observed)
        except Invalid as error:
            report = observed.report
            if report is None:
                raise
            what = f"step {report.step} in generation {report.layout_generation}"
            logger.warning("%s: the status is written without the leader's report of %s: %s", self.key, what, error)
            arrived = 0  # its sender is not told that it is durable, and sends the next
            decided, words_wait = await self._decide(job, replace(observed, report=None))
        await self.board.show(
            decided.status.generation,
            ended=decided.status.finished and decided.status.stop is None,
            stop=decided.status.stop is not None,
        )
        await self.board.settle(arrived)
        await self._apply(job, decided)
        again = self._deletions.wait(asyncio.get_running_loop().time())
        return min(filter(None, (words_wait, decided.requeue_after, again)), default=None)

    async def _decide(self, job: PipeTrainingJob, observed: Observed) -> tuple[Plan, float]:
        """The plan, its status written; and the seconds for which that may wait.

        Raises:
            Conflict: the job changed meanwhile.
            Unavailable: it was not written.
        """
        started = time.perf_counter()
        decided = plan(job.spec, observed, self._clock())
        seconds = time.perf_counter() - started
        self._pool.expect(job, decided.status)  # before anything is awaited: other jobs look at the same room
        self._waits_for_room = decided.waits_for_room
        words_wait = self._words_wait(job, decided)
        if decided.status != job.status and not words_wait:
            await self._store.write_status(job, decided.status)
            self._written = asyncio.get_running_loop().time()
        self._waits_for_nodes = decided.status.waits_for_nodes_since is not None
        self._recorder.decided(job, observed, decided, seconds)
        return decided, words_wait

    def _words_wait(self, job: PipeTrainingJob, decided: Plan) -> float:
        """Seconds for which the new status may wait: while a job starts, its words change with every pod."""
        pause = self.board.pulse.words_seconds
        waited = asyncio.get_running_loop().time() - self._written
        if waited >= pause or decided.events or not decided.status.says_the_same_as(job.status):
            return 0.0
        return pause - waited

    def observe(self, job: PipeTrainingJob) -> Observed:
        """One look at the job as it was read."""
        room = self._pool.room(job)
        return Observed(
            uid=job.metadata.uid,
            name=job.metadata.name,
            namespace=job.metadata.namespace,
            labels=job.metadata.labels,
            metadata_generation=job.metadata.generation,
            status=job.status,
            workers=self._pool.list(job),
            ready=self.board.ready,
            report=self.board.report,
            heard=self.board.heard,
            beats=self.board.beats,
            pace=timedelta(seconds=self.board.pulse.beat_seconds),
            report_pace=timedelta(seconds=self.board.pulse.report_seconds),
            lost_peers=self.board.lost_peers,
            conflicts=tuple(sorted(self._conflicts)),
            kept_by=tuple(job.metadata.finalizers) if job.metadata.deletion_timestamp else None,
            refusal=self._refusal,
            undeleted=self._deletions.refused,
            share=job.status.share if self._grant is None else self._grant[0],
            queue=self._quota.observe(job) if self._quota else None,
            released=self._released(),
            gives_way_to=self._turn.gives_way_to,
            preferred_since=self._turn.preferred_since,
            nonce=secrets.token_hex(16),
            since=self.board.since,
            nodes=self._pool.nodes,
            sees_drains=self._pool.sees_drains,
            free=room.free,
            room=room.unreserved,
            reach=room.reach,
        )

    def _workers(self) -> Iterable[Worker]:
        job = self._store.read(self.key)
        return self._pool.list(job) if job else ()

    async def _apply(self, job: PipeTrainingJob, decided: Plan) -> None:
        """Does all that it can: what one part of the cluster does not take now holds up nothing else.

        Raises:
            Conflict: something changed meanwhile.
            Unavailable: something could not be done, or is refused and the status says why. A deletion that is refused
                is none of it: it is tried again in turns to come.
        """

        async def protect() -> None:
            try:
                await self._pool.protect(job, decided.min_available, keeps_unready=decided.keeps_unready)
            except Refused as error:
                refusals.append(error)

        async def create(worker_id: int) -> None:
            async with self._writes.of(self.key.namespace):
                try:
                    await self._pool.create(job, worker_id, decided.status)
                except NameConflict as conflict:
                    conflicts.add(conflict.name)
                except Refused as error:
                    refusals.append(error)

        async def prepare_and_create() -> None:
            try:
                await self._pool.prepare(job)
            except Refused as error:
                refusals.append(error)
            else:
                errors.extend(await _together([create(worker_id) for worker_id in decided.create]))

        async def delete(deletion: Deletion) -> None:
            async with self._writes.of(self.key.namespace):
                try:
                    await self._pool.delete(job, deletion.name, deletion.uid)
                except Refused as error:
                    pause = self._deletions.refuse(deletion.uid, str(error), clock.time())
                    logger.warning("%s: %s; again in %g s", self.key, error, pause)
                else:
                    self._deletions.accept(deletion.uid)

        clock = asyncio.get_running_loop()
        undeleted = self._deletions.refused
        attempted = {worker_name(self.key.name, worker_id) for worker_id in decided.create}
        wanted = {worker_name(self.key.name, worker_id) for worker_id in decided.status.worker_ids}
        conflicts = self._conflicts & wanted - attempted  # a start that was put off goes on under other names
        refusals: list[Refused] = []
        self._pool.doubt(job, decided.doubted, decided.unfit)
        self._pool.blame(decided.broken)
        errors: list[Exception] = []
        stays = job.metadata.deletion_timestamp is None  # else the cluster deletes what protects its workers
        if stays and (not decided.status.finished or decided.min_available is not None):
            errors += await _together([protect()])
            errors += await _together([prepare_and_create()])
        due = self._deletions.due(decided.delete, clock.time())
        errors += await _together([delete(deletion) for deletion in due])
        for event in decided.events:
            await self._store.tell(job, event)
        if decided.expired:
            errors += await _together([self._store.delete(job)])
        if self._quota is not None:
            errors += await _together([self._quota.apply(job, decided.status)])
        known, self._refusal = self._refusal, str(refusals[0]) if refusals else ""
        before, self._conflicts = self._conflicts, conflicts
        if known:
            errors += refusals[:1]
        if errors:
            for other in {repr(error) for error in errors} - {repr(errors[0])}:
                logger.warning("%s: besides: %s", self.key, other)
            raise errors[0]
        if attempted - conflicts or known or conflicts != before or self._deletions.refused != undeleted:
            self.notice()

    async def _wait(self, seconds: float) -> None:
        if await _comes(self._noticed, seconds):
            await _comes(self._woken, self.board.pulse.notice_seconds)
            await asyncio.sleep(self._pace.debounce)
        self._noticed.clear()
        self._woken.clear()


async def _comes(event: asyncio.Event, seconds: float) -> bool:
    """Waits for the event; whether it came in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False


async def _together(calls: list[Coroutine[None, None, None]]) -> list[Exception]:
    """Runs all calls to their end; returns what they raised."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    return [result for result in results if isinstance(result, Exception)]
