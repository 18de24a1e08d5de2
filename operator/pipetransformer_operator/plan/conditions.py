"""Says in conditions what the other rules decided, and in one word for the printer column what the conditions say."""

from collections.abc import Iterable
from datetime import timedelta

from pipetransformer_contract.messages import ResizeReason

from ..api.status import Condition, ConditionStatus, ConditionType, PublishedPlan, Reason, Resize, State
from .draft import Draft
from .types import EventType

_STATES = (
    (ConditionType.FAILED, State.FAILED),
    (ConditionType.COMPLETE, State.COMPLETE),
    (ConditionType.SUSPENDED, State.SUSPENDED),
    (ConditionType.STALLED, State.STALLED),
    (ConditionType.RESIZING, State.RESIZING),
    (ConditionType.RUNNING, State.RUNNING),
    (ConditionType.ADMITTED, State.STARTING),
)


def derive_state(conditions: Iterable[Condition]) -> State:
    """The state that a person would name: the first of the true conditions that outranks the others."""
    true = {condition.type for condition in conditions if condition.status is ConditionStatus.TRUE}
    return next((state for kind, state in _STATES if kind in true), State.PENDING)


def describe(draft: Draft) -> None:
    """Sets Admitted, Running, Resizing and Stalled, and the state."""
    _admitted(draft)
    if draft.status.finished:
        for kind in (ConditionType.RUNNING, ConditionType.RESIZING, ConditionType.STALLED):
            _clear(draft, kind)
    else:
        _running(draft)
        _resizing(draft)
        _stalled(draft)
    draft.update(state=derive_state(draft.status.conditions))


def _admitted(draft: Draft) -> None:
    conflicts = sorted(draft.observed.conflicts)
    if draft.label_errors:
        message = "; ".join(map(str, draft.label_errors))
        draft.set_condition(ConditionType.ADMITTED, False, Reason.INVALID_SPEC, message)
    elif conflicts:
        message = f"pods of others have the names of workers: {', '.join(conflicts[:8])}"
        draft.set_condition(ConditionType.ADMITTED, False, Reason.NAME_CONFLICT, message)
    else:
        draft.set_condition(ConditionType.ADMITTED, True, Reason.NO_QUEUE)


def _clear(draft: Draft, kind: ConditionType) -> None:
    if draft.status.condition(kind):
        draft.set_condition(kind, False, Reason.FINISHED)


def _running(draft: Draft) -> None:
    status = draft.status
    plan = status.plan
    if plan is None:
        if draft.spec.suspend:
            draft.set_condition(ConditionType.RUNNING, False, Reason.SUSPENDED_BY_USER)
        elif not _refused(draft, ConditionType.RUNNING, False):
            message = f"{len(draft.ready_joiners)} of {len(status.worker_ids)} workers are ready"
            draft.set_condition(ConditionType.RUNNING, False, Reason.WAITING_FOR_WORKERS, message)
    elif _recovering(draft):
        message = "too few workers are left for any layout; they hold their state until replacements are ready"
        draft.set_condition(ConditionType.RUNNING, False, Reason.RECOVERING, message)
    else:
        message = f"generation {plan.layout_generation}: {_size(plan)}"
        draft.set_condition(ConditionType.RUNNING, True, Reason.TRAINING, message)


def _refused(draft: Draft, kind: ConditionType, status: bool) -> bool:
    """Whether the cluster refuses to create workers; the condition then says why, and an event once."""
    refusal, before = draft.observed.refusal, draft.status.condition(kind)
    if refusal:
        if before is None or before.reason != Reason.CREATION_REFUSED:
            draft.tell(Reason.CREATION_REFUSED, refusal, EventType.WARNING)
        draft.set_condition(kind, status, Reason.CREATION_REFUSED, refusal)
    return bool(refusal)


def _recovering(draft: Draft) -> bool:
    return draft.status.resize is not None and draft.status.resize.reason is ResizeReason.FAILURE


def _resizing(draft: Draft) -> None:
    plan, resize = draft.status.plan, draft.status.resize
    if resize is not None and plan is not None:
        if not _refused(draft, ConditionType.RESIZING, True):
            message = f"{_size(plan)} to {_size(resize)} ({resize.reason.value})"
            draft.set_condition(ConditionType.RESIZING, True, Reason.PREPARING, message)
    elif plan is not None and plan.reason is not ResizeReason.START and not plan.confirmed:
        message = f"to {_size(plan)} ({plan.reason.value}), generation {plan.layout_generation}"
        draft.set_condition(ConditionType.RESIZING, True, Reason.COMMITTING, message)
    elif plan is not None and _leavers_left(draft, plan):
        message = (
            f"to {_size(plan)} ({plan.reason.value}): leavers wait for a durable checkpoint at boundary {plan.boundary}"
        )
        draft.set_condition(ConditionType.RESIZING, True, Reason.RELEASING, message)
    elif draft.status.condition(ConditionType.RESIZING):
        draft.set_condition(ConditionType.RESIZING, False, Reason.SETTLED)


def _size(layout: PublishedPlan | Resize) -> str:
    return f"{layout.pipelines} pipelines of {layout.stages} stages"


def _leavers_left(draft: Draft, plan: PublishedPlan) -> bool:
    names = {member.name for member in plan.leavers}
    return any(draft.name_of(key) in names for key in draft.status.worker_ids)


def _stalled(draft: Draft) -> None:
    seconds, report = draft.spec.run_policy.stall_timeout_seconds, draft.status.last_report
    if seconds is None:
        return
    if report is None or draft.status.plan is None:
        _clear(draft, ConditionType.STALLED)
        return
    progress = max(report.time, draft.observed.since or report.time)
    stall = progress + timedelta(seconds=seconds)
    if draft.now >= stall:
        message = f"no step after step {report.step} for spec.runPolicy.stallTimeoutSeconds ({seconds} s)"
        draft.set_condition(ConditionType.STALLED, True, Reason.NO_PROGRESS, message)
    else:
        draft.wake_at(stall)
        draft.set_condition(ConditionType.STALLED, False, Reason.PROGRESSING)
