"""Sets the job's conditions from what other rules decided, and its state: one word that `kubectl get` shows."""

from collections.abc import Iterable
from datetime import datetime
from typing import TypeGuard

from pipetransformer_contract.api.status import (
    Condition,
    ConditionStatus,
    ConditionType,
    Reason,
    Resize,
    ResizePhase,
    State,
)
from pipetransformer_contract.messages import Generation, Upcoming
from pipetransformer_contract.words import counted
from pipetransformer_operator.plan import layouts
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.losses import says_succeeded
from pipetransformer_operator.plan.quota import balance
from pipetransformer_operator.plan.quota.requests import admitted
from pipetransformer_operator.plan.types import Queue
from pipetransformer_operator.plan.view import View

from . import stop, undeleted, unsaved
from .readiness import queue_says, why_not_ready
from .stall import all_silent, stall_time, stall_timeout, why_no_group_lasts

_STATES = (
    (ConditionType.FAILED, ConditionStatus.TRUE, State.FAILED),
    (ConditionType.COMPLETE, ConditionStatus.TRUE, State.COMPLETE),
    (ConditionType.SUSPENDED, ConditionStatus.TRUE, State.SUSPENDED),
    (ConditionType.STALLED, ConditionStatus.TRUE, State.STALLED),
    (ConditionType.STALLED, ConditionStatus.UNKNOWN, State.UNHEARD),
    (ConditionType.RESIZING, ConditionStatus.TRUE, State.RESIZING),
    (ConditionType.RUNNING, ConditionStatus.TRUE, State.RUNNING),
    (ConditionType.ADMITTED, ConditionStatus.TRUE, State.STARTING),
)
#: Reasons of Admitted that stay while the operator cannot read the queue's answers.
_OF_QUEUES = (Reason.QUOTA_RESERVED, Reason.QUOTA_LOST, Reason.WAITING_FOR_QUOTA)
_SILENT = (
    "the operator hears from no worker; they may still train without reaching it, so none is declared lost;"
    " workers whose pods the cluster removes are replaced"
)
_PHASES = {
    ResizePhase.PREPARE: Reason.PREPARING,
    ResizePhase.COMMIT: Reason.COMMITTING,
    ResizePhase.CLEAN: Reason.RELEASING,
}


def derive_state(conditions: Iterable[Condition]) -> State:
    """The state in one word: that of the first row of `_STATES` whose condition holds."""
    found = {(condition.type, condition.status) for condition in conditions}
    if (ConditionType.RUNNING, ConditionStatus.TRUE) not in found:  # a job that does not train does not resize
        found -= {(ConditionType.RESIZING, ConditionStatus.TRUE)}
    return next((state for kind, status, state in _STATES if (kind, status) in found), State.PENDING)


def describe(draft: Draft) -> None:
    """Sets Admitted, Running, Resizing, Stalled and Unsaved, and the state."""
    _set_admitted(draft)
    if draft.status.finished:
        for kind in (ConditionType.RUNNING, ConditionType.RESIZING, ConditionType.STALLED, ConditionType.SUSPENDED):
            _clear(draft, kind)
    else:
        _set_running(draft)
        _set_resizing(draft)
        _set_stalled(draft)
    unsaved.describe(draft)
    undeleted.describe(draft)
    number = draft.observed.metadata_generation  # conditions that no rule changed hold for the new spec too
    conditions = [
        one if one.observed_generation == number else one.model_copy(update={"observed_generation": number})
        for one in draft.status.conditions
    ]
    draft.update(state=derive_state(conditions), conditions=conditions)


def _set_admitted(draft: Draft) -> None:
    conflicts = sorted(draft.observed.conflicts)
    if draft.view.spec_errors:
        message = "; ".join(map(str, draft.view.spec_errors))
        draft.warn(ConditionType.ADMITTED, False, Reason.INVALID_SPEC, message)
    elif conflicts:
        message = f"pods of other owners have the names of this job's workers; delete them: {', '.join(conflicts[:8])}"
        draft.warn(ConditionType.ADMITTED, False, Reason.NAME_CONFLICT, message)
    elif draft.observed.queue is None:
        draft.set_condition(ConditionType.ADMITTED, True, Reason.NO_QUEUE)
    elif not draft.status.finished:
        _set_admitted_by_queue(draft, draft.observed.queue)


