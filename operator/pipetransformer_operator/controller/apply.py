"""Carries out plans: creates and deletes workers, protects them, requests quota and tells the user."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field

from pipetransformer_contract.api import JobStatus, PipeTrainingJob
from pipetransformer_operator.plan import Deletion, Plan, worker_name

from .ports import JobKey, JobStore, NameConflict, Quota, Refused, WorkerPool
from .refused_deletions import RefusedDeletions
from .slots import Slots

logger = logging.getLogger(__name__)
#: A turn tries other workers for this long after the cluster refused one. A slow admission would make a turn of many
#: workers last for minutes, and meanwhile the job would hear of nothing.
REFUSED_SECONDS = 15.0


@dataclass
class _Outcome:
    """What the cluster answered while one plan was carried out."""

    conflicts: set[str]
    unprotected: list[Refused] = field(default_factory=list)
    refusals: list[Refused] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)


class Applier:
    """Makes the cluster what the plans of one job say, and remembers what the cluster refused.

    Args:
        key: namespace and name of the job.
        store: where jobs are kept.
        pool: where workers run.
        slots: one is taken for each creation or deletion. All jobs share them in turn, so that one job's workers exist
            before the next job's. Slow requests of one namespace do not stop the others.
        quota: where jobs with a queue request workers; None if jobs have no queue.
        refused_deletions: remembers which deletions the cluster refused.

    Attributes:
        conflicts: names of the plan's workers that other objects have.
        refusal: why the cluster refused to create the last workers, or what they need; empty if it did not.
        unprotected: why the cluster refused what protects the workers; empty if it did not.
    """

    def __init__(
        self,
        key: JobKey,
        store: JobStore,
        pool: WorkerPool,
        slots: Slots,
        quota: Quota | None,
        refused_deletions: RefusedDeletions,
    ) -> None:
        self.conflicts: set[str] = set()
        self.refusal = self.unprotected = ""
        self._key = key
        self._store = store
        self._pool = pool
        self._slots = slots
        self._quota = quota
        self._refused_deletions = refused_deletions

    async def apply(self, job: PipeTrainingJob, decided: Plan) -> bool:
        """Carries out all parts of a plan. A part that the cluster does not take now does not stop the others.

        Returns whether another turn should follow soon, because the next plan may differ.

        Raises:
            Conflict: something changed meanwhile.
            Unavailable: something could not be done, or the cluster refuses it and the status says why. A refused
                deletion raises nothing, because later turns try it again.
        """
        clock = asyncio.get_running_loop()
        undeleted = self._refused_deletions.explanations
        attempted = {worker_name(self._key.name, worker_id) for worker_id in decided.create}
        wanted = {worker_name(self._key.name, worker_id) for worker_id in decided.status.worker_ids}
        outcome = _Outcome(self.conflicts & wanted - attempted)  # a postponed start resumes under other names

        self._pool.doubt(job, decided.doubted, decided.unfit)
        self._pool.blame(decided.failed_devices)
        # The cluster itself deletes what protects the workers of a deleted job.
        stays = job.metadata.deletion_timestamp is None
        if stays and (not decided.status.finished or decided.disruption_budget is not None):
            outcome.errors += await _together([self._protect(job, decided, outcome)])
            outcome.errors += await _together([self._prepare_and_create(job, decided, outcome)])
        due = self._refused_deletions.due(decided.delete, clock.time())
        outcome.errors += await _together([self._delete(job, deletion) for deletion in due])
        for defect in await _together([self._store.tell(job, event) for event in decided.events]):
            logger.error("%s: cannot tell an event", self._key, exc_info=defect)
        if decided.expired:
            outcome.errors += await _together([self._store.delete(job)])
        if self._quota is not None:
            outcome.errors += await _together([self._quota.apply(job, decided.status)])

        known = self.unprotected or self.refusal
        self.unprotected, self.refusal = _first(outcome.unprotected), _first(outcome.refusals)
        before, self.conflicts = self.conflicts, outcome.conflicts
        if known:  # the status already says why
            outcome.errors += [*outcome.unprotected, *outcome.refusals][:1]
        self._raise(outcome.errors)
        changed = self.conflicts != before or self._refused_deletions.explanations != undeleted
        return bool(attempted - self.conflicts or known or changed)

    def _raise(self, errors: list[Exception]) -> None:
        """Raises the first error, and logs the others."""
        if not errors:
            return
        for other in {repr(error) for error in errors} - {repr(errors[0])}:
            logger.warning("%s: another error in the same turn: %s", self._key, other)
        raise errors[0]

    async def _protect(self, job: PipeTrainingJob, decided: Plan, outcome: _Outcome) -> None:
        try:
            await self._pool.protect(job, decided.disruption_budget)
        except Refused as error:
            outcome.unprotected.append(error)

    async def _prepare_and_create(self, job: PipeTrainingJob, decided: Plan, outcome: _Outcome) -> None:
        try:
            await self._pool.prepare(job, decided.status, decided.create)
        except Refused as error:
            outcome.refusals.append(error)
            return
        ends = asyncio.get_running_loop().time() + REFUSED_SECONDS
        creations = [self._create(job, worker_id, decided.status, outcome, ends) for worker_id in decided.create]
        outcome.errors.extend(await _together(creations))

    async def _create(
        self, job: PipeTrainingJob, worker_id: int, status: JobStatus, outcome: _Outcome, ends: float
    ) -> None:
        """Creates a worker, unless the cluster refused others and the time `ends` has come."""
        async with self._slots.of(self._key.namespace):
            if outcome.refusals and asyncio.get_running_loop().time() >= ends:
                return
            try:
                await self._pool.create(job, worker_id, status)
            except NameConflict as conflict:
                outcome.conflicts.add(conflict.name)
            except Refused as error:
                outcome.refusals.append(error)

    async def _delete(self, job: PipeTrainingJob, deletion: Deletion) -> None:
        async with self._slots.of(self._key.namespace):
            try:
                await self._pool.delete(job, deletion.name, deletion.uid)
            except Refused as error:
                pause = self._refused_deletions.add(deletion.uid, str(error), asyncio.get_running_loop().time())
                logger.warning("%s: cannot delete a worker: %s; trying again in %g s", self._key, error, pause)
            else:
                self._refused_deletions.remove(deletion.uid)


def _first(refusals: list[Refused]) -> str:
    """The words of the first refusal; empty without one."""
    return str(refusals[0]) if refusals else ""


async def _together(calls: list[Coroutine[None, None, None]]) -> list[Exception]:
    """Runs all calls to their end, and returns what they raised."""
    if not calls:
        return []
    results = await asyncio.gather(*calls, return_exceptions=True)
    return [result for result in results if isinstance(result, Exception)]
