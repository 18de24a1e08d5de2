"""Suspends a job, which gives all workers back, and resumes it in the size that the checkpoint needs.

A job that is being deleted and that a foreign finalizer keeps is suspended for good.
"""

from pipetransformer_contract.api.status import ConditionType, Reason
from pipetransformer_operator.plan.deletions import listed
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.quota.requests import admitted
from pipetransformer_operator.plan.types import Worker
from pipetransformer_operator.plan.view import View
from pipetransformer_operator.plan.workers import Workers

from . import stop
from .lost_steps import forget_generation


def suspend(draft: Draft) -> None:
    """Stops the job: no worker is wanted once each has left its checkpoint, or has had the time for it."""
    kept_by = draft.observed.kept_by
    if kept_by is not None:
        reason = Reason.BEING_DELETED
        message = f"the job is being deleted, and kept by {', '.join(kept_by) or 'nobody'}"
        if draft.status.reason(ConditionType.RUNNING) != reason:  # Suspended may have a refusal for its reason
            draft.tell(reason, "The job is being deleted: all workers are to end")
    else:
        reason, message = Reason.SUSPENDED_BY_USER, "spec.suspend is true"
        if not draft.spec.suspend:
            names = [worker.name for worker in _awaited(draft.view)]
            message = f"resumed once the last of its pods has ended: {listed(names)}"
        if not draft.status.is_true(ConditionType.SUSPENDED):
            draft.tell(reason, "Suspended: all workers are to end")
    draft.update(quota_requests=list(admitted(draft.status)))  # it asks for no more
    stop.give_back(draft, message)
    if draft.status.finished:
        return
    if not draft.observed.workers:
        draft.update(quota_requests=[], too_short=None)  # the user may ask for other accelerators meanwhile
    message = "; ".join(filter(None, [message, stop.words(draft.view)]))
    draft.set_condition(ConditionType.SUSPENDED, True, reason, message)


def is_ending(view: View) -> bool:
    """Whether workers of a suspended job still end: until they are gone they hold accelerators, and may report the
    checkpoint that the job goes on from."""
    suspended = view.status.is_true(ConditionType.SUSPENDED)
    return suspended and bool(_awaited(view))


def _awaited(view: View) -> Workers:
    return view.workers.that(lambda worker: _is_awaited(view, worker))


def _is_awaited(view: View, worker: Worker) -> bool:
    """Whether a resume waits for the pod's end: not if it is stuck, as on a lost node, or has ended and a finalizer
    keeps it."""
    return not (worker.terminating and not worker.holds) and not view.is_stuck(worker)


def resume(draft: Draft) -> None:
    """Sets Suspended to False, so that the job starts again."""
    if draft.status.is_true(ConditionType.SUSPENDED):
        draft.set_condition(ConditionType.SUSPENDED, False, Reason.RESUMED)
        draft.tell(Reason.RESUMED, "Resumed")
        if draft.status.stop is not None:  # of pods that are stuck
            draft.keep_workers([], "the job was suspended, and resumes with new workers")
            forget_generation(draft)
        draft.update(start_time=None)  # the deadline counts from the next start, as a Job's does
