"""Predicts a job's layouts without training it, for `pipetransformer plan`."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pipetransformer.data import Split, lengths_of, read_batch
from pipetransformer.errors import SpecError
from pipetransformer.freeze import FreezeObservation, PolicyCopy
from pipetransformer.job.job import Job
from pipetransformer.job.load import load_job
from pipetransformer.models import MicroBatchContext
from pipetransformer.partition import (
    ASSUMED_PAUSE_SECONDS,
    Candidate,
    Cut,
    MemoryBoundError,
    ModelCosts,
    measured_sizes,
)
from pipetransformer.partition.ideal import Ideal, Segment, segments, with_cache_of
from pipetransformer.pipeline.probe import Probe
from pipetransformer.schedules import Asynchronous, RoundShape, staleness
from pipetransformer.training.round import end_of_round
from pipetransformer.training.worker_memory import host_apart, usable_bytes
from pipetransformer.worker.process import choose_device
from pipetransformer_contract.choose import Bounds, Present
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Offer
from pipetransformer_contract.spec import ASYNCHRONOUS, SCRIPT, FreezePolicyName, ScheduleName, TrainerSpec


class LayoutChange(NamedTuple):
    """A step before which the job may change its layout.

    Attributes:
        step: the step, from 0; None if it is unknown, because gradients decide when layers freeze.
        boundary: number of frozen layers from this step on.
        cached_layers: number of frozen layers that have left the device by then; 0 if the job moves none off it.
    """

    step: int | None
    boundary: int
    cached_layers: int


@dataclass(frozen=True)
class Forecast:
    """Predicts what the leader of a job would measure and report, for any number of frozen layers.

    Attributes:
        job: the loaded job, without weights.
        costs: measured costs of the units. None assumes that all layers cost the same; times are then only relative.
        time_scale: factor for all predicted times. It makes assumed times of a smaller level comparable with level 0.
    """

    job: Job
    costs: ModelCosts | None = None
    time_scale: float = 1.0

    @classmethod
    def of(cls, spec: TrainerSpec, costs: ModelCosts | None = None) -> "Forecast":
        """Load the job of `spec`.

        Args:
            spec: the trainer's spec.
            costs: measured costs of the units; None to assume equal layers.

        Raises:
            SpecError: the job cannot be trained as specified, a program must pass a part of it, or the costs are those
                of another model.
        """
        _check_named(spec)
        job = load_job(spec)
        if costs is not None:
            _check_costs(costs, job)
        return cls(job, costs)

    def at(self, visit: int) -> "Forecast":
        """The forecast for a visit, a period of training of one level of `multiLevel`.

        The costs of a smaller level are not measured. A layer of it is assumed to take time in proportion to the bytes
        of its parameters.
        """
        job = self.job.at(visit)
        if job is self.job:
            return self
        whole = self.job.layouts.cut(0, 1, 1, None)
        assumed = self.job.layouts.step_model(None).step_seconds(0, whole, 1)
        unit = self.step_seconds(0, whole, 1) / assumed
        layers, all_layers = job.unit_bytes[1:-1], self.job.unit_bytes[1:-1]
        share = (sum(layers) / len(layers)) / (sum(all_layers) / len(all_layers))
        return Forecast(job, None, unit * share)

    @property
    def never_freezes(self) -> bool:
        """Whether the policy freezes layers by itself, but none before the job ends."""
        freeze = self.job.spec.freeze
        return freeze.policy not in (FreezePolicyName.NONE, FreezePolicyName.SCRIPT) and self.boundaries() == []

    def boundaries(self) -> list[tuple[int, int]] | None:
        """When the boundary moves: (step, number of frozen layers from then on), if no trial of a freeze fails.

        None if gradients decide, so that the steps are unknown.

        Raises:
            SpecError: the policy failed.
        """
        if not self.job.policy.known_ahead:
            return None
        policy = PolicyCopy(self.job.policy, {}, self.job.freeze_limits)
        moves: list[tuple[int, int]] = []
        boundary, begins = 0, self.job.visits[-1].first_step  # layers freeze only in the last visit
        step = 0 if begins == 0 else policy.next_decision(begins)
        while step is not None and step < self.job.total_steps:
            observation = FreezeObservation(
                step, self.job.order.epoch(step), boundary, self.job.num_layers, unit_gradient_norms=()
            )
            if (decided := policy.decide(observation)) != boundary:
                boundary = decided
                moves.append((step, boundary))
            step = policy.next_decision(step)
        return moves

    def layout_changes(self) -> list[LayoutChange]:
        """When the layout may change, in order.

        It may change when layers freeze or train again. If frozen layers leave the device, it may also change when the
        cache has their outputs. If gradients decide, there is one change without a step for each boundary.
        """
        moves = self.boundaries()
        if moves is None:
            return [LayoutChange(None, boundary, boundary) for boundary in range(self.job.num_layers + 1)]
        steps = {0, *(step for step, _ in moves)}
        run = segments(moves, self.job.total_steps, self.job.order.steps_per_epoch)
        offloads = self.job.layouts.step_model(self.costs).offloads
        return [
            LayoutChange(segment.first_step, segment.boundary, segment.off if offloads else 0)
            for segment in run
            if offloads or segment.first_step in steps
        ]

    def off_layers(self, boundary: int, cut: Cut, pipelines: int, cached_layers: int) -> int:
        """Number of frozen layers that the first worker of each pipeline keeps in host memory instead of on the device.

        Args:
            boundary: number of frozen layers.
            cut: the layout's cut.
            pipelines: number of pipelines (R).
            cached_layers: number of leading layers whose outputs for all samples have been in the caches.
        """
        off = self.job.layouts.step_model(self.costs, cached_layers).off_layers(boundary, pipelines)
        return cut.prefix_layers(off)

    def cut(self, boundary: int, layout: Layout, cached_layers: int = 0) -> Cut:
        """The cut that the trainer would make for a layout. `cached_layers` is as in `off_layers`."""
        costs = None if self.job.layouts.cuts_by_paper else self.costs
        return self.job.layouts.cut(boundary, layout.stages, layout.pipelines, costs, cached_layers)

    def candidates(self, boundary: int, layout: Layout, cached_layers: int = 0) -> list[Candidate]:
        """The ways to run a layout among which the trainer chooses, its choice first.

        Empty if costs are not measured, or if packing `Paper` ignores them. `cached_layers` is as in `off_layers`.
        """
        if self.costs is None or self.job.layouts.cuts_by_paper:
            return []
        try:
            return self.job.layouts.candidates(boundary, layout.stages, layout.pipelines, self.costs, cached_layers)
        except MemoryBoundError:  # the trainer then cuts by assumed costs
            return []

    def staleness(self, boundary: int, cut: Cut, pipelines: int) -> list[int]:
        """By stage: the largest number of steps that the weights of a forward are behind when its gradient is used.

        Empty if the schedule is synchronous.

        Raises:
            SpecError: the policy failed.
        """
        if cut.schedule not in ASYNCHRONOUS or cut.stages == 1:
            return []
        chunks = self.job.layouts.step_model(self.costs).step(boundary, cut.micro_batch_size, pipelines).micro_batches
        frozen = sum(cut.frozen_layers(boundary)[stage] == cut.stage_layers[stage] for stage in range(cut.stages - 1))
        steps = (chunks,) * self._longest_round(cut.stages)
        shape = RoundShape(cut.owners, sum(steps), frozen, steps=steps)
        found = staleness(Asynchronous().actions(shape), shape)
        return [max((age for (span, _), age in found.items() if span == stage), default=0) for stage in cut.owners]

    def _longest_round(self, enough: int) -> int:
        """The largest number of steps in a round of the run; `enough` if a round has more.

        No staleness is larger in a round with more steps than stages.
        """
        policy = PolicyCopy(self.job.policy, {}, self.job.freeze_limits, self.job.spec.freeze.trial)
        step, longest = 1, 1  # the first round has one step
        while longest < enough and step < self.job.total_steps:
            end = end_of_round(self.job, step, policy)
            step, longest = end, max(longest, end - step)
        return min(longest, enough)

    def step_seconds(self, boundary: int, cut: Cut, pipelines: int) -> float:
        """Predicted seconds of a step. Without costs the unit is the forward of one sample through one layer."""
        seconds = self.job.layouts.step_model(self.costs).step_seconds(boundary, cut, pipelines)
        return seconds * self.time_scale

    def starting_step_seconds(self, first: Layout) -> float | None:
        """Predicted seconds of a step in the job's first layout with no frozen layers, as the leader would report."""
        return self.job.layouts.starting_step_seconds(self.costs, first)

    def present(self, boundary: int, cut: Cut, layout: Layout, remaining_steps: int | None) -> Present:
        """What the leader would report about `layout` while the job trains in it.

        Args:
            boundary: number of frozen layers.
            cut: the layout's cut.
            layout: the layout.
            remaining_steps: steps until the job's end; None if unknown.
        """
        seconds = self.job.layouts.choice_model(self.costs).step_seconds(boundary, cut, layout.pipelines)
        return Present(layout, seconds, remaining_steps)

    def offers(self, boundary: int, cached_layers: int = 0) -> list[Offer]:
        """The offers that the leader would report before it has measured a pause. Without costs pauses count as 0,
        because step times are then not in seconds. `cached_layers` is as in `off_layers`."""
        pause = 0.0 if self.costs is None else ASSUMED_PAUSE_SECONDS
        return self.job.layouts.offers(
            boundary, self.costs, scale=1.0, pause_seconds=pause, cached_layers=cached_layers
        )

    def ideal(self, bounds: Bounds) -> Ideal:
        """The shortest run that layouts within `bounds` could reach."""
        return Ideal(self.job.layouts.step_model(self.costs), bounds, self.job.spec.pipeline.packing)

    def segments(self) -> list[Segment] | None:
        """The run, split where layers freeze or train again and, with a cache, where it has the outputs of new frozen
        layers; None if gradients decide when layers freeze."""
        moves = self.boundaries()
        if moves is None:
            return None
        caught_up_after = self.job.order.steps_per_epoch if self.job.layouts.step_model(self.costs).cache_bytes else 0
        return segments(moves, self.job.total_steps, caught_up_after)

    def segment_seconds(self, segment: Segment, cut: Cut, pipelines: int) -> float:
        """Predicted seconds of a step in a segment, with the outputs that the cache has in it."""
        model = with_cache_of(self.job.layouts.step_model(self.costs), segment.boundary, segment.cached, segment.off)
        return model.step_seconds(segment.boundary, cut, pipelines)


