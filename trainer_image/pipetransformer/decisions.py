"""What follows a committed step, decided alike on all workers: from the vote and the control state alone."""

from .errors import SpecError
from .freeze import FreezeObservation, PolicyCopy
from .job import Job
from .non_finite import NO_TARGETS, Beginning
from .state import Control, WorkerState
from .vote import Vote


def check_progress(job: Job, control: Control, began: Beginning) -> None:
    """Give up when too many steps in a row were not finite, the last of which began to be so there.

    Raises:
        SpecError: which step it was last, and where.
    """
    limit = job.spec.training.max_skipped_steps
    if control.skipped_steps <= limit:
        return
    advice = "A lower learningRate or a maxGradientNorm may help"
    if began is NO_TARGETS:
        advice = "A larger globalBatchSize, or targets for more samples, may help"
    raise SpecError(
        "spec.training.maxSkippedSteps",
        f"{control.skipped_steps} steps in a row were not finite, {limit} may be skipped; at step"
        f" {control.step - 1} it was {began}. {advice}",
        reason="NonFinite",
    )


def move_boundary(job: Job, policy: PolicyCopy, state: WorkerState) -> bool:
    """Ask the policy, before the first step or after the newest; whether the boundary moved.

    Raises:
        SpecError: the policy failed.
    """
    control = state.control
    vote = Vote.from_list(control.last_vote) if control.last_vote else None
    observation = FreezeObservation(
        step=control.step,
        epoch=job.order.epoch(control.step),
        boundary=control.boundary,
        num_layers=job.num_layers,
        unit_gradient_norms=vote.unit_norms if vote is not None else (),
        learning_rate=control.last_step.get("learning_rate", 0.0),
        similarities=control.last_similarities,
    )
    boundary = policy.decide(observation)
    control.policy = policy.state_dict()
    control.decided_step = control.step
    if boundary == control.boundary:
        return False
    if boundary < control.boundary:
        control.fell_step = control.step
    control.boundary = boundary
    control.boundary_step = control.step
    state.apply_boundary()
    return True


def is_done(job: Job, control: Control) -> bool:
    """Whether there is nothing left to train, or no hope of a better model."""
    patience = job.spec.evaluation.patience
    return control.step >= job.total_steps or (patience is not None and control.evaluations_since_best >= patience)