def _set_admitted_by_queue(draft: Draft, queue: Queue) -> None:
    requests = draft.status.quota_requests
    lost = balance.lost(draft.status, draft.observed)
    if lost and (draft.status.stop is not None or not draft.status.worker_ids):
        draft.set_condition(ConditionType.ADMITTED, False, Reason.QUOTA_LOST, balance.words(lost, queue))
    elif requests and requests[0].admitted:
        granted = counted(admitted(draft.status).granted, "worker")
        message = f"queue {requests[0].queue} grants quota for {granted}"
        draft.set_condition(ConditionType.ADMITTED, True, Reason.QUOTA_RESERVED, message)
    elif draft.status.generation is not None:
        message = "the job started without a queue; its queue label takes effect at the next start"
        draft.set_condition(ConditionType.ADMITTED, True, Reason.NO_QUEUE, message)
    elif queue.problem:
        if draft.status.reason(ConditionType.ADMITTED) not in _OF_QUEUES:
            draft.set_condition(ConditionType.ADMITTED, None, Reason.QUEUE_UNAVAILABLE, queue.problem)
    elif draft.view.stopped:
        reason = Reason.SUSPENDED_BY_USER if draft.observed.kept_by is None else Reason.BEING_DELETED
        draft.set_condition(ConditionType.ADMITTED, False, reason)
    else:
        draft.set_condition(ConditionType.ADMITTED, False, Reason.WAITING_FOR_QUOTA, queue_says(draft.view))


def _clear(draft: Draft, kind: ConditionType) -> None:
    if draft.status.condition(kind):
        draft.set_condition(kind, False, Reason.FINISHED)


def _set_running(draft: Draft) -> None:
    status = draft.status
    generation = status.generation
    if status.is_true(ConditionType.SUSPENDED):
        draft.set_condition(ConditionType.RUNNING, False, status.reason(ConditionType.SUSPENDED))
    elif status.stop is not None or (not status.worker_ids and balance.lost(status, draft.observed)):
        draft.set_condition(ConditionType.RUNNING, False, Reason.QUOTA_LOST, stop.words(draft.view))
    elif generation is None:
        refusal = draft.observed.refusal or draft.observed.unprotected
        starts = status.resize is not None and not draft.view.asleep
        if starts and not _warn_if_refused(draft, ConditionType.RUNNING, False, refusal):
            reason, why = why_not_ready(draft.view)
            message = f"{len(draft.view.ready_joiners)} of {len(status.worker_ids)} workers are ready; {why}"
            waiting = Reason.WAITING_FOR_WORKERS if reason is Reason.NOT_READY else reason
            draft.set_condition(ConditionType.RUNNING, False, waiting, message)
    elif _recovering(draft.view, generation):
        message = "too few workers are left to train; they keep their state and wait for replacements: "
        draft.set_condition(ConditionType.RUNNING, False, Reason.RECOVERING, message + why_not_ready(draft.view)[1])
    elif broken := why_no_group_lasts(draft.view):
        draft.set_condition(ConditionType.RUNNING, False, Reason.GROUP_BROKEN, broken)
    elif not generation.confirmed_generation:
        message = (
            f"generation {generation.layout_generation} is published: its workers connect and load the model's state"
        )
        draft.set_condition(ConditionType.RUNNING, False, Reason.WAITING_FOR_WORKERS, message)
    else:
        message = f"generation {generation.layout_generation}: {generation.layout.words}{_schedule(draft.view)}"
        if draft.observed.unprotected:
            draft.warn(ConditionType.RUNNING, True, Reason.CREATION_REFUSED, f"{message}; {draft.observed.unprotected}")
        else:
            draft.set_condition(ConditionType.RUNNING, True, Reason.TRAINING, message)


def _schedule(view: View) -> str:
    """The schedule that the generation runs, as words to append to its layout; empty until its leader has reported."""
    return view.present_report.schedule_words if view.present_report else ""