def _check_costs(costs: ModelCosts, job: Job) -> None:
    """Refuse costs of another model, or from which no other micro-batch size can be predicted.

    Raises:
        SpecError: names what differs.
    """
    if len(costs.small) != job.num_layers + 2 or len(costs.large) != job.num_layers + 2:
        layers = len(costs.small) - 2
        raise SpecError("costs", f"are of a model of {layers} layers, but this one has {job.num_layers}: measure again")
    if costs.unit_bytes not in (None, list(job.unit_bytes)):
        raise SpecError("costs", "are of a model of other sizes or another precision: measure again")
    if costs.micro_batch_sizes[0] >= costs.micro_batch_sizes[1]:
        raise SpecError("costs", "need two sizes of a micro-batch, ascending: measure again")
    if sum(cost.forward + cost.backward for cost in costs.small) <= 0:
        raise SpecError("costs", "are all zero: measure again")


def _check_named(spec: TrainerSpec) -> None:
    for field, name in (
        ("spec.model.name", spec.model.name),
        ("spec.data.name", spec.data.name),
        ("spec.freeze.policy", spec.freeze.policy),
        ("spec.pipeline.schedule", spec.pipeline.schedule),
    ):
        if name in (SCRIPT, FreezePolicyName.SCRIPT, ScheduleName.SCRIPT):
            raise SpecError(
                field,
                f"is {name}: plan runs no program, so it lacks the object that a program passes to train. Set another"
                " value for plan, such as by --set",
            )


