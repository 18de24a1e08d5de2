"""Says in the condition Unsaved that a job trains, but cannot write its checkpoint to the storage.

The workers try again by themselves. Until they succeed, a failure may cost all steps since the last durable checkpoint.
"""

from pipetransformer_contract.api.status import ConditionType, Reason
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.view import View

#: How many members a message quotes about their trouble with the storage.
_MAX_NAMES = 3


def trouble(view: View) -> str:
    """Why members cannot write their checkpoints, each with the member's name; empty if all can."""
    unsaved = ((member.name, view.observed.beat(member.uid).unsaved) for member in view.living(view.members))
    return "; ".join([f"{name}: {why}" for name, why in unsaved if why][:_MAX_NAMES])


def durable_words(view: View) -> str:
    """Which checkpoint is the newest durable one, as words that follow a comma."""
    checkpoint = view.status.checkpoint
    return f"the newest durable one is of step {checkpoint.step}" if checkpoint else "none is durable yet"


def describe(draft: Draft) -> None:
    """Sets the condition while a member cannot write its part of a checkpoint, and clears it once all can."""
    stands = draft.status.is_true(ConditionType.UNSAVED)
    if draft.status.finished:
        if stands:
            draft.set_condition(ConditionType.UNSAVED, False, Reason.FINISHED)
    elif words := trouble(draft.view):
        message = f"training continues without a new checkpoint, {durable_words(draft.view)}: {words}"
        draft.warn(ConditionType.UNSAVED, True, Reason.CHECKPOINT_FAILS, message)
    elif stands and _hears_all(draft.view):
        draft.set_condition(ConditionType.UNSAVED, False, Reason.NOTHING_WAITS)


def _hears_all(view: View) -> bool:
    """Whether each member has sent this operator a heartbeat. After a start of the operator that takes a moment."""
    return all(member.uid in view.observed.beats for member in view.living(view.members))
