"""Says in a condition that a job trains on although the storage does not take its checkpoint.

The workers try again by themselves. Until they succeed, a failure would cost the steps since the last durable one.
"""

from pipetransformer_contract.api.status import ConditionType, Reason
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.types import EventType
from pipetransformer_operator.plan.view import View

#: Members whose trouble with the storage a message names.
_MAX_NAMES = 3


def trouble(view: View) -> str:
    """What members say of the storage, each with its name; empty if they can write."""
    generation = view.status.generation
    members = view.living(generation.members) if generation is not None else []
    unsaved = ((member.name, view.observed.beat(member.uid).unsaved) for member in members)
    return "; ".join([f"{name}: {why}" for name, why in unsaved if why][:_MAX_NAMES])


def durable_words(view: View) -> str:
    """Which checkpoint the job would resume from."""
    checkpoint = view.status.checkpoint
    return f"the newest durable one is of step {checkpoint.step}" if checkpoint else "none is durable yet"


def describe(draft: Draft) -> None:
    """Sets the condition while a member cannot write, and takes it back once all can."""
    stands = draft.status.is_true(ConditionType.UNSAVED)
    if draft.status.finished:
        if stands:
            draft.set_condition(ConditionType.UNSAVED, False, Reason.FINISHED)
    elif words := trouble(draft.view):
        message = f"training goes on without a new checkpoint, {durable_words(draft.view)}: {words}"
        if not stands:
            draft.tell(Reason.CHECKPOINT_FAILS, message, EventType.WARNING)
        draft.set_condition(ConditionType.UNSAVED, True, Reason.CHECKPOINT_FAILS, message)
    elif stands and _hears_all(draft.view):
        draft.set_condition(ConditionType.UNSAVED, False, Reason.NOTHING_WAITS)


def _hears_all(view: View) -> bool:
    """Whether each member told this operator how it is. After a start of the operator that takes a moment."""
    generation = view.status.generation
    members = generation.members if generation is not None else []
    return all(member.uid in view.observed.beats for member in view.living(members))
