"""Predicts the cut of a layout, its micro-batches and its step time."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pipetransformer.schedules import fit, one_each
from pipetransformer_contract.spec import ScheduleName

from .contiguous import MemoryBound, MemoryBoundError
from .costs import ModelCosts, UnitCost, training_seconds
from .cut import Cut
from .spans import cut_units

#: Micro-batches for each stage: PipeTransformer, section 3.2, searches from K to 6 K.
_MICRO_BATCHES_PER_STAGE = range(1, 7)


@dataclass(frozen=True)
class StepModel:
    """The facts of a job that, with the layout, decide its step time.

    Attributes:
        costs: costs of the units.
        global_batch: samples in a step.
        num_shards: number of shards (C) of the data.
        micro_batch_size: samples in a micro-batch; None to choose it for each layout.
        one_forward_one_backward: whether pipelines with at least K micro-batches run 1F1B; otherwise GPipe.
        unit_bytes: parameter bytes of each unit.
        trained_bytes: bytes of each unit while it trains: parameters, gradients, moments.
        sample_bytes: bytes of one sample's activation between stages, or in a cache.
        num_samples: samples in an epoch.
        cache_bytes: cache size of the first worker of a pipeline.
        schedule: the schedule of the spec.
        spans_per_worker: spans of each worker (V) under that schedule.
    """

    costs: ModelCosts
    global_batch: int
    num_shards: int
    micro_batch_size: int | None
    one_forward_one_backward: bool
    unit_bytes: Sequence[int]
    trained_bytes: Sequence[int]
    sample_bytes: int
    num_samples: int = 0
    cache_bytes: int = 0
    schedule: ScheduleName = ScheduleName.ONE_FORWARD_ONE_BACKWARD
    spans_per_worker: int = 1
    _costs_at: dict[int, list[UnitCost]] = field(default_factory=dict, init=False, repr=False)

    def cut(self, boundary: int, stages: int, pipelines: int) -> Cut:
        """The best cut of a layout that fits the workers' memory.

        The micro-batch size is searched with stages cut for a middle size, because the cut depends little on it. Then
        the stages are cut again for the size found.

        Raises:
            MemoryBoundError: no cut fits.
            ValueError: there are fewer layers than stages.
        """
        samples = self._samples(pipelines)
        if self.micro_batch_size is not None:
            sizes = [self.micro_batch_size]
        else:
            sizes = sorted({-(-samples // (stages * each)) for each in _MICRO_BATCHES_PER_STAGE}, reverse=True)
            near = self._cut(boundary, stages, pipelines, sizes[len(sizes) // 2], bounded=False)

            def seconds(size: int) -> float:
                # With several spans a worker the schedule depends on the number of micro-batches.
                own = self.spans_per_worker > 1
                cut = self._cut(boundary, stages, pipelines, size, bounded=False) if own else near
                return self.step_seconds(boundary, replace(cut, micro_batch_size=size), pipelines)

            sizes.sort(key=seconds)
        failure: MemoryBoundError | None = None
        for size in sizes:
            try:
                return self._cut(boundary, stages, pipelines, size, bounded=True)
            except MemoryBoundError as error:
                failure = error
        assert failure is not None
        raise failure

    def step_seconds(self, boundary: int, cut: Cut, pipelines: int) -> float:
        """Seconds of a step: M + (K - 1) / V turns of the slowest stage, plus the part of the reduction that is not
        hidden. With V spans a stage, a pipeline fills and drains in turns of one span.

        Under 1F1B a turn is a forward and a backward of one stage; under GPipe it is the slowest forward plus the
        slowest backward. Sending overlaps with a turn; the reduction of a stage overlaps with its last backward. The
        first stage does not compute samples that its cache holds after the first epoch; reading them is not counted.
        """
        stages, spans = cut.stages, len(cut.spans)
        count = self._count(cut.micro_batch_size, pipelines)
        forwards, backwards = self._stage_seconds(boundary, cut, pipelines)
        if self._in_turns(count, stages):
            turn = max(f + b for f, b in zip(forwards, backwards, strict=True))
        else:
            turn = max(forwards) + max(backwards)
        link = self.costs.seconds_per_byte
        if stages > 1:
            turn = max(turn, 2 * link * self.sample_bytes * cut.micro_batch_size * spans / stages)
        first_active = boundary + 1 if boundary else 0
        share = 2 * (pipelines - 1) / pipelines
        reductions = [
            link * share * sum(self.unit_bytes[unit] for unit in units if unit >= first_active)
            for units in cut.units_by_stage
        ]
        shown = max(0.0, *(r - b for r, b in zip(reductions, backwards, strict=True)))
        return turn * (count + (stages - 1) * stages / spans) + shown

    def idle_share(self, boundary: int, cut: Cut, pipelines: int) -> float:
        """Share of a step in which stages compute nothing: bubble, imbalance, and reduction that is not hidden."""
        busy = sum(map(sum, self._stage_seconds(boundary, cut, pipelines))) / cut.stages
        step = self.step_seconds(boundary, cut, pipelines)
        return max(0.0, 1 - busy * self._count(cut.micro_batch_size, pipelines) / step) if step else 0.0

    def bytes_per_worker(self, boundary: int, cut: Cut, pipelines: int) -> int:
        """Bytes of the worker that holds the most."""
        stages, units_by_stage = cut.stages, cut.units_by_stage
        needs = self._needs(boundary, stages, pipelines, cut.micro_batch_size, one_each=len(cut.spans) == stages)
        return round(max(sum(row[unit] for unit in units) for row, units in zip(needs, units_by_stage, strict=True)))

    def _stage_seconds(self, boundary: int, cut: Cut, pipelines: int) -> tuple[list[float], list[float]]:
        """Seconds of each stage's forward and backward for one micro-batch; the first span reads from its cache."""
        costs = self._at(cut.micro_batch_size)
        forward, backward = training_seconds(costs, boundary)
        cached, _ = training_seconds(costs, boundary, self._miss_share(pipelines))
        forwards, backwards = [0.0] * cut.stages, [0.0] * cut.stages
        for number, (span, owner) in enumerate(zip(cut.spans, cut.owners, strict=True)):
            forwards[owner] += sum((forward if number else cached)[unit] for unit in span)
            backwards[owner] += sum(backward[unit] for unit in span)
        return forwards, backwards

    def _cut(self, boundary: int, stages: int, pipelines: int, size: int, *, bounded: bool) -> Cut:
        """The cut for one micro-batch size, and the schedule that can run it.

        Several spans a worker are cut by cost alone. If then a worker's spans together exceed its memory, each worker
        gets one span.

        Raises:
            MemoryBoundError: no cut fits.
            ValueError: there are fewer layers than stages.
        """
        count, num_layers = self._count(size, pipelines), len(self.unit_bytes) - 2
        fitted = fit(self.schedule, stages, self.spans_per_worker, count, num_layers)
        if len(fitted.owners) > stages:
            spans, limit = self._spans(boundary, len(fitted.owners), size, None), self.costs.worker_bytes
            cut = Cut(spans, size, fitted.owners, fitted.schedule)
            if not bounded or limit is None or self.bytes_per_worker(boundary, cut, pipelines) <= limit:
                return cut
            fitted = one_each(stages, f"{self.schedule} needs more memory than a worker has")
        spans = self._best_spans(boundary, stages, pipelines, size, bounded=bounded)
        return Cut(spans, size, fitted.owners, fitted.schedule, fitted.reason)

    def _best_spans(self, boundary: int, stages: int, pipelines: int, size: int, *, bounded: bool) -> list[range]:
        """The better cut: frozen layers spread to balance the stages, or all in the first stage, which caches them."""
        limit = self.costs.worker_bytes
        memory = None
        if bounded and limit is not None:
            memory = MemoryBound(self._needs(boundary, stages, pipelines, size), limit)
        spread = self._spans(boundary, stages, size, memory)
        miss_share = self._miss_share(pipelines)
        if miss_share == 1 or not 0 < boundary <= len(self.unit_bytes) - 2 - stages:
            return spread
        with contextlib.suppress(MemoryBoundError):
            together = self._spans(boundary, stages, size, memory, miss_share, prefix=boundary + 1)
            return min(together, spread, key=lambda cut: self.step_seconds(boundary, Cut(cut, size), pipelines))
        return spread

    def _spans(
        self,
        boundary: int,
        stages: int,
        size: int,
        memory: MemoryBound | None,
        miss_share: float = 1.0,
        prefix: int = 1,
    ) -> list[range]:
        forward, backward = training_seconds(self._at(size), boundary, miss_share)
        return cut_units([f + b for f, b in zip(forward, backward, strict=True)], stages, memory, prefix)

    def _miss_share(self, pipelines: int) -> float:
        """Share of a pipeline's samples that its first worker's cache cannot hold."""
        needed = self.num_samples / pipelines * self.sample_bytes
        return max(0.0, 1 - self.cache_bytes / needed) if needed else 1.0

    def _needs(
        self, boundary: int, stages: int, pipelines: int, size: int, *, one_each: bool = True
    ) -> list[list[float]]:
        """Bytes of each unit in each stage: its state, and what the micro-batches in flight keep for the backward.

        With several spans a worker (not `one_each`) at most 2 K are in flight: an interleaved schedule begins with
        (V - 1) K + 2 (K - k) - 1 forwards of V spans (Narayanan et al., 2021, section 2.2).
        """
        count = self._count(size, pipelines)
        first_active = boundary + 1 if boundary else 0
        in_turns = self._in_turns(count, stages)
        costs = self._at(size)

        def need(unit: int, cost: UnitCost, in_flight: int) -> float:
            if unit < first_active:
                return self.unit_bytes[unit]
            return self.trained_bytes[unit] + in_flight * cost.saved_bytes

        in_flight = [count] * stages
        if in_turns:
            in_flight = [min(count, stages - stage if one_each else 2 * stages) for stage in range(stages)]
        return [[need(unit, cost, most) for unit, cost in enumerate(costs)] for most in in_flight]

    def _at(self, size: int) -> list[UnitCost]:
        if size not in self._costs_at:
            self._costs_at[size] = self.costs.at(size)
        return self._costs_at[size]

    def _samples(self, pipelines: int) -> int:
        """Samples of the pipeline with the most shards."""
        shards = -(-self.num_shards // pipelines)
        return -(-self.global_batch * shards // self.num_shards)

    def _count(self, micro_batch_size: int, pipelines: int) -> int:
        """Micro-batches in a pipeline's share of the batch (M)."""
        return -(-self._samples(pipelines) // micro_batch_size)

    def _in_turns(self, count: int, stages: int) -> bool:
        return self.one_forward_one_backward and count >= stages
