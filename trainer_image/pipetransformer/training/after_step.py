"""Decisions after a committed step. They depend only on the vote and the control state, so all workers decide the
same."""

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
    """Check that not too many steps in a row were skipped because they were not finite.

    Args:
        job: the job that trains.
        control: the control state, which counts skipped steps.
        began: where the newest step stopped being finite.

    Raises:
        SpecError: more than `spec.training.maxSkippedSteps` steps in a row were skipped. The message names the newest
            step and `began`.
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
    """Ask the freeze policy for the boundary, and apply it to `state`. Returns whether the boundary moved.

    Call this before the first step, and after each committed step.

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
    """Return the gradient norms of the units, with a norm for units that share all their parameters with later units.

    In `norms` a shared parameter counts only in its last unit. So a unit that shares all its parameters has norm 0, as
    if it had nothing to train. If it trains, it gets the norm of the units in which its parameters count.

    Args:
        norms: gradient norms of the units, in which each parameter counts once.
        boundary: the number of frozen layers when the norms were computed.
        ties: the parameters that units share.
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
    """Whether training is over: all steps are done, or `spec.evaluation.patience` evaluations in a row were not better
    than the best one."""
    patience = job.spec.evaluation.patience if job.is_last(control.visit) else None
    return control.step >= job.total_steps or (patience is not None and control.evaluations_since_best >= patience)


def stages_too_few(job: Job, control: Control, stages: int, first_step: int) -> int | None:
    """After a worker ran out of memory, return the number of stages that was too small; None if it may be enough after
    all.

    It may be enough if layers have thawed since the stages were cut, and the pipeline has its full length. The stages
    were cut for fewer layers that train. The next generation cuts them for the present boundary, and may then fit.

    Args:
        job: the job of the worker.
        control: the control state after the worker's last round.
        stages: number of stages in the worker's pipeline.
        first_step: number of committed steps when the stages were cut.
    """
    cut_for_more_frozen = control.fell_step > first_step
    return None if cut_for_more_frozen and stages >= job.spec.pipeline.stages else stages
