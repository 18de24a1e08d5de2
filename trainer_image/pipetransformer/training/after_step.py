"""What follows a committed step, decided alike on all workers: from the vote and the control state alone."""

import math
from collections.abc import Sequence

from pipetransformer.errors import SpecError
from pipetransformer.freeze import FreezeObservation, PolicyCopy
from pipetransformer.freeze.boundary import first_trainable
from pipetransformer.job.job import Job
from pipetransformer.models import Ties
from pipetransformer.state.control import Control
from pipetransformer.state.worker_state import WorkerState

from .non_finite import NO_TARGETS, Beginning
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
        unit_gradient_norms=() if vote is None else norms_with_ties(vote.unit_norms, control.boundary, job.model.ties),
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


def norms_with_ties(norms: Sequence[float], boundary: int, ties: Ties) -> list[float]:
    """Gradient norms of the units. A parameter that several units share counts in its last one, and so a unit that
    trains and shares all that it has would seem to have nothing to train: it gets the norm of those where that counts.

    Args:
        norms: in which each parameter counts once.
        boundary: at which they were computed.
        ties: of the model.
    """
    counted: list[set[int]] = [set() for _ in norms]
    for tie in ties.all:
        for unit, _ in tie.places:
            counted[unit].add(tie.last_unit)
    return [
        norm or (math.hypot(*(norms[last] for last in counted[unit])) if unit >= first_trainable(boundary) else 0.0)
        for unit, norm in enumerate(norms)
    ]


def is_done(job: Job, control: Control) -> bool:
    """Whether there is nothing left to train, or no hope of a better model."""
    patience = job.spec.evaluation.patience
    return control.step >= job.total_steps or (patience is not None and control.evaluations_since_best >= patience)


def stages_too_few(job: Job, control: Control, stages: int, first_step: int) -> int | None:
    """How many stages were too few for the memory of a worker; None where longer pipelines are no way out.

    A pipeline as long as the spec's whose blocks train again has the stages that were cut while they were frozen. The
    next generation cuts them for what trains now, so it may well fit with as many.

    Args:
        job: of the worker.
        control: of its last round.
        stages: of its pipeline.
        first_step: steps that were committed when its stages were cut.
    """
    cut_for_more_frozen = control.fell_step > first_step
    return None if cut_for_more_frozen and stages >= job.spec.pipeline.stages else stages
