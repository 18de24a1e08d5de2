"""The control state: the facts about a job that are the same on all workers between rounds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pydantic.alias_generators import to_camel, to_snake

from pipetransformer_contract.layout import Layout
from pipetransformer_contract.spec import Evaluation, Goal

#: Fields about the present workers and their caches. They have no meaning in a checkpoint.
_OF_WORKERS = ("costs", "cached_layers", "awaited_layers")


@dataclass
class Control:
    """The control state of a job, which is the same on all workers between rounds.

    Attributes:
        step: number of committed steps.
        last_generation: lasting number (`lasting_generation`) of the generation that committed the last step, 0 before
            the first step.
        visit: index of the visit that trains (`multilevel.Visit`); 0 without levels.
        visit_done: whether this visit is complete, so that the next regroup begins the next visit.
        boundary: number of frozen layers.
        boundary_step: committed steps when the boundary last changed, or when the newest trial ended well.
        fell_step: committed steps when the boundary last fell, 0 if it never did. A layer that was frozen then and is
            frozen now has not changed since.
        on_trial: number of frozen layers that are on trial (`freeze.trial`).
        cached_layers: the caches have had the outputs of the first `cached_layers` layers for all samples. These layers
            are in host memory from then on, even if caches lose entries. It falls only with the boundary.
        awaited_layers: the next value of `cached_layers`: these layers move to host memory once the caches have their
            outputs. The same as `cached_layers` if no other layers are frozen. More layers may have frozen since.
        why_thawed: why a trial thawed layers in the last change of the boundary; empty if no trial did.
        policy: state of the freeze policy.
        metrics: metrics of the newest evaluation, by name.
        best: metrics of the best evaluation, by name; empty before the first evaluation.
        best_step: committed steps at the best evaluation.
        kept_step: committed steps of the model that is saved as the best one, 0 if none is.
        evaluations_since_best: number of evaluations since the best one.
        round_ended_at: wall clock at the end of the last round, 0 before the first. A pause begins then.
        costs: fields of the measured `ModelCosts`; None before the measurement.
        slice_costs: fields of the measured `SliceCosts`; None before the measurement, or if the job needs none.
        skipped_steps: number of steps in a row, up to now, that were skipped because they were not finite.
        last_vote: numbers of the vote that committed the last step (`Vote.to_list`); empty if the step was skipped. A
            worker that missed the commit uses them to catch up.
        last_similarities: similarities in that vote.
        decided_step: committed steps when the freeze policy was last asked.
        last_step: the last step's line in the run's record. If the leader died before it wrote the line, another worker
            can.
        earlier_steps: the lines of the other steps of the last round, if it had several.
        one_a_round_until: until this number of committed steps each round has one step, because a step of a longer
            round was not finite.
        evaluated_step: committed steps at the newest evaluation.
        job_uid: UID of the job that trains.
        earlier_job: UID of the job whose checkpoint this job resumed; this job's own UID if it began from step 0; empty
            if unknown.
        earlier_generations: the highest number of a generation in earlier jobs that this job continues.
        first_layout: numbers of stages and of pipelines when this job began; empty if unknown.
    """

    step: int = 0
    last_generation: int = 0
    visit: int = 0
    visit_done: bool = False
    boundary: int = 0
    boundary_step: int = 0
    fell_step: int = 0
    on_trial: int = 0
    cached_layers: int = 0
    awaited_layers: int = 0
    why_thawed: str = ""
    policy: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    best_step: int = 0
    kept_step: int = 0
    evaluations_since_best: int = 0
    round_ended_at: float = 0.0
    costs: dict[str, Any] | None = None
    slice_costs: dict[str, Any] | None = None
    skipped_steps: int = 0
    last_vote: list[float] = field(default_factory=list)
    last_similarities: list[float] = field(default_factory=list)
    decided_step: int = -1
    last_step: dict[str, Any] = field(default_factory=dict)
    earlier_steps: list[dict[str, Any]] = field(default_factory=list)
    one_a_round_until: int = 0
    evaluated_step: int = 0
    job_uid: str = ""
    earlier_job: str = ""
    earlier_generations: int = 0
    first_layout: list[int] = field(default_factory=list)

    def begin_job(self, uid: str, earlier_generations: int, layout: Layout) -> None:
        """Note that the job `uid` begins with this state, which may be another job's.

        Args:
            uid: UID of the job.
            earlier_generations: the highest number of a generation in earlier jobs.
            layout: the layout that the job begins in.
        """
        if self.job_uid != uid:
            self.earlier_job = self.job_uid or (uid if self.step == 0 else "")
            self.job_uid, self.earlier_generations = uid, earlier_generations
            self.first_layout = [layout.stages, layout.pipelines]

    @property
    def began_in(self) -> Layout | None:
        """The layout in which this job began; None if unknown."""
        return Layout(*self.first_layout) if self.first_layout else None

    def lasting_generation(self, number: int) -> int:
        """The number of generation `number` in files that outlive the job. It is above those of earlier
        jobs."""
        return self.earlier_generations + number

    @property
    def point(self) -> tuple[int, int, int]:
        """Identifies the committed state; the step alone does not. Two generations that commit the same step sum
        gradients in different orders, so their states differ in the last bits. A level change makes another model at
        the same step."""
        return self.step, self.last_generation, self.visit

    @property
    def settled_boundary(self) -> int:
        """Number of frozen layers that are not on trial. Layouts are chosen for it."""
        return self.boundary - self.on_trial

    def move_boundary(self, boundary: int) -> None:
        """Set the number of frozen layers from the next step on."""
        if boundary < self.boundary:
            self.fell_step = self.step
        if self.awaited_layers == self.cached_layers:
            self.awaited_layers = boundary
        self.boundary, self.boundary_step = boundary, self.step
        self.cached_layers = min(self.cached_layers, boundary)
        self.awaited_layers = min(self.awaited_layers, boundary)

    def settle(self) -> None:
        """The layers on trial stay frozen, so layouts count them from now on. A checkpoint from before starts in the
        layout of the trial's begin, so it does not cover them."""
        self.boundary_step = self.step

    def note_cached(self, layers: int) -> None:
        """Note that the caches hold the outputs of the first `layers` layers for all samples."""
        self.cached_layers = max(self.cached_layers, layers)
        if self.awaited_layers <= self.cached_layers:
            self.awaited_layers = self.boundary

    def return_with(self, workers: Sequence["Control"]) -> None:
        """Take from later control states what is still true after the workers went back to this state: when the last
        round ended, the newest costs, and which layers are in host memory. The present layout may have no room for
        these layers on the device.

        Args:
            workers: the control states that the workers had.
        """
        self.note_cached(min(self.boundary, max((each.cached_layers for each in workers), default=0)))
        self.round_ended_at = max([self.round_ended_at, *(each.round_ended_at for each in workers)])
        measured = [each for each in workers if each.costs is not None and each.visit == self.visit]
        if measured:
            self.costs = max(measured, key=lambda each: each.point).costs

    @property
    def settled_cached_layers(self) -> int:
        """Number of `cached_layers` that are not on trial."""
        return min(self.cached_layers, self.settled_boundary)

    @property
    def best_is_kept(self) -> bool:
        """Whether the model of the best evaluation is saved."""
        return 0 < self.best_step == self.kept_step

    def is_better(self, values: dict[str, float], spec: Evaluation) -> bool:
        """Whether an evaluation with these metrics is the best so far. With `keepBest`, any finite one is if the model
        of the best evaluation is not saved."""
        value, best = values[spec.best_metric], self.best.get(spec.best_metric)
        if spec.keep_best and not self.best_is_kept:
            best = None
        return math.isfinite(value) and (best is None or (value > best if spec.goal is Goal.HIGHEST else value < best))

    def note_evaluation(self, values: dict[str, float], *, better: bool) -> None:
        """Store the metrics of an evaluation at this state. `better` is the answer of `is_better`."""
        self.metrics, self.evaluated_step = values, self.step
        self.evaluations_since_best = 0 if better else self.evaluations_since_best + 1
        if better:
            self.best, self.best_step = values, self.step

    def to_dict(self) -> dict[str, Any]:
        """All fields by name; JSON-able."""
        return asdict(self)

    def to_file(self) -> dict[str, Any]:
        """The form in the marker file of a checkpoint, in camelCase. Costs and caches are left out, because they belong
        to the present workers."""
        lines = {"last_step": _in_camel(self.last_step), "earlier_steps": list(map(_in_camel, self.earlier_steps))}
        content = self.to_dict() | lines
        return {to_camel(name): value for name, value in content.items() if name not in _OF_WORKERS}

    @classmethod
    def from_file(cls, content: Mapping[str, Any]) -> "Control":
        """Make a control state from the result of `to_file`. The caches begin empty, so `awaited_layers` becomes the
        number of all frozen layers."""
        control = cls.from_dict({to_snake(name): value for name, value in content.items()})
        control.awaited_layers = control.boundary
        control.last_step = _in_snake(control.last_step)
        control.earlier_steps = list(map(_in_snake, control.earlier_steps))
        return control

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "Control":
        """Make a control state from the result of `to_dict`. Fields that this trainer does not know are ignored."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in content.items() if name in known})


def _in_camel(line: Mapping[str, Any]) -> dict[str, Any]:
    return {to_camel(name): value for name, value in line.items()}


def _in_snake(line: Mapping[str, Any]) -> dict[str, Any]:
    return {to_snake(name): value for name, value in line.items()}
