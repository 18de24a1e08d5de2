"""Runs one worker's stage of a pipeline: the only place that knows `torch.distributed.pipelining`.

Stages are static: shapes and what needs a gradient are given, never inferred, so every micro-batch has one shape and a
frozen prefix sends and receives no gradients. Whatever changes those facts (a freeze, a regroup) makes a new runner.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from ..cache import ActivationCache, FrozenPrefix, Source
from ..data import MicroBatch, Split, augmentation_key, lengths_of, read_batch, weights_of
from ..errors import BrokenGroupError, ModelError, RunningModel, SpecError
from ..freezing import first_trainable
from ..metrics import Metric
from ..models import MicroBatchContext, PipelineModel, run_unit, set_micro_batch
from ..partition import UnitCost
from .choice import ScheduleClass
from .probe import Probe

_LOSS, _BACKWARD = RunningModel("loss"), RunningModel("backward")

#: Micro-batches for each stage that are evaluated together: enough that no stage waits, whatever one of them takes.
_EVALUATED_TOGETHER = 2
#: Stages that are kept with their buffers: those of a round whose samples come in a few lengths, and of an evaluation.
_KEPT_STAGES = 8


@dataclass(frozen=True, slots=True)
class StageSpec:
    """What does not change while a runner lives.

    Attributes:
        stage: index of this stage among `stages`.
        span: the contiguous units that this stage holds.
        boundary: frozen blocks.
        schedule: runs where a pipeline has several stages and at least as many micro-batches; with fewer GPipe does.
        group: the workers of the pipeline in stage order.
        dtype: of parameters, and of what travels between units.
        autocast: type to compute products in; None for `dtype`.
        recompute: whether units that train compute their forward again for their backward.
    """

    stage: int
    stages: int
    span: range
    boundary: int
    schedule: ScheduleClass
    group: dist.ProcessGroup
    device: torch.device
    dtype: torch.dtype
    autocast: torch.dtype | None = None
    recompute: bool = False

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1


@dataclass(slots=True)
class RoundSums:
    """Sums over the real samples of a round; zero on all but the last stage."""

    loss: float = 0.0
    weight: float = 0.0


class StageModule(nn.Module):
    """The units of a stage in order. Frozen units keep no graph; each micro-batch brings its context.

    On the first stage the frozen units are the `prefix`, which knows the micro-batches' samples.
    """

    def __init__(
        self, units: Mapping[str, nn.Module], blocks: Sequence[bool], num_frozen: int, prefix: FrozenPrefix | None
    ) -> None:
        """
        Args:
            units: by their names in the model.
            blocks: which of them are blocks.
            num_frozen: how many of them are frozen.
            prefix: those, on a first stage.
        """
        super().__init__()
        self.names = list(units)
        self.units = nn.ModuleList(units.values())
        self.blocks = blocks
        self.checked = False
        self.num_frozen = num_frozen
        self.frozen = [] if prefix is not None else list(self.units)[:num_frozen]
        self.active = list(enumerate(self.units))[num_frozen:]
        self.prefix = prefix
        self.upcoming: list[MicroBatchContext] = []
        self.passed: Callable[[int], None] | None = None

    def forward(self, x: Tensor | None) -> Tensor:
        context, number = self.upcoming.pop(0), 0
        try:
            if self.prefix is not None:
                x = self.prefix.take()
            assert x is not None
            set_micro_batch(context)
            if self.frozen:
                with torch.no_grad():
                    for unit in self.frozen:
                        x = run_unit(unit, x)
            for number, unit in self.active:
                if self.passed is not None and x.grad_fn is not None:
                    # The engine runs what was computed later first, so all of the unit's gradients are there by then.
                    x.register_hook(partial(_tell, self.passed, number))  # type: ignore[no-untyped-call]
                output = run_unit(unit, x)
                if not self.checked:
                    _check(x if self.blocks[number] else None, output)
                x = output
        except SpecError:
            raise
        except Exception as error:
            raise ModelError(f"forward of {self.names[number]} failed: {type(error).__name__}: {error}") from error
        self.checked = True  # shapes are static
        return x


def _check(x: Tensor | None, output: object) -> None:
    """A model may be cut between any two blocks, so all give what they take; `x` is None where a unit is no block.

    Raises:
        TypeError, ValueError: this one does not.
    """
    if not isinstance(output, Tensor):
        raise TypeError(f"it gives a {type(output).__name__}, not one tensor")
    if x is not None and (output.shape, output.dtype) != (x.shape, x.dtype):
        ours, theirs = (f"{tuple(tensor.shape)} in {tensor.dtype}" for tensor in (output, x))
        raise ValueError(f"it makes {ours} of {theirs}: all blocks must give the shape and type that they take")


def _tell(passed: Callable[[int], None], number: int, _: Tensor) -> None:
    try:
        passed(number)
    except RuntimeError as error:
        raise BrokenGroupError(str(error)) from error


class _Stage(PipelineStage):
    """torch's, which says of no error whose it is."""

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with _BACKWARD:
            return super().backward_maybe_with_nosync(*args, **kwargs)


