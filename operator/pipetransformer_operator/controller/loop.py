"""The loop of one job. Events and time wake it.

It runs from when the job is first seen until the job is gone. Each turn recomputes everything from what exists, so an
extra wake-up costs a turn, and a missed one waits for a resync. The order of writes makes a crash harmless: first the
status, then what the channel shows, then creations, deletions and events.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta

from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_contract.api.labels import CHECKPOINT_NOW_ANNOTATION
from pipetransformer_contract.api.status import Share
from pipetransformer_contract.messages import MAX_TOKEN
from pipetransformer_operator.channel.board import Board
from pipetransformer_operator.channel.limits.pulse import Pulse
from pipetransformer_operator.clocks import Clock, Token
from pipetransformer_operator.plan import Observed, Plan, Worker, plan

from .apply import Applier
from .gangs import FREE, Place
from .ports import (
    Conflict,
    Invalid,
    JobKey,
    JobStore,
    LoopMetrics,
    Quota,
    TurnResult,
    Unavailable,
    WorkerPool,
)
from .refused_deletions import RefusedDeletions
from .releases import Releases
from .slots import Slots

logger = logging.getLogger(__name__)
#: The finalizer of `kubectl delete --cascade=orphan`, which detaches a deleted job from its pods.
ORPHAN = "orphan"


@dataclass(frozen=True, slots=True)
class Pace:
    """Pauses of a loop, in seconds, and how many writes run at a time."""

    debounce: float = 0.05  #: collects events into one wake-up
    resync: float = 30.0  #: between turns without an event
    first_retry: float = 0.5  #: after a failed turn; doubles each time
    longest_retry: float = 30.0
    longest_conflict: float = 5.0  #: after conflicts with changes that are not seen yet; doubles from `debounce`
    parallel_writes: int = 32  #: creations and deletions in flight for all jobs together, see `Slots`
    sharing: float = 10.0  #: between two decisions that share workers among jobs


class JobLoop:
    """Takes turns for one job until the job is gone: it observes, plans and applies.

    Args:
        key: namespace and name of the job.
        store: where jobs are kept.
        pool: where workers run.
        clock: the present time, with its time zone.
        pace: pauses between turns.
        metrics: is told of each turn.
        pulse: the pace of all jobs' workers.
        slots: slots for creations and deletions of all jobs, see `Applier`.
        releases: knows when accelerators were last released.
        quota: where jobs with a queue request workers; None if jobs have no queue.
        token: makes the nonces of generations.
    """

    def __init__(
        self,
        key: JobKey,
        store: JobStore,
        pool: WorkerPool,
        clock: Clock,
        pace: Pace,
        metrics: LoopMetrics,
        pulse: Pulse,
        slots: Slots,
        releases: Releases,
        quota: Quota | None = None,
        token: Token = secrets.token_hex,
    ) -> None:
        self.key = key
        self.board = Board(self, clock, pulse)
        self._store = store
        self._pool = pool
        self._clock = clock
        self._pace = pace
        self._metrics = metrics
        self._quota = quota
        self._token = token
        self._noticed = asyncio.Event()
        self._noticed.set()
        self._woken = asyncio.Event()
        self._releases = releases
        self._refused_deletions = RefusedDeletions(pace.first_retry, pace.longest_retry)
        self._applier = Applier(key, store, pool, slots, quota, self._refused_deletions)
        self._share: tuple[Share | None] | None = None  # None before the first decision; its share may be None, too
        self._place = FREE
        self._written = float("-inf")
        self._due: float | None = None
        self._waits_for_accelerators = False

    def wake(self) -> None:
        """A worker waits for an answer: a turn follows at once."""
        self._noticed.set()
        self._woken.set()

    def notice(self) -> None:
        """Something may have changed, and more may follow: a turn follows soon."""
        self._noticed.set()

    def notice_accelerators(self) -> None:
        """Accelerators are free: a turn follows soon if the job waits for some."""
        if self._waits_for_accelerators:
            self.notice()

    def set_share(self, share: Share | None) -> None:
        """Sets the job's share of the workers that jobs compete for. Before the first call the share in the status
        applies."""
        if self._share != (share,):
            self._share = (share,)
            self.notice()

    def set_place(self, place: Place) -> None:
        """Sets the job's place among jobs that wait for their first workers."""
        if place != self._place:
            self._place = place
            self.notice()

    async def run(self) -> None:
        """Turns until the job is gone. A new job of the same name gets a new loop, because it shares no state."""
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
                logger.warning("%s: %s; trying again in %g s", self.key, error, retry)
                pause = retry if self._due is None else min(retry, self._due)
                result, retry = TurnResult.UNAVAILABLE, min(2 * retry, self._pace.longest_retry)
            except Exception:
                logger.exception("%s: a turn failed; trying again in %g s", self.key, retry)
                result, pause, retry = TurnResult.ERROR, retry, min(2 * retry, self._pace.longest_retry)
            else:
                result, retry, conflict = TurnResult.DONE, self._pace.first_retry, self._pace.debounce
                pause = self._pace.resync if requeue is None else min(requeue, self._pace.resync)
            self._metrics.on_turned(result, time.perf_counter() - started)

    async def turn(self, job: PipeTrainingJob) -> float | None:
        """Takes one turn. Returns the seconds after which another turn is due without an event; None: none is.

        Raises:
            Conflict: the job changed meanwhile.
            Unavailable: a write failed.
        """
        if not job.spec.managed or (job.metadata.deletion_timestamp and ORPHAN in job.metadata.finalizers):
            return None  # a user who orphans the pods wants them to stay as they are
        self._due, arrived = None, self.board.arrived
        observed = self.observe(job)
        self.board.learn(observed.workers)
        try:
            decided, delay = await self._decide(job, observed)
        except Invalid as error:
            report = observed.report
            if report is None:
                raise
            what = f"step {report.step} in generation {report.layout_generation}"
            logger.warning("%s: writing the status without the leader's report of %s: %s", self.key, what, error)
            arrived = 0  # so the sender is not told that it is durable, and sends its next report
            decided, delay = await self._decide(job, replace(observed, report=None))
        await self.board.show(
            decided.status.generation,
            ended=decided.status.finished and decided.status.stop is None,
            stop=decided.status.stop is not None,
            checkpoint_request=decided.status.awaited_checkpoint,
        )
        await self.board.settle(arrived)
        self._due = decided.requeue_after  # a refusal may last for days, and what the plan waits for does not
        if await self._applier.apply(job, decided):
            self.notice()
        again = self._refused_deletions.seconds_until_due(asyncio.get_running_loop().time())
        return min(filter(None, (delay, decided.requeue_after, again)), default=None)

    async def _decide(self, job: PipeTrainingJob, observed: Observed) -> tuple[Plan, float]:
        """Makes the plan and writes its status. Returns the plan, and for how many seconds the write may wait.

        Raises:
            Conflict: the job changed meanwhile.
            Unavailable: the status was not written.
        """
        started = time.perf_counter()
        decided = plan(job.spec, observed, self._clock())
        seconds = time.perf_counter() - started
        self._pool.reserve_room(job, decided.status)  # before any await, because other jobs look at the same room
        waits_for_nodes = decided.status.waits_for_nodes_since is not None
        self._waits_for_accelerators = decided.waits_for_room or waits_for_nodes
        changed = decided.status != job.status
        delay = self._write_delay(job, decided) if changed else 0.0
        if changed and not delay:
            await self._store.write_status(job, decided.status)
            self._written = asyncio.get_running_loop().time()
        self._metrics.on_decided(job, observed, decided, seconds)
        return decided, delay

    def _write_delay(self, job: PipeTrainingJob, decided: Plan) -> float:
        """How long the new status may wait, in seconds. While a job starts, its messages change with every pod."""
        pause = self.board.pulse.words_seconds
        waited = asyncio.get_running_loop().time() - self._written
        if decided.events or not decided.status.says_the_same_as(job.status):
            return 0.0
        if waited < pause:
            return pause - waited
        return 0.0 if self.board.pulse.take_words() else pause

    def observe(self, job: PipeTrainingJob) -> Observed:
        """Collects what is known about the job."""
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
            conflicts=tuple(sorted(self._applier.conflicts)),
            kept_by=tuple(job.metadata.finalizers) if job.metadata.deletion_timestamp else None,
            refusal=self._applier.refusal,
            unprotected=self._applier.unprotected,
            undeleted=self._refused_deletions.explanations,
            share=job.status.share if self._share is None else self._share[0],
            queue=self._quota.observe(job) if self._quota else None,
            released=self._releases.for_job(self.key),
            gives_way_to=self._place.gives_way_to,
            preferred_since=self._place.preferred_since,
            checkpoint_now=job.metadata.annotations.get(CHECKPOINT_NOW_ANNOTATION, "")[:MAX_TOKEN],
            nonce=self._token(16),
            listening_since=self.board.since,
            nodes=self._pool.nodes,
            sees_drains=self._pool.sees_drains,
            free=room.free,
            room=room.unreserved,
            reach=room.reach,
            room_unknown=room.unknown,
        )

    def workers(self) -> Iterable[Worker]:
        job = self._store.read(self.key)
        return self._pool.list(job) if job else ()

    async def _wait(self, seconds: float) -> None:
        if await _is_set_within(self._noticed, seconds):
            await _is_set_within(self._woken, self.board.pulse.notice_seconds)
            await asyncio.sleep(self._pace.debounce)
        self._noticed.clear()
        self._woken.clear()


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Waits for the event. Returns whether it came in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False
