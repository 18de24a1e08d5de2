"""Tells which steps are lost when no worker holds them and the job resumes from its checkpoint."""

from pipetransformer_contract.api.status import Reason
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.losses import saved_step
from pipetransformer_operator.plan.types import EventType, Worker
from pipetransformer_operator.plan.view import View


def forget_generation(draft: Draft) -> None:
    """Forgets the published generation, but never its number, because no worker holds its state.

    Members that the cluster takes away may still leave a checkpoint. Then the next start tells what is lost.
    """
    if draft.status.generation is not None:
        if draft.spec.checkpoint is not None and any(map(_may_save, draft.view.workers_of(draft.view.members))):
            draft.update(unsettled_step=newest_step(draft.view))
        else:
            tell_lost(draft)
    draft.update(generation=None, stop=None)


def _may_save(worker: Worker) -> bool:
    """Whether a worker that is taken away may still leave a checkpoint."""
    return worker.terminating and worker.holds and worker.exit_code is None


def settle(draft: Draft, step: int) -> None:
    """Tells what was lost, now that the job has resumed from `step`."""
    reached = draft.status.unsettled_step
    if reached is None:
        return
    if reached > step:
        words = f"{reached - step} steps are lost: step {reached} was reached, and the job resumed from step {step}"
        draft.tell(Reason.STEPS_LOST, words, EventType.WARNING)
    draft.update(unsettled_step=None)


def tell_lost(draft: Draft) -> None:
    """Tells how many steps no checkpoint holds. A job whose first generation is not confirmed has made none."""
    generation, stop, checkpoint = draft.status.generation, draft.status.stop, draft.status.checkpoint
    if (
        generation is None
        or not generation.confirmed_generation
        or (stop is not None and draft.spec.checkpoint is None)
    ):
        return  # the stop began with the words that all are lost
    durable = max(saved_by_members(draft.view), stop.saved_step if stop else 0, checkpoint.step if checkpoint else 0)
    newest = newest_step(draft.view)
    if newest > durable:
        steps = f"{newest - durable} steps are lost: step {newest} was reached, and "
        steps += f"the newest durable checkpoint is of step {durable}" if durable else "no checkpoint is durable"
        draft.tell(Reason.STEPS_LOST, steps, EventType.WARNING)


def saved_by_members(view: View) -> int:
    """Steps of the durable checkpoint that members left as they ended; 0 if none did. A worker that left with an older
    generation knows nothing of the steps since."""
    return max(map(saved_step, view.workers_of(view.members)), default=0)


def newest_step(view: View) -> int:
    """Committed steps that the operator knows of; the workers may have made a few more."""
    reports = filter(None, (view.status.last_report, view.observed.report))
    return max((one.step for one in reports if one.job_uid == view.observed.uid), default=0)
