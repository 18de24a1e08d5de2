"""Trains and evaluates one worker's spans of a pipeline. After a freeze or a regroup the worker makes a new runner."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn

from pipetransformer.cache import ActivationCache, FrozenPrefix
from pipetransformer.data import MicroBatch, Readers, Split, Wanted
from pipetransformer.models import PipelineModel, Unchanged
from pipetransformer.models.metrics import Metric
from pipetransformer.partition.slices import round_slices
from pipetransformer.schedules import (
    Ahead,
    Operation,
    RoundShape,
    Schedule,
    ScheduleError,
    fallback,
    planned,
    staleness,
)

from .ahead import FrozenAhead
from .batch import Batch, sample_ids_of
from .chunk import Chunk, StepChunks
from .executor import Executor
from .stage import RoundHooks, Span, StageSpec
from .stopwatch import make_stopwatch
from .target import Loss, Scores, Target

logger = logging.getLogger(__name__)

#: An evaluation runs this many micro-batches for each worker at a time: enough to keep all workers busy.
_EVALUATED_TOGETHER = 2


@dataclass(slots=True)
class RoundSums:
    """The loss and its weight, summed over the samples of a step, without padding. Both are zero on all workers except
    the last span's."""

    loss: float = 0.0
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Staleness:
    """The staleness of forwards: how many steps their weights are behind when their gradients are used.

    Attributes:
        own: staleness of this worker's forwards, by chunk.
        by_step: for each step of the round, the staleness of all its forwards on all workers of the pipeline.
    """

    own: Mapping[int, int]
    by_step: Sequence[Sequence[int]]


