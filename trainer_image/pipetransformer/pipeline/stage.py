"""What one worker holds of a pipeline: the facts of its stage, and the spans of units that it runs."""

from collections.abc import Mapping, Sequence
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
from .hooks import RoundHooks


@dataclass(frozen=True, slots=True)
class StageSpec:
    """The facts of a stage that do not change while its runner lives.

    Attributes:
        worker: index of this worker in its pipeline.
        spans: all spans of the model, in order.
        owners: worker of each span.
        boundary: number of frozen layers.
        schedule: orders the rounds of training.
        group: the workers of the pipeline in order.
        dtype: type of parameters and activations.
        autocast: type to compute products in; None for `dtype`.
        recompute: whether units that train repeat their forward for their backward.
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
    def own(self) -> dict[int, range]:
        """This worker's spans, by their index."""
        return {index: self.spans[index] for index, owner in enumerate(self.owners) if owner == self.worker}

    @property
    def units(self) -> list[int]:
        """Indices of the units that this worker holds, ascending."""
        return [unit for span in self.own.values() for unit in span]

    @property
    def is_first(self) -> bool:
        """Whether this worker owns the first span."""
        return self.owners[0] == self.worker

    @property
    def is_last(self) -> bool:
        """Whether this worker owns the last span."""
        return self.owners[-1] == self.worker

    def num_frozen(self, span: range) -> int:
        """Number of frozen units in a span, which it starts with."""
        return min(max(first_trainable(self.boundary) - span.start, 0), len(span))

    def shape(self, chunks: int, *, training: bool, slices: int = 1) -> RoundShape:
        """The shape of a round. Without `training` no span has a backward."""
        frozen = sum(self.num_frozen(span) == len(span) for span in self.spans)
        return RoundShape(self.owners, chunks, frozen if training else len(self.owners), slices)


class Passage:
    """Tells `hooks` each unit of a span that a chunk's backward has passed: the last unit first, each once."""

    def __init__(self, units: Sequence[int], hooks: RoundHooks) -> None:
        """
        Args:
            units: units of the span that train, ascending.
            hooks: told of them.
        """
        self._left = list(units)
        self._hooks = hooks
        #: Whether the gradients of weights are computed with those of inputs.
        self.begun = False

    def reach(self, unit: int, _: Tensor | None = None) -> None:
        """The backward has passed this unit, and all after it.

        Raises:
            BrokenGroupError: a connection broke as a hook began to sum gradients.
        """
        if not self.begun:
            return
        try:
            while self._left and self._left[-1] >= unit:
                self._hooks.passed(self._left.pop())
        except RuntimeError as error:
            raise BrokenGroupError(str(error)) from error

    def end(self) -> None:
        """The backward has passed all units."""
        self.begun = True
        self.reach(-1)


class Span:
    """Consecutive units on the worker that holds them. Frozen units keep no graph."""

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
            units: by their names in the model.
            num_frozen: number of frozen units.
            first: whether the span starts with the embedding. The chunk's prefix runs its frozen units.
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
        #: Shapes that units were checked with, and whether they trained.
        self._checked: set[tuple[tuple[int, ...], bool]] = set()

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that train."""
        units = self._units[self._num_frozen :]
        return [parameter for unit in units for parameter in unit.parameters() if parameter.requires_grad]

    def forward(self, x: Tensor | None, chunk: Chunk, passage: Passage | None = None) -> Tensor:
        """The output of the last unit.

        Args:
            x: output of the span before; None for the first span.
            chunk: the chunk to compute.
            passage: told by the chunk's backward; None if no hooks are told.

        Raises:
            ModelError: a unit failed, or gives what the next one cannot take.
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
                    if passage is not None and x.grad_fn is not None:
                        # Autograd goes backwards, so all gradients of the unit are complete by then.
                        x.register_hook(partial(passage.reach, self._start + number))  # type: ignore[no-untyped-call]
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
        """Check that a layer keeps the shape and type of its input, because a model may be cut between any two layers,
        and that the embedding's output has the model's activation shape and the parameters' type.

        Raises:
            TypeError, ValueError: the output is not a tensor, or has another shape or type.
        """
        if not isinstance(output, Tensor):
            raise TypeError(f"it returns a {type(output).__name__}, not one tensor")
        if number in self._layers and (output.shape, output.dtype) != (x.shape, x.dtype):
            ours, theirs = (f"{tuple(tensor.shape)} in {tensor.dtype}" for tensor in (output, x))
            raise ValueError(f"it returns {ours} for {theirs}: all layers must keep the shape and type of their input")
        if self._first and number == 0 and (output.shape, output.dtype) != (shape, self._dtype):
            ours = f"{tuple(output.shape[1:])} in {output.dtype}"
            raise ValueError(
                f"it returns {ours} for a sample, but the model's activation is {shape[1:]} in {self._dtype}"
            )
