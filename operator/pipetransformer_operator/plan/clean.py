"""The third phase of a resize: leavers are given back once a checkpoint that knows its boundary is durable.

Before that they are kept, ended or not: a job that has to start again must find the size that it starts with.
"""

from ..api.status import Reason, ResizePhase
from .draft import Draft


def under_way(draft: Draft) -> bool:
    """Gives back what may go; whether leavers still wait for a checkpoint."""
    status = draft.status
    plan, leaving = status.plan, status.leaving_ids
    assert plan is not None
    if leaving and draft.spec.checkpoint and not plan.covered_by(status.checkpoint):
        if status.resize is not None:
            draft.update(resize=status.resize.model_copy(update={"phase": ResizePhase.CLEAN, "deadline": None}))
        return True
    if leaving:
        draft.tell(Reason.WORKERS_DELETED, f"{len(leaving)} workers have left generation {plan.layout_generation}")
        draft.update(releasing_ids=sorted({*status.releasing_ids, *draft.surplus_ids}))
        draft.keep_workers(set(status.worker_ids) - set(leaving))
        if status.next_resize_time and plan.published_time:  # only now can anybody else have what it gave up
            draft.update(next_resize_time=status.next_resize_time + (draft.now - plan.published_time))
    if status.resize is not None and status.resize.phase is not ResizePhase.PREPARE:
        draft.update(resize=None)
    return False
