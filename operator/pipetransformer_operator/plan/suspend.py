"""Suspending gives every worker back; resuming starts again, in the size that the checkpoint needs."""

from ..api.status import ConditionType, Reason
from .draft import Draft


def suspend(draft: Draft) -> None:
    """Stops the job: no worker is wanted, and the plan is forgotten, but never the number of its generation."""
    if not draft.status.is_true(ConditionType.SUSPENDED):
        draft.tell(Reason.SUSPENDED_BY_USER, "Suspended: all workers are deleted")
    draft.set_condition(ConditionType.SUSPENDED, True, Reason.SUSPENDED_BY_USER, "spec.suspend is true")
    draft.update(plan=None, resize=None, worker_ids=[], next_resize_time=None)


def resume(draft: Draft) -> None:
    """Lets a suspended job start again."""
    if draft.status.is_true(ConditionType.SUSPENDED):
        draft.set_condition(ConditionType.SUSPENDED, False, Reason.RESUMED)
        draft.tell(Reason.RESUMED, "Resumed")