def _warn_if_refused(draft: Draft, kind: ConditionType, status: bool, refusal: str) -> bool:
    """Returns whether the cluster refuses something. If so, sets the condition, and sends an event once."""
    if refusal:
        draft.warn(kind, status, Reason.CREATION_REFUSED, refusal)
    return bool(refusal)


def _recovering(view: View, generation: Generation) -> bool:
    """Whether members are lost. If enough were left, `recover` would already have published a layout without them."""
    return not all(view.alive(member) or says_succeeded(view.worker(member)) for member in generation.members)


def _set_resizing(draft: Draft) -> None:
    resize, before = draft.status.resize, draft.status.condition(ConditionType.RESIZING)
    refusal = draft.observed.refusal
    level = draft.view.awaited_level
    if level is not None and (resize is None or resize.phase is ResizePhase.PREPARE):
        draft.set_condition(ConditionType.RESIZING, True, Reason.WAITING_FOR_LEVEL, _awaits_level(draft, level))
    elif resize is None or resize.from_ is None:  # a start is no resize
        limit = _why_not_larger(draft)
        cancelled = before is not None and before.status is ConditionStatus.FALSE and before.reason != Reason.SETTLED
        if not (cancelled and draft.view.asleep) and (before is not None or limit):
            draft.set_condition(ConditionType.RESIZING, False, Reason.SETTLED, limit)
    elif resize.phase is not ResizePhase.PREPARE or not (
        draft.view.asleep or _warn_if_refused(draft, ConditionType.RESIZING, True, refusal)
    ):
        until = f", until {resize.deadline:%Y-%m-%dT%H:%M:%SZ}" if resize.deadline else ""
        schedule = _schedule(draft.view) if resize.phase is ResizePhase.CLEAN else ""
        to = f"{resize.to.layout.words}{schedule}"
        message = f"{resize.from_.layout.words} to {to} ({resize.reason.value}){until}: "
        draft.set_condition(ConditionType.RESIZING, True, _PHASES[resize.phase], message + _awaited(draft.view, resize))


def _awaits_level(draft: Draft, level: Upcoming) -> str:
    if draft.status.resize is None:
        why = _ceiling_of_level(draft.view) or _why_not_larger(draft)
    else:
        why = why_not_ready(draft.view)[1]
    return (
        f"level {level.level} begins before step {level.step}, and its model does not fit in"
        f" {draft.view.generation.layout.words}: the job makes no step until it has more workers"
        + (f"; {why}" if why else "")
    )


def _ceiling_of_level(view: View) -> str:
    """Why the spec does not allow the workers for the next level's model; empty if it does."""
    ceiling, needed = view.spec.elastic_policy.ceiling, min((offer.stages for offer in view.offers), default=0)
    return f"spec.elasticPolicy.maxWorkers allows {ceiling}, and the model needs {needed}" if needed > ceiling else ""


def _why_not_larger(draft: Draft) -> str:
    """Why a job does not grow, or has more workers than its spec allows; empty if it may grow."""
    generation = draft.status.generation
    if generation is None:
        return _no_room(draft)
    return (
        _above_the_ceiling(draft.view, generation)
        or _limit_of_pipelines(draft.view, generation)
        or _pause(draft.view, generation)
        or _no_room(draft)
    )


def _above_the_ceiling(view: View, generation: Generation) -> str:
    """Why a job has more workers than its spec allows; empty if it does not."""
    ceiling = view.spec.elastic_policy.ceiling
    if generation.layout.workers <= ceiling or layouts.best(view, generation.layout.workers):
        return ""
    words = "but no valid layout has as few workers, so the job keeps its layout"
    return f"spec.elasticPolicy.maxWorkers allows {ceiling}, {words}"


def _pause(view: View, generation: Generation) -> str:
    """Until when a job does not try to grow; empty if it may try, or has as many workers as its spec allows."""
    if generation.layout.workers >= view.spec.elastic_policy.ceiling or not view.asleep_and_wakes():
        return ""
    begins = f"the next attempt begins at {view.status.next_resize_time:%Y-%m-%dT%H:%M:%SZ}"
    return f"the last resize failed, or the job lost or released workers: {begins}"


