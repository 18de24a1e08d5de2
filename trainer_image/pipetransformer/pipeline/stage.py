"""The stage that one worker of a pipeline holds: its facts, the spans that the worker runs, and hooks around them."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.errors import BrokenGroupError, RunningModel
from pipetransformer.freeze.boundary import first_trainable
from pipetransformer.models import run_unit
from pipetransformer.schedules import RoundShape, Schedule

from .chunk import Chunk

_PLAIN = nullcontext()


@dataclass(frozen=True, slots=True)
class StageSpec:
    """The facts of a stage that do not change while its runner lives.

    Attributes:
        worker: index of this worker in its pipeline.
        spans: the units of each span of the model, in order.
        owners: worker of each span.
        boundary: number of frozen layers.
        schedule: orders the computations of a round of training.
        group: process group of the pipeline's workers, in order.
        device: the device of this worker.
        dtype: type of parameters and activations.
        autocast: type to compute matrix products in; None for `dtype`.
        recompute: whether units that train run their forward again for their backward (activation checkpointing).
        token_slices: lengths of the slices that the longest samples are cut into in training, in tokens; empty if
            samples stay whole.
    """

    worker: int
    spans: Sequence[range]
    owners: tuple[int, ...]
    boundary: int
    schedule: Schedule
    group: dist.ProcessGroup
    device: torch.device
    dtype: torch.dtype
    autocast: torch.dtype | None = None
    recompute: bool = False
    token_slices: tuple[int, ...] = ()

    @property
    def own_spans(self) -> dict[int, range]:
        """This worker's spans, by their index."""
        return {index: self.spans[index] for index, owner in enumerate(self.owners) if owner == self.worker}

    @property
    def units(self) -> list[int]:
        """Indices of the units that this worker holds, ascending."""
        return [unit for span in self.own_spans.values() for unit in span]

    @property
    def is_first(self) -> bool:
        """Whether this worker owns the first span."""
        return self.owners[0] == self.worker

    @property
    def is_last(self) -> bool:
        """Whether this worker owns the last span."""
        return self.owners[-1] == self.worker

    def num_frozen(self, span: range) -> int:
        """Number of leading units of a span that are frozen."""
        return min(max(first_trainable(self.boundary) - span.start, 0), len(span))

    def shape(self, chunks: int, *, training: bool, slices: int = 1) -> RoundShape:
        """The shape of a round of `chunks` chunks. Without `training` no span has a backward.

        Args:
            chunks: number of chunks.
            training: whether the round trains.
            slices: chunks of each micro-batch.
        """
        frozen = sum(self.num_frozen(span) == len(span) for span in self.spans)
        return RoundShape(self.owners, chunks, frozen if training else len(self.owners), slices)


class RoundHooks:
    """Called around the computations of a round, for code that sums gradients or changes weights within the round.

    The methods do nothing; a subclass overrides those that it needs.
    """

    def forward_weights(self, span: int, chunk: int) -> AbstractContextManager[None]:
        """A context for the forward of a chunk on a span. It may put other weights in place for the forward."""
        return _PLAIN

    def backward_weights(self, span: int, chunk: int) -> AbstractContextManager[None]:
        """A context for the backward of a chunk on a span. It may put other weights in place for the backward.
        Gradients still add up in the `grad` of the parameters."""
        return _PLAIN

    def step(self, span: int, step: int, weight: Tensor) -> None:
        """Step the optimizer on the span's weights: the schedule has a `STEP` action here.

        Args:
            span: index of the span.
            step: number of the step in the round.
            weight: summed weight of the losses of the step's chunks in this pipeline, float64.
        """

    def awaits(self, unit: int) -> bool:
        """Whether `passed` has to be called as soon as a backward has passed this unit. Otherwise it may be called with
        a lower unit."""
        return True

    def passed(self, unit: int) -> None:
        """Called when a chunk's backward has passed this unit. The chunk's gradients of the unit's weights are then
        complete."""


