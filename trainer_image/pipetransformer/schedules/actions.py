"""What a schedule is: the order in which each worker of a pipeline computes, as data.

A schedule says what happens when, and nothing else. `order.py` adds the messages, `pipeline.Executor` runs the result,
and `simulate.py` predicts its time. So slices of tokens, several spans a worker, and optimizer steps within a round are
only other lists.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Protocol


class ActionKind(StrEnum):
    FORWARD = "Forward"
    BACKWARD = "Backward"  #: computes the gradients of input and weights at once
    INPUT_GRADIENT = "InputGradient"  #: computes the gradient of the input, which the span before waits for
    WEIGHT_GRADIENT = "WeightGradient"  #: computes the gradients of weights, after `INPUT_GRADIENT` of the same chunk
    STEP = "Step"  #: changes the span's weights
    PREFIX = "Prefix"  #: computes some frozen units before the first span, on any worker that holds them


@dataclass(frozen=True, slots=True)
class Action:
    """One computation of a worker: `kind` on its span `span` for the chunk `chunk`. For a `STEP` that is the number of
    the step in the round.

    A `PREFIX` computes `units` of the frozen prefix, and the last one gives its output to span 0. Chunks of the next
    round count on from this round's last chunk.
    """

    kind: ActionKind
    span: int
    chunk: int = -1
    units: range = range(0)


@dataclass(frozen=True, slots=True)
class RoundShape:
    """What a schedule puts in order: chunks that pass through the spans of a pipeline.

    Attributes:
        owners: worker of each span, spans in the order of the model. A worker may own several.
        chunks: number of chunks. A chunk is a micro-batch, or a slice of its tokens.
        first_trained: number of leading spans that train nothing. They run forwards only, and get no gradient.
            An evaluation has `len(owners)`.
        slices: chunks of each micro-batch; slice s of micro-batch m is chunk m * slices + s.
        prefix_units: number of frozen units that `PREFIX` actions compute before span 0. With 0 the forward of span 0
            computes them.
        prefix_made: whether this round's prefix needs no `PREFIX` actions, because the round before has computed it.
        next_chunks: number of chunks of the next round, whose prefix this round computes; 0 if there is none.
        steps: number of chunks of each step, if the weights change within the round; empty if they change after it.
    """

    owners: tuple[int, ...]
    chunks: int
    first_trained: int = 0
    slices: int = 1
    prefix_units: int = 0
    prefix_made: bool = False
    next_chunks: int = 0
    steps: tuple[int, ...] = ()

    def step_of(self, chunk: int) -> int:
        """The step of the round that a chunk's gradient goes into."""
        return bisect_right(list(accumulate(self.steps)), chunk)

    def chunks_of(self, step: int) -> range:
        """The chunks of a step of the round."""
        start = sum(self.steps[:step])
        return range(start, start + self.steps[step])

    @property
    def prefixes(self) -> range:
        """The chunks whose prefix `PREFIX` actions of this round compute, in the order of need."""
        if not self.prefix_units:
            return range(0)
        return range(self.chunks if self.prefix_made else 0, self.chunks + self.next_chunks)

    @property
    def workers(self) -> int:
        """Workers of the pipeline (K)."""
        return max(self.owners) + 1

    def trains(self, span: int) -> bool:
        """Whether the span has a backward."""
        return span >= self.first_trained

    def gives_gradient(self, span: int) -> bool:
        """Whether the span before this one waits for this span's input gradient."""
        return span > self.first_trained

    def spans_of(self, worker: int) -> list[int]:
        """The spans of a worker, in the order of the model."""
        return [span for span, owner in enumerate(self.owners) if owner == worker]


class ScheduleError(ValueError):
    """A schedule cannot run a round, or its lists are wrong. The text says why, for the record."""


class Schedule(Protocol):
    """Orders a round. A round starts and ends with no chunk in flight: every chunk has passed every span, forward, and
    backward where the span trains. Equal schedules return equal lists for equal shapes."""

    def actions(self, shape: RoundShape) -> Sequence[Sequence[Action]]:
        """The computations of each worker, in order. All workers of the pipeline get the same answer.

        Raises:
            ScheduleError: the schedule cannot run this shape, for example with too few chunks.
        """
        ...

    def __hash__(self) -> int: ...
