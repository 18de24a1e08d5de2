"""A chunk: what passes through the spans of one worker, a micro-batch or a slice of its tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from pipetransformer.cache import PrefixOutputs
from pipetransformer.models import MicroBatchContext
from pipetransformer.schedules import RoundShape


@dataclass(slots=True)
class Chunk:
    """A micro-batch of a round, or a slice of its tokens, on one worker.

    Attributes:
        micro_batch: place of the micro-batch in the round.
        context: what units may know of the chunk, such as its step and samples.
        shape: shape of the chunk's activations between units.
        prefix: returns the output of the frozen units that the first span starts with, from the cache or computed;
            only on the first span's worker.
        frozen_output: the same output, if `PREFIX` actions have computed it; None otherwise.
        frozen_input: input of the next frozen unit that a `PREFIX` action of this worker computes.
        labels: (samples, ...) labels; only on the last span's worker.
        weights: (samples,) weights of the samples; only on the last span's worker.
        loss: summed loss, once the last span has trained it.
        weight: summed weight of that loss.
    """

    micro_batch: int
    context: MicroBatchContext
    shape: tuple[int, ...]
    prefix: PrefixOutputs | None = None
    frozen_output: Tensor | None = None
    frozen_input: Tensor | None = None
    labels: Tensor | None = None
    weights: Tensor | None = None
    loss: Tensor | None = None
    weight: Tensor | None = None

    def first_input(self) -> Tensor:
        """The input of the first span's first unit that trains: the output of the frozen units before it."""
        if self.frozen_output is not None:
            output, self.frozen_output = self.frozen_output, None
            return output
        assert self.prefix is not None
        return self.prefix.take(self.micro_batch, self.context)


class Chunks(Protocol):
    """The chunks of a round, by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Chunk: ...


@dataclass(slots=True)
class StepChunks:
    """The chunks of a round of several steps. It makes the chunks of a step, which reads their samples, when the first
    of them is needed.

    Attributes:
        shape: the shape of the round.
        make: makes the chunks of a step, by the step's number in the round.
    """

    shape: RoundShape
    make: Callable[[int], list[Chunk]]
    _made: list[Chunk] = field(default_factory=list, init=False)

    def __len__(self) -> int:
        return self.shape.chunks

    def __getitem__(self, number: int, /) -> Chunk:
        while len(self._made) <= number:
            self._made += self.make(self.shape.step_of(len(self._made)))
        return self._made[number]