class _Scheduled(NamedTuple):
    stage: PipelineStage
    schedule: PipelineScheduleSingle


class StageRunner:
    """Trains and evaluates by micro-batches. All workers of the pipeline call the same methods with the same
    micro-batches."""

    def __init__(
        self,
        spec: StageSpec,
        model: PipelineModel,
        units: Sequence[nn.Module],
        cache: ActivationCache | None = None,
        samples_of: Callable[[int], Sequence[int]] = lambda step: (),
    ) -> None:
        """
        Args:
            spec: see there.
            model: for shapes and the loss.
            units: the modules of `spec.span`, on the device.
            cache: of this worker; used by a first stage.
            samples_of: what this pipeline will train at a step, to read ahead.
        """
        self.spec = spec
        self._model = model
        self._samples_of = samples_of
        num_frozen = min(max(first_trainable(spec.boundary) - spec.span.start, 0), len(units))
        frozen = units[:num_frozen] if spec.is_first else ()
        if cache is not None:
            # A parameter that is shared with a unit that trains makes the prefix another one at every step.
            changes = any(parameter.requires_grad for unit in frozen for parameter in unit.parameters())
            cache.use(() if changes else frozen)
        self._prefix = None
        if spec.is_first:
            self._prefix = FrozenPrefix(frozen, device=spec.device, dtype=spec.dtype, cache=cache)
        names = [model.unit_name(index) for index in spec.span]
        head = spec.span[-1] if spec.is_last else None  # before a worker is warm, of a model of one block
        blocks = [index not in (0, head) for index in spec.span]
        self._module = StageModule(dict(zip(names, units, strict=True)), blocks, num_frozen, self._prefix)
        self._schedules: OrderedDict[tuple[bool, int, int | None], _Scheduled] = OrderedDict()
        self._target = _Target()

    def tell(self, passed: Callable[[int], None]) -> None:
        """From now on tell of each unit, by its index in the model, that the backward of a micro-batch has passed it:
        at once for those whose input has a gradient that goes on to a unit of this stage, of others never."""
        start = self.spec.span.start
        self._module.passed = lambda number: passed(start + number)

    def train(self, step: int, micro_batches: Sequence[MicroBatch], split: Split) -> RoundSums:
        """Forward and backward of every micro-batch; gradients of the summed loss accumulate in the parameters."""
        self._target.take_weights()  # of a round that broke
        losses = self._run(step, micro_batches, split, "train", training=True)
        if not losses:
            return RoundSums()
        # One wait for the device, not one a micro-batch.
        sums = torch.stack([*losses, *self._target.take_weights()]).tolist()
        return RoundSums(math.fsum(sums[: len(losses)]), math.fsum(sums[len(losses) :]))

    def evaluate(
        self, micro_batches: Sequence[MicroBatch], split: Split, metrics: Sequence[Metric] = (), *, name: str
    ) -> Tensor:
        """Forward only, in `eval()`; leaves the units as they were. `name` is the split's, `train` or `test`: cached
        activations belong to it.

        Returns:
            (metrics, 2) sums of numerators and denominators in float64; zero on all but the last stage.
        """
        modes = [unit.training for unit in self._module.units]
        self._module.eval()
        self._target.score(metrics)
        with torch.no_grad():
            self._run(0, micro_batches, split, name, training=False)
        for unit, mode in zip(self._module.units, modes, strict=True):
            unit.train(mode)
        return self._target.take_scores()

    def measure(self, micro_batch_size: int, split: Split) -> list[UnitCost]:
        """What each unit of the stage costs for a micro-batch of that many samples; leaves no trace in units or
        gradients. What it does not run (the backward of frozen units) is 0."""
        spec = self.spec
        ids = [index % len(split) for index in range(micro_batch_size)]
        samples, labels = read_batch(split, ids, 0)
        labels, weights = labels.to(spec.device), torch.ones(micro_batch_size, dtype=spec.dtype, device=spec.device)

        def loss(output: Tensor) -> Tensor:
            return self._model.loss(output, labels, weights)[0]

        context = self._context(0, split, ids)
        x = samples.to(spec.device)
        if not spec.is_first:
            generator = torch.Generator(spec.device).manual_seed(0)
            shape = self._model.activation_shape(micro_batch_size)
            x = torch.randn(shape, generator=generator, dtype=spec.dtype, device=spec.device)
        units, finish = list(self._module.units), loss if spec.is_last else None
        return Probe(units, self._module.num_frozen, finish, context, spec.device).measure(x)

    def _run(
        self, step: int, micro_batches: Sequence[MicroBatch], split: Split, name: str, *, training: bool
    ) -> list[Tensor]:
        """What has one length at a time: stages are static. An evaluation is cut further, so that what it holds does
        not grow with the split."""
        most = len(micro_batches) if training else _EVALUATED_TOGETHER * self.spec.stages
        losses: list[Tensor] = []
        parts = _parts(micro_batches, most)
        for part, following in zip(parts, [*parts[1:], []], strict=True):
            losses += self._run_part(step, part, following, split, name, training=training)
        return losses

    def _run_part(
        self,
        step: int,
        micro_batches: Sequence[MicroBatch],
        following: Sequence[MicroBatch],
        split: Split,
        name: str,
        *,
        training: bool,
    ) -> list[Tensor]:
        spec, length = self.spec, micro_batches[0].length
        self._module.upcoming = [self._context(step, split, micro_batch.sample_ids) for micro_batch in micro_batches]
        ids = [sample_id for micro_batch in micro_batches for sample_id in micro_batch.sample_ids]
        samples: Tensor | None = None
        if spec.is_last:
            samples, labels = read_batch(split, ids, step if training else None)
            samples = _cut_to(samples, length)
            self._target.set(labels.to(spec.device), weights_of(micro_batches, spec.dtype).to(spec.device))
        if self._prefix is not None:
            next_ids = [sample_id for micro_batch in following for sample_id in micro_batch.sample_ids]
            source = self._source(split, name, step if training else None, ids, next_ids, samples, length)
            self._prefix.begin(source, [micro_batch.sample_ids for micro_batch in micro_batches])
        if spec.stages == 1:
            size = len(micro_batches[0].sample_ids)
            return [self._alone(slice(start, start + size), training) for start in range(0, len(ids), size)]
        rows = torch.arange(len(ids), device=spec.device)
        size = len(micro_batches[0].sample_ids)
        stage, schedule = self._schedule(len(micro_batches), size, length, training=training)
        losses: list[Tensor] = []
        run = schedule.step if training else schedule.eval
        inputs = (rows,) if spec.is_first else ()
        target = rows if spec.is_last else None
        run(*inputs, target=target, losses=losses if spec.is_last else None, return_outputs=False)
        stage.clear_runtime_states()  # what it keeps of the outputs, else until it runs again
        return losses

    def _alone(self, rows: slice, training: bool) -> Tensor:
        """One micro-batch where this worker holds the whole model: nothing to schedule."""
        output = self._module(None)
        if not training:
            return self._score(output, rows)
        loss = self._loss(output, rows)
        if loss.requires_grad:  # else all is frozen, and the head has no parameters
            with _BACKWARD:
                torch.autograd.backward(loss)
        return loss.detach()

    def _source(
        self,
        split: Split,
        name: str,
        step: int | None,
        ids: Sequence[int],
        next_ids: Sequence[int],
        samples: Tensor | None,
        length: int | None,
    ) -> Source:
        """The samples of a round, or of a part of an evaluation that goes on with `next_ids`, for the prefix; `samples`
        are the inputs of `ids` where they had to be read anyway."""

        def inputs(wanted: Sequence[int]) -> Tensor:
            if samples is None:
                return _cut_to(read_batch(split, wanted, step)[0], length)
            if wanted == ids:
                return samples
            row = {sample_id: number for number, sample_id in enumerate(ids)}
            return samples[[row[sample_id] for sample_id in wanted]]

        def upcoming() -> list[tuple[int, int | None]]:
            following = None if step is None else step + 1
            wanted = next_ids if following is None else self._samples_of(following)
            return [(sample_id, augmentation_key(split, sample_id, following)) for sample_id in wanted]

        return Source(
            split=name,
            inputs=inputs,
            augmentation=lambda sample_id: augmentation_key(split, sample_id, step),
            enter=lambda sample_ids: set_micro_batch(self._context(step or 0, split, sample_ids)),
            upcoming=upcoming,
        )

    def _context(self, step: int, split: Split, sample_ids: Sequence[int]) -> MicroBatchContext:
        spec = self.spec
        lengths = lengths_of(split, sample_ids, spec.device)
        return MicroBatchContext(step, tuple(sample_ids), lengths, spec.autocast, spec.recompute)

    def _schedule(
        self, num_micro_batches: int, micro_batch_size: int, length: int | None, *, training: bool
    ) -> _Scheduled:
        """One stage and schedule for each (mode, M, length): a stage's receive buffers belong to the mode that prepared
        them. Those that were used last are kept, the same ones on all workers of the pipeline, which meet to make one.
        """
        key = (training, num_micro_batches, length)
        if key not in self._schedules:
            if len(self._schedules) == _KEPT_STAGES:
                self._schedules.popitem(last=False)
            spec = self.spec
            stage = _Stage(
                self._module,
                spec.stage,
                spec.stages,
                spec.device,
                input_args=self._example_input(micro_batch_size, length),
                output_args=self._example_output(micro_batch_size, length),
                group=spec.group,
            )
            in_turns = training and num_micro_batches >= spec.stages
            schedule_class = spec.schedule if in_turns else ScheduleGPipe
            # The gradients are divided once, by the global weight, after they are reduced.
            loss = self._loss if training else self._score
            schedule = schedule_class(stage, num_micro_batches, loss_fn=loss, scale_grads=False)
            self._schedules[key] = _Scheduled(stage, schedule)
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _example_input(self, micro_batch_size: int, length: int | None) -> Tensor:
        """The first stage is given row numbers, as the loss is: its prefix knows the samples."""
        spec = self.spec
        if spec.is_first:
            return torch.arange(micro_batch_size, device=spec.device)
        shape = self._activation_shape(micro_batch_size, length)
        needs_gradient = spec.span.start > first_trainable(spec.boundary)
        return torch.zeros(shape, dtype=spec.dtype, device=spec.device, requires_grad=needs_gradient)

    def _example_output(self, micro_batch_size: int, length: int | None) -> Tensor:
        spec = self.spec
        shape = self._activation_shape(micro_batch_size, length)
        if spec.is_last:
            head = copy.deepcopy(self._model.head).to("meta").eval()
            with RunningModel("forward of the head, for its shape,"):
                shape = tuple(head(torch.empty(shape, dtype=spec.dtype, device="meta")).shape)
        needs_gradient = spec.span.stop > first_trainable(spec.boundary)
        return torch.zeros(shape, dtype=spec.dtype, device=spec.device, requires_grad=needs_gradient)

    def _activation_shape(self, micro_batch_size: int, length: int | None) -> tuple[int, ...]:
        samples, positions, *rest = self._model.activation_shape(micro_batch_size)
        return (samples, positions if length is None else length, *rest)

    def _loss(self, output: Tensor, rows: Tensor | slice) -> Tensor:
        labels, weights = self._target.rows(rows)
        with _LOSS:
            loss, weight = self._model.loss(output, labels, weights)
            self._target.weights.append(weight.detach())
        return loss

    def _score(self, output: Tensor, rows: Tensor | slice) -> Tensor:
        labels, weights = self._target.rows(rows)
        try:
            self._target.add(output, labels, weights)
        except Exception as error:
            raise ModelError(f"a metric failed: {type(error).__name__}: {error}") from error
        return output.new_zeros(())


