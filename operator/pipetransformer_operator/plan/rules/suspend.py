"""Suspends a job: it releases all workers. Resumes it with the layout that its checkpoint needs.

A job that is being deleted, but that another owner's finalizer keeps, is suspended until it is gone.
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
    """Stops the job and releases its workers, once they have written a checkpoint or had the time to do so."""
    kept_by = draft.observed.kept_by
    if kept_by is not None:
        reason = Reason.BEING_DELETED
        message = f"the job is being deleted; other finalizers that keep it: {', '.join(kept_by)}"
        if draft.status.reason(ConditionType.RUNNING) != reason:  # not that of Suspended, which may be DeletionRefused
            draft.tell(reason, "The job is being deleted: stopping all workers")
    else:
        reason, message = Reason.SUSPENDED_BY_USER, "spec.suspend is true"
        if not draft.spec.suspend:
            names = [worker.name for worker in _awaited(draft.view)]
            message = f"the job resumes once these pods of it have ended: {listed(names)}"
        if not draft.status.is_true(ConditionType.SUSPENDED):
            draft.tell(reason, "Suspended: stopping all workers")
    draft.update(quota_requests=list(admitted(draft.status)))  # withdraw requests that the queue has not admitted
    stop.release_workers(draft, message)
    if not draft.observed.workers:
        draft.update(quota_requests=[], too_short=None)  # the user may choose other accelerators now
    message = "; ".join(filter(None, [message, stop.words(draft.view)]))
    draft.set_condition(ConditionType.SUSPENDED, True, reason, message)


def is_ending(view: View) -> bool:
    """Whether workers of a suspended job have not ended yet. A resume waits for them.

    They hold accelerators, and may still report the checkpoint that the job will resume from."""
    suspended = view.status.is_true(ConditionType.SUSPENDED)
    return suspended and bool(_awaited(view))


def _awaited(view: View) -> Workers:
    return view.workers.that(lambda worker: _is_awaited(view, worker))


def _is_awaited(view: View, worker: Worker) -> bool:
    """Whether a resume waits until this worker's pod has ended.

    Not if the pod is stuck, for example on a lost node, or has ended and only a finalizer keeps it."""
    return not (worker.terminating and not worker.holds) and not view.is_stuck(worker)


def resume(draft: Draft) -> None:
    """Sets Suspended to False, so that the job starts again."""
    if draft.status.is_true(ConditionType.SUSPENDED):
        draft.set_condition(ConditionType.SUSPENDED, False, Reason.RESUMED)
        draft.tell(Reason.RESUMED, "Resumed")
        draft.keep_workers([], "the job was suspended, and resumes with new workers")
        forget_generation(draft)  # it is still there if stuck pods kept the stop from ending
        draft.update(start_time=None)  # activeDeadlineSeconds counts from the next start, as in a Job
