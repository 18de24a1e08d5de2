"""Says in a condition which workers the cluster refuses to delete, and in the cluster's words why.

The condition is Suspended while that is True, otherwise Running, also if the job trains on or has ended. Its own words
stay in front of the message as long as a rule sets them at each turn.
"""

from pipetransformer_contract.api.status import Condition, ConditionStatus, ConditionType, Reason
from pipetransformer_operator.plan.deletions import listed
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.types import EventType, Worker

#: These reasons stay: they say why nothing trains. The refusal is only added to their message.
_STAYS = (Reason.CREATION_REFUSED, Reason.NO_LEGAL_START)


def leaks(draft: Draft) -> bool:
    """Whether no attempt begins, because workers of a failed one still hold accelerators: another would hold as many
    more."""
    return (
        bool(draft.status.resize_failures)
        and not draft.view.joining_ids
        and any(worker.holds for worker in _undeleted(draft))
    )


def describe(draft: Draft) -> None:
    """Sets the reason of a condition while workers cannot be deleted, and takes it back when they can."""
    workers = _undeleted(draft)
    suspended = draft.status.is_true(ConditionType.SUSPENDED) and not draft.status.finished
    where = ConditionType.SUSPENDED if suspended else ConditionType.RUNNING
    for condition in draft.status.conditions:
        stale = condition.reason == Reason.DELETION_REFUSED and condition.type not in draft.said
        if stale and not (workers and condition.type is where):
            _take_back(draft, condition)
    if not workers:
        return
    names = listed([worker.name for worker in workers])
    words = f"the cluster refuses to delete {names}: {draft.observed.undeleted[workers[0].uid]}"
    present = draft.status.condition(where)
    status, reason, message = False, "", ""
    if present is not None:
        status = present.status is ConditionStatus.TRUE
        if where in draft.said:
            reason, message = present.reason, present.message
    full = "; ".join(filter(None, [message, words]))
    if reason in _STAYS:
        draft.set_condition(where, status, reason, full)
        return
    if all(condition.reason != Reason.DELETION_REFUSED for condition in draft.observed.status.conditions):
        draft.tell(Reason.DELETION_REFUSED, words, EventType.WARNING)
    draft.set_condition(where, status, Reason.DELETION_REFUSED, full)


def _undeleted(draft: Draft) -> list[Worker]:
    refused = draft.observed.undeleted
    return [worker for worker in draft.unwanted if worker.uid in refused] if refused else []


def _take_back(draft: Draft, condition: Condition) -> None:
    """Replaces a refusal that is over. The condition's earlier words are lost."""
    again = draft.status.next_resize_time
    message = f"the next attempt begins at {again:%Y-%m-%dT%H:%M:%SZ}" if again and draft.view.asleep else ""
    reason = Reason.FINISHED if draft.status.finished else Reason.WAITING_FOR_WORKERS
    draft.set_condition(condition.type, condition.status is ConditionStatus.TRUE, reason, message)