def measure_here(job: Job) -> ModelCosts:
    """Measure the time and memory of each unit on this machine's accelerator or CPU, and the memory free for layers.

    Transfers between workers are assumed to take no time.

    Raises:
        ModelError: the model failed.
        DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
    """
    device = choose_device()
    usable = usable_bytes(device)  # before the model takes memory
    built = job.build_units(range(job.num_layers + 2))
    units = [built[index].to(device) for index in sorted(built)]
    sizes = measured_sizes(job.micro_batch_size)
    split: Split = job.dataset.train
    recompute = job.spec.training.activation_checkpointing
    costs = []
    for size in sizes:
        ids = [index % len(split) for index in range(size)]
        samples, labels = read_batch(split, ids, 0)
        labels, weights = labels.to(device), torch.ones(size, dtype=job.dtype, device=device)
        context = MicroBatchContext(0, tuple(ids), lengths_of(split, ids, device), job.autocast, recompute)

        def loss(output: torch.Tensor, labels: torch.Tensor = labels, weights: torch.Tensor = weights) -> torch.Tensor:
            return job.model.loss(output, labels, weights)[0]

        costs.append(Probe(units, 0, loss, context, device).measure(samples.to(device)))
    return ModelCosts(
        micro_batch_sizes=sizes,
        small=costs[0],
        large=costs[1],
        worker_bytes=None if math.isinf(usable) else round(usable),
        host_apart=host_apart(device),
        unit_bytes=list(job.unit_bytes),
    )