def _parts(micro_batches: Sequence[MicroBatch], most: int) -> list[list[MicroBatch]]:
    """At most `most` of them at a time, all of one length."""
    of_length = [list(some) for _, some in groupby(micro_batches, lambda micro_batch: micro_batch.length)]
    return [some[start : start + most] for some in of_length for start in range(0, len(some), most)]


def _cut_to(inputs: Tensor, length: int | None) -> Tensor:
    """The first `length` positions of samples that are padded beyond."""
    return inputs if length is None else inputs[:, :length]


@dataclass(slots=True)
class _Target:
    """Labels and weights of the round. The schedule cuts one tensor into micro-batches, so it is given row numbers."""

    labels: Tensor = field(default_factory=lambda: torch.empty(0))
    sample_weights: Tensor = field(default_factory=lambda: torch.empty(0))
    weights: list[Tensor] = field(default_factory=list)
    metrics: Sequence[Metric] = ()
    scores: Tensor = field(default_factory=lambda: torch.empty(0))

    def set(self, labels: Tensor, sample_weights: Tensor) -> None:
        self.labels, self.sample_weights = labels, sample_weights

    def rows(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        return self.labels[rows], self.sample_weights[rows]

    def take_weights(self) -> list[Tensor]:
        """Sum of the weights of each micro-batch of the round."""
        weights, self.weights = self.weights, []
        return weights

    def score(self, metrics: Sequence[Metric]) -> None:
        """Count by these metrics from now on."""
        self.metrics, self.scores = metrics, torch.zeros(len(metrics), 2, dtype=torch.float64)

    def add(self, output: Tensor, labels: Tensor, weights: Tensor) -> None:
        for index, metric in enumerate(self.metrics):
            numerator, denominator = metric(output, labels, weights)
            self.scores[index] += torch.stack([numerator.double(), denominator.double()]).cpu()

    def take_scores(self) -> Tensor:
        scores, self.metrics, self.scores = self.scores, (), torch.empty(0)
        return scores
