"""Decisions after a committed step. All workers decide the same, from the vote and the control state alone."""

import math
from collections.abc import Sequence

from pipetransformer.errors import SpecError
from pipetransformer.freeze import FreezeObservation, PolicyCopy
from pipetransformer.freeze.boundary import first_trainable
from pipetransformer.job.job import Job
from pipetransformer.models import Ties
from pipetransformer.models.metrics import LOSS
from pipetransformer.state.control import Control
from pipetransformer.state.worker_state import WorkerState

from .non_finite import NO_TARGETS, Beginning
from .vote import Vote


def check_progress(job: Job, control: Control, began: Beginning) -> None:
    """End the run when too many steps in a row were not finite. `began` tells where the newest one stopped being
    finite.

    Raises:
        SpecError: names the newest step and the place.
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
    """Ask the freeze policy before the first step or after the newest one. Returns whether the boundary moved.

    Raises:
        SpecError: the policy failed.
    """
    control = state.control
    vote = Vote.from_list(control.last_vote) if control.last_vote else None
    evaluated = control.evaluated_step == control.step
    observation = FreezeObservation(
        step=control.step,
        epoch=job.order.epoch(control.step),
        boundary=control.boundary,
        num_layers=job.num_layers,
        unit_gradient_norms=() if vote is None else norms_with_ties(vote.unit_norms, control.boundary, job.model.ties),
        learning_rate=control.last_step.get("learning_rate", 0.0),
        similarities=control.last_similarities,
        loss=None if vote is None else vote.loss,
        held_out_loss=control.metrics.get(LOSS) if evaluated else None,
    )
    for line in control.earlier_steps:
        policy.note_loss(line["step"] + 1, line["loss"])
    boundary = policy.decide(observation)
    control.policy = policy.state_dict()
    control.decided_step = control.step
    control.on_trial = policy.on_trial(boundary)
    if boundary == control.boundary:
        return False
    control.why_thawed = "" if policy.verdict is None or policy.verdict.kept else policy.verdict.words
    control.move_boundary(boundary)
    state.apply_boundary()
    return True


def norms_with_ties(norms: Sequence[float], boundary: int, ties: Ties) -> list[float]:
    """Return the gradient norms of the units. A shared parameter counts in its last unit only. A unit that shares all
    its parameters would thus seem to have nothing to train, so it gets the norm of the units where they count.

    Args:
        norms: norms in which each parameter counts once.
        boundary: the boundary at which they were computed.
        ties: parameters that units share.
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
    """Whether all steps are done, or evaluations have stopped getting better."""
    patience = job.spec.evaluation.patience if job.is_last(control.visit) else None
    return control.step >= job.total_steps or (patience is not None and control.evaluations_since_best >= patience)


def stages_too_few(job: Job, control: Control, stages: int, first_step: int) -> int | None:
    """Return the number of stages that was too small for a worker's memory, or None if longer pipelines would not help.

    Layers may train again after the stages were cut. The next generation cuts the stages anew for what trains then, so
    a pipeline of full length may fit with the same number of stages.

    Args:
        job: the worker's job.
        control: the control state after its last round.
        stages: number of stages of its pipeline.
        first_step: steps that were committed when the stages were cut.
    """
    cut_for_more_frozen = control.fell_step > first_step
    return None if cut_for_more_frozen and stages >= job.spec.pipeline.stages else stages