class Passage:
    """Tells `hooks.passed` when a chunk's backward has passed a unit: once for each unit of a span that trains, the
    last unit first."""

    def __init__(self, units: Sequence[int], hooks: RoundHooks) -> None:
        """
        Args:
            units: indices of the span's units that train, ascending.
            hooks: `hooks.passed` is called with each of them.
        """
        self._left = list(units)
        self._hooks = hooks
        #: Whether the backward that computes the gradients of weights has begun. Before that, `reach` does nothing.
        self.begun = False

    def watch(self, x: Tensor, unit: int) -> None:
        """Let the backward call `reach` once it has computed the gradient of `x`, the input of this unit. This gradient
        comes last, so those of the unit's weights are complete then."""
        if x.grad_fn is not None and self._hooks.awaits(unit):
            x.register_hook(partial(self.reach, unit))  # type: ignore[no-untyped-call]

    def reach(self, unit: int, _: Tensor | None = None) -> None:
        """Call the hooks for this unit and all units after it: the backward has passed them.

        Raises:
            BrokenGroupError: a connection broke when a hook started to sum gradients over the pipelines.
        """
        if not self.begun:
            return
        try:
            while self._left and self._left[-1] >= unit:
                self._hooks.passed(self._left.pop())
        except RuntimeError as error:
            raise BrokenGroupError(str(error)) from error

    def end(self) -> None:
        """Call the hooks for all units that are left: the backward is complete."""
        self.begun = True
        self.reach(-1)


class Span:
    """The consecutive units of one span. Runs their forward; frozen units keep no autograd graph."""

    def __init__(
        self,
        span: range,
        units: Mapping[str, nn.Module],
        num_frozen: int,
        *,
        first: bool,
        last: bool,
        dtype: torch.dtype,
    ) -> None:
        """
        Args:
            span: indices of the units.
            units: the units in order, by their names in the model.
            num_frozen: number of leading units that are frozen.
            first: whether the span starts with the embedding. Then `Chunk.first_input` runs its frozen units.
            last: whether the span ends with the head.
            dtype: type of activations.
        """
        self.trained = [*span][num_frozen:]
        self._names, self._units = list(units), list(units.values())
        self._start = span.start
        self._first_computed = num_frozen if first else 0
        self._num_frozen = num_frozen
        self._layers = range(int(first), len(span) - int(last))
        self._first, self._dtype = first, dtype
        #: (shape, whether gradients were computed) of the forwards in which the units' outputs were checked.
        self._checked: set[tuple[tuple[int, ...], bool]] = set()

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that train."""
        units = self._units[self._num_frozen :]
        return [parameter for unit in units for parameter in unit.parameters() if parameter.requires_grad]

    def forward(self, x: Tensor | None, chunk: Chunk, passage: Passage | None = None) -> Tensor:
        """Run the units on a chunk. Returns the output of the last unit.

        Args:
            x: output of the span before; None for the first span.
            chunk: the chunk to compute.
            passage: its `reach` is called as the chunk's backward passes units; None to call nothing.

        Raises:
            ModelError: a unit failed, or its output has the wrong type or shape.
            DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
        """
        number = 0
        seen = (chunk.shape, torch.is_grad_enabled())
        check = seen not in self._checked
        try:
            if x is None:
                x = chunk.first_input()
            for number in range(self._first_computed, len(self._units)):
                if number < self._num_frozen:
                    with torch.no_grad():
                        output = run_unit(self._units[number], x, chunk.context)
                else:
                    if passage is not None:
                        passage.watch(x, self._start + number)
                    output = run_unit(self._units[number], x, chunk.context)
                if check:
                    self._check(number, x, output, chunk.shape)
                x = output
        except Exception:  # only here the failing unit is known
            with RunningModel(f"forward of {self._names[number]}"):
                raise
        self._checked.add(seen)
        return x

    def _check(self, number: int, x: Tensor, output: object, shape: tuple[int, ...]) -> None:
        """Check that a layer keeps the shape and type of its input, because a model may be cut between any two layers.
        Check that the embedding's output has the model's activation shape and the parameters' type.

        Raises:
            TypeError, ValueError: the output is not a tensor, or has another shape or type.
        """
        if not isinstance(output, Tensor):
            raise TypeError(f"it returns a {type(output).__name__}, not one tensor: wrap it in a module that does")
        if number in self._layers and (output.shape, output.dtype) != (x.shape, x.dtype):
            ours, theirs = (f"{tuple(tensor.shape)} in {tensor.dtype}" for tensor in (output, x))
            raise ValueError(f"it returns {ours} for {theirs}: all layers must keep the shape and type of their input")
        if self._first and number == 0 and (output.shape, output.dtype) != (shape, self._dtype):
            ours = f"{tuple(output.shape[1:])} in {output.dtype}"
            raise ValueError(
                f"it returns {ours} for a sample, but the model's activation is {shape[1:]} in {self._dtype}"
            )
