"""Says in a condition which workers the cluster refuses to delete, and why, in the cluster's words.

The condition is Suspended if that is True, otherwise Running, even if the job trains or has ended. If another rule set
the condition in this turn, the refusal is appended to its message.
"""

from pipetransformer_contract.api.status import Condition, ConditionStatus, ConditionType, JobStatus, Reason
from pipetransformer_operator.plan.deletions import listed
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.types import EventType
from pipetransformer_operator.plan.workers import Workers

#: The condition keeps these reasons, because they say why the job does not train. Only its message names the refusal.
_STAYS = (Reason.CREATION_REFUSED, Reason.NO_LEGAL_START)


def leaks(draft: Draft) -> bool:
    """Whether workers of a failed attempt still hold accelerators, because the cluster refuses to delete them.

    Then no new attempt begins, because it would hold as many accelerators again."""
    failed = draft.status.resize_failures > 0 and not draft.view.joining_ids
    return failed and bool(_undeleted(draft).holding)


def describe(draft: Draft) -> None:
    """Sets the condition while the cluster refuses to delete workers, and replaces it afterwards."""
    workers = _undeleted(draft)
    suspended = draft.status.is_true(ConditionType.SUSPENDED) and not draft.status.finished
    where = ConditionType.SUSPENDED if suspended else ConditionType.RUNNING
    if workers:
        _say_refused(draft, where, workers)
    for condition in _refusals(draft.status):
        if condition.type not in draft.conditions_set:
            _take_back(draft, condition)


def _refusals(status: JobStatus) -> list[Condition]:
    return [condition for condition in status.conditions if condition.reason == Reason.DELETION_REFUSED]


def _say_refused(draft: Draft, where: ConditionType, workers: Workers) -> None:
    names = listed([worker.name for worker in workers])
    words = f"the cluster refuses to delete {names}: {draft.observed.undeleted[workers[0].uid]}"
    reason, message = str(Reason.DELETION_REFUSED), words
    if where in draft.conditions_set:
        said = draft.status.condition(where)
        assert said is not None
        reason = said.reason if said.reason in _STAYS else reason
        message = "; ".join(filter(None, [said.message, words]))
    if reason == Reason.DELETION_REFUSED and not _refusals(draft.observed.status):
        draft.tell(Reason.DELETION_REFUSED, words, EventType.WARNING)
    draft.set_condition(where, draft.status.is_true(where), reason, message)


def _undeleted(draft: Draft) -> Workers:
    refused = draft.observed.undeleted
    return draft.unwanted.that(lambda worker: worker.uid in refused)


def _take_back(draft: Draft, condition: Condition) -> None:
    """Replaces the reason and message of a condition whose refusal is over. The message before the refusal is lost."""
    again = draft.status.next_resize_time
    message = f"the next attempt begins at {again:%Y-%m-%dT%H:%M:%SZ}" if draft.view.asleep else ""
    reason = Reason.FINISHED if draft.status.finished else Reason.WAITING_FOR_WORKERS
    draft.set_condition(condition.type, condition.status is ConditionStatus.TRUE, reason, message)
