"""Sends events about lost steps: steps that the job made, but that neither a worker nor its checkpoint holds."""

from pipetransformer_contract.api.status import Reason
from pipetransformer_contract.words import counted_are
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.losses import saved_step
from pipetransformer_operator.plan.types import EventType, Worker, WorkerPhase
from pipetransformer_operator.plan.view import View


def forget_generation(draft: Draft) -> None:
    """Removes the published generation from the status, because no worker holds its state. Its number is never reused.

    Also tells which steps are lost. If members may still write a checkpoint while they end, the next start tells it.
    """
    if draft.status.generation is not None:
        if draft.spec.checkpoint is not None and any(map(_may_save, draft.view.workers_of(draft.view.members))):
            draft.update(unsettled_step=draft.view.newest_step)
        else:
            tell_lost(draft)
    draft.update(generation=None, stop=None)


def _may_save(worker: Worker) -> bool:
    """Whether a worker that is being deleted may still write a checkpoint."""
    return worker.terminating and worker.phase is WorkerPhase.RUNNING


def settle(draft: Draft, step: int) -> None:
    """Tells which steps were lost, now that the job has resumed from `step`, if that was left open."""
    reached = draft.status.unsettled_step
    if reached is None:
        return
    if reached > step:
        lost = counted_are(reached - step, "step")
        words = f"{lost} lost: step {reached} was reached, and the job resumed from step {step}"
        draft.tell(Reason.STEPS_LOST, words, EventType.WARNING)
    draft.update(unsettled_step=None)


def tell_lost(draft: Draft) -> None:
    """Tells how many steps no durable checkpoint holds. Before its first confirmed generation a job has made none."""
    stop, checkpoint = draft.status.stop, draft.status.checkpoint
    if not draft.view.generation.confirmed_generation or (stop is not None and draft.spec.checkpoint is None):
        return  # without a checkpoint, the event at the begin of the stop said that all steps will be lost
    durable = max(saved_by_members(draft.view), stop.saved_step if stop else 0, checkpoint.step if checkpoint else 0)
    newest = draft.view.newest_step
    if newest > durable:
        steps = f"{counted_are(newest - durable, 'step')} lost: step {newest} was reached, and "
        steps += f"the newest durable checkpoint is of step {durable}" if durable else "no checkpoint is durable"
        draft.tell(Reason.STEPS_LOST, steps, EventType.WARNING)


def saved_by_members(view: View) -> int:
    """Step of the newest durable checkpoint that members of the published generation wrote as they ended; 0 for none.

    Workers of earlier generations do not count, because they do not hold the steps since then."""
    return max(map(saved_step, view.workers_of(view.members)), default=0)