class StageRunner:
    """Trains and evaluates micro-batches. All workers of the pipeline must call the same methods with the same
    micro-batches.

    Keep it out of reference cycles: its memory and its group's sockets must be freed with the last reference to it.

    Attributes:
        spec: the stage of this worker.
        model: gives the shapes of activations and the loss.
        units: the modules of `spec.units`, by unit.
    """

    def __init__(
        self,
        spec: StageSpec,
        model: PipelineModel,
        units: Sequence[nn.Module],
        cache: ActivationCache | None = None,
        micro_batches_of: Callable[[int], Sequence[MicroBatch]] = lambda step: (),
        readers: Readers | None = None,
    ) -> None:
        """
        Args:
            spec: the stage of this worker.
            model: gives the shapes of activations and the loss.
            units: the modules of `spec.units`, on the device.
            cache: this worker's cache; only the first span's worker uses it.
            micro_batches_of: returns the micro-batches that this pipeline trains at a step, so that samples can be read
                and frozen forwards run ahead; none after the last step.
            readers: processes that read this worker's samples ahead; None to read them in the round.
        """
        self.spec = spec
        self.model = model
        self._micro_batches_of = micro_batches_of
        self._readers = readers
        self.units: Mapping[int, nn.Module] = dict(zip(spec.units, units, strict=True))
        frozen = [self.units[unit] for unit in spec.spans[0][: spec.num_frozen(spec.spans[0])]] if spec.is_first else []
        if cache is not None:
            # If a frozen unit shares a parameter with a unit that trains, its output changes at every step.
            changes = any(parameter.requires_grad for unit in frozen for parameter in unit.parameters())
            cache.use(() if changes else frozen)
        self._prefix = self._uncached_prefix = None
        if spec.is_first:
            self._prefix = FrozenPrefix(frozen, device=spec.device, dtype=spec.dtype, cache=cache)
            self._uncached_prefix = FrozenPrefix(frozen, device=spec.device, dtype=spec.dtype)
        self._unchanged = Unchanged({model.unit_name(unit): module for unit, module in self.units.items()})
        spans = {index: self._span(index, span) for index, span in spec.own_spans.items()}
        self._executor = Executor(spans, spec.group, spec.device, spec.dtype)
        self._planned: dict[RoundShape, Sequence[Operation]] = {}
        self._staleness: dict[RoundShape, Staleness] = {}
        self._ahead: FrozenAhead | None = None
        self._stopwatch = make_stopwatch(spec.device)

    @property
    def ahead_share(self) -> float:
        """Share of the last round's micro-batches whose frozen forwards had run in the round before."""
        return 0.0 if self._ahead is None else self._ahead.share

    def take_computing_seconds(self) -> float:
        """Wait until the device has finished the last round of training. Returns the seconds that this worker's
        computations took in it."""
        return self._stopwatch.take()

    def run_ahead(self, schedule: Ahead, units: Sequence[nn.Module], *, cached: bool) -> None:
        """From now on run the frozen forwards of the next round in each round of training. All workers of the pipeline
        must call this with the same `schedule` and `cached`.

        Args:
            schedule: orders the computations of a round.
            units: the frozen units, from the model's first on. The first span's worker passes its own units, the other
                workers of `schedule.holders` pass copies, and all others pass none.
            cached: whether the first span's worker has a cache for the outputs of these units.
        """
        self._ahead = FrozenAhead(schedule, len(schedule.seconds.prefix), cached, self._micro_batches_of)
        self._executor = replace(self._executor, frozen=units)

    def num_chunks(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Number of chunks of a round of training over these micro-batches."""
        slices = self.spec.token_slices
        if not slices:
            return len(micro_batches)
        lengths = [each.length or self.max_tokens for each in micro_batches]
        return len(micro_batches) * len(round_slices(slices, lengths)[0])

    @property
    def max_tokens(self) -> int:
        """Number of tokens in the longest samples."""
        return self.model.activation_shape(1)[1]

    def train(
        self, step: int, micro_batches: Sequence[MicroBatch], split: Split, hooks: RoundHooks | None = None
    ) -> RoundSums:
        """Run the forward and backward of each micro-batch. Gradients of the summed loss add up in the parameters.

        Args:
            step: the step that trains the micro-batches.
            micro_batches: all micro-batches of the pipeline.
            split: the split that their samples belong to.
            hooks: called around the round's computations; None to call nothing.
        """
        self._stopwatch.reset()
        batch = self._batch(step, micro_batches, split)
        if self._ahead is None:
            chunks = self._run(batch, Loss(self.model), hooks, training=True)
        else:
            later = self._micro_batches_of(step + 1)
            upcoming = self._batch(step + 1, later, split) if later else None
            chunks = self._run_ahead(self._ahead, batch, upcoming, hooks)
        return _sums(chunks)

    def train_steps(
        self, first: int, dealt: Sequence[Sequence[MicroBatch]], split: Split, hooks: RoundHooks
    ) -> list[RoundSums]:
        """Train several steps in one round, by an asynchronous schedule. Returns the sums of each step.

        Args:
            first: the first step.
            dealt: the pipeline's micro-batches of each step.
            split: the split that their samples belong to.
            hooks: called around the computations. `hooks.step` steps the optimizer.
        """
        self._stopwatch.reset()
        shape = self._shape_of(dealt)

        def make(step: int) -> list[Chunk]:
            return self._batch(first + step, dealt[step], split).chunks(self.model, self._prefix)

        with self._unchanged.over():
            chunks = StepChunks(shape, make)
            self._executor.run(self._operations(shape), shape, chunks, Loss(self.model), hooks, self._stopwatch)
        return [_sums([chunks[number] for number in shape.chunks_of(step)]) for step in range(len(dealt))]

    def staleness(self, dealt: Sequence[Sequence[MicroBatch]]) -> Staleness:
        """The staleness of the forwards in a round of these steps.

        Args:
            dealt: the pipeline's micro-batches of each step.
        """
        shape = self._shape_of(dealt)
        if shape not in self._staleness:
            found = staleness(self._plan(shape), shape)
            own = {chunk: age for (span, chunk), age in found.items() if span in self.spec.own_spans}
            by_step: list[list[int]] = [[] for _ in dealt]
            for (_, chunk), age in found.items():
                by_step[shape.step_of(chunk)].append(age)
            self._staleness[shape] = Staleness(own, by_step)
        return self._staleness[shape]

    def _shape_of(self, dealt: Sequence[Sequence[MicroBatch]]) -> RoundShape:
        steps = tuple(map(len, dealt))
        return replace(self.spec.shape(sum(steps), training=True), steps=steps)

    def evaluate(
        self,
        micro_batches: Sequence[MicroBatch],
        split: Split,
        metrics: Sequence[Metric] = (),
        *,
        name: str,
        may_continue: Callable[[], bool] = lambda: True,
    ) -> Tensor:
        """Evaluate without gradients, in parts of a few micro-batches to limit the memory. Units run in evaluation
        mode; their modes are restored afterwards.

        Args:
            micro_batches: all micro-batches of the pipeline.
            split: the split that their samples belong to.
            metrics: metrics to sum.
            name: the split's name, `train` or `test`, which is part of cache keys.
            may_continue: called after each part (see `lengths_of_parts`). If it returns false, the remaining parts are
                left out. It must return the same on all workers of the pipeline.

        Returns:
            (metrics, 2) sums of numerators and denominators in float64; zero on all workers except the last span's.
        """
        parts = self._parts(micro_batches)
        scores = Scores(metrics)
        with self.evaluating():
            for part, following in zip(parts, [*parts[1:], []], strict=True):
                wanted = partial(_wanted, None, following)
                self._run(Batch(self.spec, split, name, None, part, following=wanted, readers=self._readers), scores)
                if not may_continue():
                    break
        return scores.sums

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context in which the units are in evaluation mode."""
        modes = [unit.training for unit in self.units.values()]
        for unit in self.units.values():
            unit.eval()
        try:
            yield
        finally:
            for unit, mode in zip(self.units.values(), modes, strict=True):
                unit.train(mode)

    def lengths_of_parts(self, micro_batches: Sequence[MicroBatch]) -> list[int | None]:
        """Length of the samples in each part of an evaluation, in tokens; None if samples have no lengths."""
        return [part[0].length for part in self._parts(micro_batches)]

    def first_non_finite(self, step: int, micro_batches: Sequence[MicroBatch], split: Split) -> int | None:
        """Index of this worker's first unit with an output that is not finite; None if all outputs are finite.

        Runs only forwards, and changes nothing.

        Args:
            step: the step that trains the micro-batches.
            micro_batches: all micro-batches of the pipeline.
            split: the split that their samples belong to.
        """
        finite = {unit: torch.tensor(True, device=self.spec.device) for unit in self.units}

        def note(unit: int, _: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
            finite[unit] &= output.isfinite().all()

        handles = [module.register_forward_hook(partial(note, unit)) for unit, module in self.units.items()]
        try:
            for part in self._parts(micro_batches):
                self.forward(Batch(self.spec, split, "train", step, part, readers=self._readers, cached=False))
        finally:
            for handle in handles:
                handle.remove()
        flags = torch.stack(list(finite.values())).tolist()
        return next((unit for unit, good in zip(finite, flags, strict=True) if not good), None)

    def forward(self, batch: Batch) -> None:
        """Run the micro-batches of a batch forward through the pipeline, without gradients, and drop the outputs. All
        workers of the pipeline must call this.

        Raises:
            SpecError: a forward changed a parameter or a buffer.
        """
        self._run(batch, Scores())

    def _span(self, index: int, span: range) -> Span:
        units = {self.model.unit_name(unit): self.units[unit] for unit in span}
        last = index == len(self.spec.spans) - 1
        return Span(span, units, self.spec.num_frozen(span), first=index == 0, last=last, dtype=self.spec.dtype)

    def _parts(self, micro_batches: Sequence[MicroBatch]) -> list[Sequence[MicroBatch]]:
        """The micro-batches in parts that fit the memory. All micro-batches of a part have samples of one length."""
        most = _EVALUATED_TOGETHER * (max(self.spec.owners) + 1)
        by_length = [list(some) for _, some in groupby(micro_batches, lambda micro_batch: micro_batch.length)]
        return [some[start : start + most] for some in by_length for start in range(0, len(some), most)]

    def _run(
        self, batch: Batch, target: Target, hooks: RoundHooks | None = None, *, training: bool = False
    ) -> list[Chunk]:
        """Run a round. Returns its chunks.

        Raises:
            SpecError: a forward changed a parameter or a buffer.
        """
        with self._unchanged.over():
            prefix = self._prefix if batch.cached else self._uncached_prefix
            chunks = batch.chunks(self.model, prefix, self.spec.token_slices if training else ())
            slices = len(chunks) // len(batch.micro_batches)
            shape = self.spec.shape(len(chunks), training=training, slices=slices)
            self._executor.run(
                self._operations(shape), shape, chunks, target, hooks, self._stopwatch if training else None
            )
        return chunks

    def _run_ahead(
        self, ahead: FrozenAhead, batch: Batch, upcoming: Batch | None, hooks: RoundHooks | None
    ) -> list[Chunk]:
        """Run a round of training like `_run`, and run frozen forwards of the next round in idle time."""
        with self._unchanged.over():
            round_ = ahead.begin(batch, upcoming, self.model, self._prefix)
            operations = self._operations(round_.shape)
            ahead.read(round_, operations)
            self._executor.run(operations, round_.shape, round_.chunks, Loss(self.model), hooks, self._stopwatch)
            ahead.end(round_)
        return round_.chunks[: len(batch.micro_batches)]

    def _batch(self, step: int, micro_batches: Sequence[MicroBatch], split: Split) -> Batch:
        following = partial(_next_step, step, self._micro_batches_of)
        return Batch(self.spec, split, "train", step, micro_batches, following=following, readers=self._readers)

    def _operations(self, shape: RoundShape) -> Sequence[Operation]:
        """This worker's operations in a round of this shape. All workers of the pipeline compute the same plan.

        If the spec's schedule cannot run the round, 1F1B does, or GPipe if workers have several spans. A lone worker
        runs each micro-batch forward and then backward, which needs the least memory.
        """
        if shape not in self._planned:
            self._planned[shape] = self._plan(shape)[self.spec.worker]
        return self._planned[shape]

    def _plan(self, shape: RoundShape) -> Sequence[Sequence[Operation]]:
        instead = fallback(shape.owners)
        alone = shape.workers == 1 and shape.slices == 1
        if alone or not shape.trains(len(shape.owners) - 1):
            return planned(instead, shape)
        try:
            return planned(self._schedule(self.spec.schedule, shape), shape)
        except ScheduleError as error:
            logger.warning(
                "%s cannot run %d micro-batches: %s; running %s", self.spec.schedule, shape.chunks, error, instead
            )
            return planned(self._schedule(instead, shape), shape)

    def _schedule(self, inner: Schedule, shape: RoundShape) -> Schedule:
        return replace(self._ahead.schedule, inner=inner) if self._ahead is not None and shape.prefix_units else inner


def _sums(chunks: Sequence[Chunk]) -> RoundSums:
    """The loss and its weight, summed over these chunks."""
    losses = [chunk.loss for chunk in chunks if chunk.loss is not None]
    weights = [chunk.weight for chunk in chunks if chunk.weight is not None]
    if not losses:
        return RoundSums()
    sums = torch.stack([*losses, *weights]).tolist()  # one wait for the device, not one a micro-batch
    return RoundSums(_sum(sums[: len(losses)]), math.fsum(sums[len(losses) :]))


def _sum(values: Sequence[float]) -> float:
    """The exact sum; NaN if some are infinite in both directions, for which `math.fsum` raises an error."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _next_step(step: int, micro_batches_of: Callable[[int], Sequence[MicroBatch]]) -> list[Wanted]:
    return _wanted(step + 1, micro_batches_of(step + 1))


def _wanted(step: int | None, micro_batches: Sequence[MicroBatch]) -> list[Wanted]:
    return [(step, sample) for sample in sample_ids_of(micro_batches)]
