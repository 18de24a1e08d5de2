"""Predicts a job's layouts without training it, for `pipetransformer plan`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pipetransformer.data import Split, lengths_of, read_batch
from pipetransformer.errors import SpecError
from pipetransformer.freeze import Explicit, FreezeObservation, NoFreeze, PaperSchedule
from pipetransformer.job.job import Job
from pipetransformer.job.load import load_job
from pipetransformer.models import MicroBatchContext
from pipetransformer.partition import ASSUMED_PAUSE_SECONDS, Candidate, Cut, MemoryBoundError, ModelCosts
from pipetransformer.partition.ideal import Ideal, Segment, segments, with_cache_of
from pipetransformer.pipeline.probe import Probe
from pipetransformer.schedules import Asynchronous, RoundShape, staleness
from pipetransformer.training.worker_memory import host_apart, usable_bytes
from pipetransformer.worker.process import choose_device
from pipetransformer_contract.choose import Bounds, Present
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Offer
from pipetransformer_contract.spec import ASYNCHRONOUS, SCRIPT, FreezePolicyName, ScheduleName, TrainerSpec


class Instant(NamedTuple):
    """A step before which the layout may change.

    Attributes:
        step: the step; None if gradients decide when.
        boundary: number of frozen layers from then on.
        cached_layers: number of frozen layers that have left the device, where frozen layers leave.
    """

    step: int | None
    boundary: int
    cached_layers: int


@dataclass(frozen=True)
class Forecast:
    """A job as its leader would see it, at any boundary.

    Attributes:
        job: the loaded job, without weights.
        costs: measured costs of its units. None assumes that all layers cost the same; times are then only relative.
        unit_seconds: seconds of the unit of time if costs are assumed.
    """

    job: Job
    costs: ModelCosts | None = None
    unit_seconds: float = 1.0

    @classmethod
    def of(cls, spec: TrainerSpec, costs: ModelCosts | None = None) -> "Forecast":
        """Load the job.

        Raises:
            SpecError: the job cannot be trained as specified, or needs a script.
        """
        _check_named(spec)
        return cls(load_job(spec), costs)

    def at(self, visit: int) -> "Forecast":
        """The job in a visit of one of its levels. The layers of a smaller level count by their parameters."""
        job = self.job.at(visit)
        if job is self.job:
            return self
        whole = self.job.cut(0, 1, 1, None)
        assumed = self.job.step_model(None).step_seconds(0, whole, 1)
        unit = self.step_seconds(0, whole, 1) / assumed
        layers, all_layers = job.unit_bytes[1:-1], self.job.unit_bytes[1:-1]
        share = (sum(layers) / len(layers)) / (sum(all_layers) / len(all_layers))
        return Forecast(job, None, unit * share)

    def boundaries(self) -> list[tuple[int, int]] | None:
        """For each move of the boundary, its step and the frozen layers from then on, if no trial fails. None if
        gradients will decide."""
        policy, total = self.job.policy, self.job.total_steps
        instants: Sequence[int]
        if isinstance(policy, NoFreeze):
            instants = []
        elif isinstance(policy, PaperSchedule):
            instants = range(policy.instants.start, total, policy.instants.interval)
        elif isinstance(policy, Explicit):
            instants = [point.step for point in policy.points if point.step < total]
        else:
            return None
        moves: list[tuple[int, int]] = []
        boundary, begins = 0, self.job.visits[-1].first_step  # of the last visit, in which freezing begins
        for step in [0] * (not begins) + [step for step in instants if step > begins]:
            observation = FreezeObservation(
                step, self.job.order.epoch(step), boundary, self.job.num_layers, unit_gradient_norms=()
            )
            if (decided := self.job.freeze_limits.clamp(policy.decide(observation))) != boundary:
                boundary = decided
                moves.append((step, boundary))
        return moves

    def instants(self) -> list[Instant]:
        """When the layout may change: as layers freeze or train again, and as the cache has caught up with them, if
        frozen layers leave the device then. If gradients will decide, one instant for each boundary, at no step."""
        moves = self.boundaries()
        if moves is None:
            return [Instant(None, boundary, boundary) for boundary in range(self.job.num_layers + 1)]
        steps = {0, *(step for step, _ in moves)}
        run = segments(moves, self.job.total_steps, self.job.order.steps_per_epoch)
        offloads = self.job.step_model(self.costs).offloads
        return [
            Instant(segment.first_step, segment.boundary, segment.off if offloads else 0)
            for segment in run
            if offloads or segment.first_step in steps
        ]

    def off_layers(self, boundary: int, cut: Cut, pipelines: int, cached_layers: int) -> int:
        """Number of frozen layers that the first worker of each pipeline keeps off the device."""
        off = self.job.step_model(self.costs, cached_layers).off_layers(boundary, pipelines)
        return cut.prefix_layers(off)

    def cut(self, boundary: int, layout: Layout, cached_layers: int = 0) -> Cut:
        """The trainer's cut of a layout."""
        costs = None if self.job.cuts_by_paper else self.costs
        return self.job.cut(boundary, layout.stages, layout.pipelines, costs, cached_layers)

    def candidates(self, boundary: int, layout: Layout, cached_layers: int = 0) -> list[Candidate]:
        """The ways to run a layout that the trainer chooses from: the choice first. Empty unless measured costs
        choose."""
        if self.costs is None or self.job.cuts_by_paper:
            return []
        try:
            return self.job.candidates(boundary, layout.stages, layout.pipelines, self.costs, cached_layers)
        except MemoryBoundError:  # the trainer then cuts by assumed costs
            return []

    def staleness(self, boundary: int, cut: Cut, pipelines: int) -> list[int]:
        """How many steps the weights of forwards are behind at most, by stage; empty if none are behind."""
        if cut.schedule not in ASYNCHRONOUS or cut.stages == 1:
            return []
        chunks = self.job.step_model(self.costs).step(boundary, cut.micro_batch_size, pipelines).micro_batches
        frozen = sum(cut.frozen_layers(boundary)[stage] == cut.stage_layers[stage] for stage in range(cut.stages - 1))
        steps = (chunks,) * min(self.job.spec.pipeline.most_steps, cut.stages)
        shape = RoundShape(cut.owners, sum(steps), frozen, steps=steps)
        found = staleness(Asynchronous().actions(shape), shape)
        return [max((age for (span, _), age in found.items() if span == stage), default=0) for stage in cut.owners]

    def step_seconds(self, boundary: int, cut: Cut, pipelines: int) -> float:
        """Seconds of a step; without costs, in units of one sample's forward through one layer."""
        seconds = self.job.step_model(self.costs).step_seconds(boundary, cut, pipelines)
        return seconds * self.unit_seconds

    def starting_step_seconds(self, first: Layout) -> float | None:
        """What the leader would report as the step of the job's first layout with no frozen layers."""
        return self.job.starting_step_seconds(self.costs, first)

    def present(self, boundary: int, cut: Cut, layout: Layout, remaining_steps: int | None) -> Present:
        """What the leader would report about a layout in which it trains."""
        seconds = self.job.choice_model(self.costs).step_seconds(boundary, cut, layout.pipelines)
        return Present(layout, seconds, remaining_steps)

    def offers(self, boundary: int, cached_layers: int = 0) -> list[Offer]:
        """The leader's offers at this boundary, before it has measured a pause. Without costs pauses count as 0,
        because there is no time to compare them with."""
        pause = 0.0 if self.costs is None else ASSUMED_PAUSE_SECONDS
        return self.job.offers(boundary, self.costs, scale=1.0, pause_seconds=pause, cached_layers=cached_layers)

    def ideal(self, bounds: Bounds) -> Ideal:
        """What layouts within these limits could reach at best."""
        return Ideal(self.job.step_model(self.costs), bounds, self.job.spec.pipeline.packing)

    def segments(self) -> list[Segment] | None:
        """The run, split where layers freeze and, with a cache, where that has caught up; None if gradients will
        decide."""
        moves = self.boundaries()
        if moves is None:
            return None
        caught_up_after = self.job.order.steps_per_epoch if self.job.step_model(self.costs).cache_bytes else 0
        return segments(moves, self.job.total_steps, caught_up_after)

    def segment_seconds(self, segment: Segment, cut: Cut, pipelines: int) -> float:
        """Seconds of a step in a segment, with what the cache has by then."""
        model = with_cache_of(self.job.step_model(self.costs), segment.boundary, segment.cached, segment.off)
        return model.step_seconds(segment.boundary, cut, pipelines)


def _check_named(spec: TrainerSpec) -> None:
    for field, name in (
        ("spec.model.name", spec.model.name),
        ("spec.data.name", spec.data.name),
        ("spec.freeze.policy", spec.freeze.policy),
        ("spec.pipeline.schedule", spec.pipeline.schedule),
    ):
        if name in (SCRIPT, FreezePolicyName.SCRIPT, ScheduleName.SCRIPT):
            raise SpecError(field, f"is {name}: a plan needs only the manifest, but this part is in the script")


def measure_here(job: Job) -> ModelCosts:
    """Measure each unit on this machine's accelerator, or its CPU, and how much memory it has for layers. Sending
    between workers is taken to cost nothing.

    Raises:
        ModelError: the model failed.
        DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
    """
    device = choose_device()
    usable = usable_bytes(device)  # before there is a model
    built = job.build_units(range(job.num_layers + 2))
    units = [built[index].to(device) for index in sorted(built)]
    small = max(2, job.micro_batch_size // 4)
    sizes = (small, max(2 * small, job.micro_batch_size))
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
    )