def _no_room(draft: Draft) -> str:
    """Why a job that could use more workers claims none now; empty if it does not wait for free accelerators."""
    if not draft.waits_for_room:
        return ""
    if draft.observed.free is None:
        why = f"{draft.observed.room_unknown}, so the job claims no free accelerators"
        return f"{why}; with spec.elasticPolicy.claimFrom: Autoscaler it creates pods without knowing"
    return "no node has free accelerators for more workers; the job claims them once there are some"


def _limit_of_pipelines(view: View, generation: Generation) -> str:
    """Why a job cannot have as many pipelines as its spec allows; empty if it can."""
    most, elastic = view.shards_of(None), view.spec.elastic_policy
    if generation.pipelines < most or not view.on_pack.widens:
        return ""
    allowed = min(view.spec.max_pipelines, elastic.ceiling // generation.stages)
    if allowed <= most:
        return ""
    durable = view.status.checkpoint
    if view.spec.checkpoint is not None and (durable is None or view.shards_of(durable) > most):
        return (
            f"spec.elasticPolicy allows {allowed} pipelines, but allowed {most} when the job started; it can have more"
            " once it restarts from its checkpoint: suspend and resume it"
        )
    return (
        f"spec.elasticPolicy allows {allowed} pipelines, but the order of the data allows only {most}. That was the"
        " limit when this job started, or the job whose checkpoint it resumed. Only a new job that resumes no"
        " checkpoint can have more"
    )


def _awaited(view: View, resize: Resize) -> str:
    generation = view.generation
    if resize.phase is ResizePhase.PREPARE:
        return why_not_ready(view)[1]
    if resize.phase is ResizePhase.COMMIT:
        return f"generation {generation.layout_generation} is published, and its workers meet and move state"
    leavers, frozen = len(view.status.leaving_ids), generation.boundary
    return f"the release waits for a durable checkpoint (workers: {leavers}; its frozen layers: {frozen})"


def _set_stalled(draft: Draft) -> None:
    stall, before = stall_time(draft.view), draft.status.condition(ConditionType.STALLED)
    if broken := why_no_group_lasts(draft.view):
        draft.set_condition(ConditionType.STALLED, True, Reason.GROUP_BROKEN, broken)
    elif stall is None:
        if before is not None:
            draft.set_condition(ConditionType.STALLED, False, Reason.PROGRESSING)
    elif draft.now >= stall or (draft.suspects and not _says_stalled(before)):
        message = f"{_no_step(draft.view, stall)}; {_why_no_step(draft)}"
        draft.set_condition(ConditionType.STALLED, True, Reason.NO_PROGRESS, message)
    else:
        draft.clock.wake_at(stall)
        _clear_stalled(draft, before)


def _clear_stalled(draft: Draft, before: Condition | None) -> None:
    """Sets Stalled to False, or to Unknown while all workers are silent. `before` is the condition so far."""
    report = draft.status.last_report
    if _says_stalled(before) and (report is None or report.time < before.last_transition_time):
        return  # a member was replaced, but Stalled stays until a step is made
    if all_silent(draft.view):
        draft.warn(ConditionType.STALLED, None, Reason.NOT_HEARD, _SILENT)
    else:
        draft.set_condition(ConditionType.STALLED, False, Reason.PROGRESSING)


def _says_stalled(condition: Condition | None) -> TypeGuard[Condition]:
    """Whether this condition says that the job makes no progress."""
    return condition is not None and (condition.status, condition.reason) == (ConditionStatus.TRUE, Reason.NO_PROGRESS)


def _no_step(view: View, stall: datetime) -> str:
    """How long the job has made no step, in words. `stall` is when it counts as stalled."""
    report = view.status.last_report
    words = f"no step after step {report.step}" if report else "no step yet"
    if view.now < stall:
        return words
    default = ", the default" if view.spec.run_policy.stall_timeout_seconds is None else ""
    return f"{words} for spec.runPolicy.stallTimeoutSeconds ({stall_timeout(view).total_seconds():.0f} s{default})"


def _why_no_step(draft: Draft) -> str:
    suspects = "; ".join(f"{name} is replaced: {why}" for name, why in draft.suspects.items())
    return suspects or (_SILENT if all_silent(draft.view) else "every worker still sends heartbeats")
