"""What the workers of a pipeline do in a round: computations (actions), which a schedule puts in order, and messages.

A span is a contiguous part of the model that one worker computes as a whole; a worker may own several. A schedule only
orders computations, as a list of actions for each worker. `order.py` adds the messages, `pipeline.Executor` runs the
result, and `simulate.py` predicts its time. Slices of tokens, several spans a worker, and optimizer steps within a
round need other lists, but no other code to run them.
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
    STEP = "Step"  #: steps the optimizer on the span's weights
    PREFIX = "Prefix"  #: computes some frozen units before the first span, on any worker that holds them


@dataclass(frozen=True, slots=True)
class Action:
    """One computation of a worker.

    Attributes:
        kind: what is computed.
        span: index of the span that computes; 0 for a `PREFIX`.
        chunk: number of the chunk. The numbers of the next round's chunks follow those of this round's. For a `STEP`
            it is the number of the step in the round.
        units: for a `PREFIX`, the frozen units that it computes. The output of the last frozen unit goes to span 0.
    """

    kind: ActionKind
    span: int
    chunk: int
    units: range = range(0)


@dataclass(frozen=True, slots=True)
class RoundShape:
    """The round that a schedule puts in order: chunks pass through the spans of a pipeline.

    Attributes:
        owners: worker of each span, spans in the order of the model. A worker may own several.
        chunks: number of chunks. A chunk is a micro-batch, or a slice of its tokens.
        first_trained: number of leading spans that train nothing. They run forwards only, and get no gradient.
            In an evaluation it is `len(owners)`, because no span trains.
        slices: chunks of each micro-batch; slice s of micro-batch m is chunk m * slices + s.
        prefix_units: number of frozen units that `PREFIX` actions compute before span 0. With 0 the forward of span 0
            computes them.
        prefix_made: whether this round runs no `PREFIX` actions for its chunks: the round before ran them, or the
            worker of span 0 has a cache of what they return.
        next_chunks: number of chunks of the next round whose `PREFIX` actions this round runs.
        steps: number of chunks of each optimizer step, if the weights change within the round; empty if they change
            only after it.
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
        """Number of the optimizer step in this round that uses the gradient of this chunk."""
        return bisect_right(list(accumulate(self.steps)), chunk)

    def chunks_of(self, step: int) -> range:
        """The chunks whose gradients a step of this round uses."""
        start = sum(self.steps[:step])
        return range(start, start + self.steps[step])

    @property
    def prefixes(self) -> range:
        """The chunks that have `PREFIX` actions in this round, in the order of span 0's forwards."""
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


class MessageKind(StrEnum):
    ACTIVATION = "Activation"
    GRADIENT = "Gradient"
    PREFIX = "Prefix"
    WEIGHT = "Weight"


#: What a computation on one span takes from the same kind of computation on the next span.
_PASSED_DOWN = {
    ActionKind.BACKWARD: MessageKind.GRADIENT,
    ActionKind.INPUT_GRADIENT: MessageKind.GRADIENT,
    ActionKind.STEP: MessageKind.WEIGHT,
}


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that one computation makes for another. `span` is the span that takes it, for `chunk`.

    An `ACTIVATION` is the span's input. A `GRADIENT` is the gradient of the span's output. A `PREFIX` is the output of
    the last frozen unit; for a chunk of the next round, that round uses it. A `WEIGHT` is the sum of the weights of a
    step's samples, by which a `STEP` divides its gradients; its `chunk` is the number of the step.
    """

    kind: MessageKind
    span: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send `value` to the worker `peer`."""

    value: Value
    peer: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Post the receive of `value` from the worker `peer`, without waiting. The computation that needs it waits."""

    value: Value
    peer: int


Operation = Action | Send | Receive


def input_of(action: Action, shape: RoundShape) -> Value | None:
    """The value that this computation takes from another one of this round; None if it takes none."""
    if action.kind is ActionKind.FORWARD:
        if action.span > 0:
            return Value(MessageKind.ACTIVATION, action.span, action.chunk)
        made_now = shape.prefix_units and not shape.prefix_made
        return Value(MessageKind.PREFIX, 0, action.chunk) if made_now else None
    if action.kind in _PASSED_DOWN and action.span < len(shape.owners) - 1:
        return Value(_PASSED_DOWN[action.kind], action.span, action.chunk)
    return None


def output_of(action: Action, shape: RoundShape) -> Value | None:
    """The value that this computation makes for another one; None if it makes none."""
    if action.kind is ActionKind.FORWARD and action.span < len(shape.owners) - 1:
        return Value(MessageKind.ACTIVATION, action.span + 1, action.chunk)
    if action.kind is ActionKind.PREFIX and action.units.stop == shape.prefix_units:
        return Value(MessageKind.PREFIX, 0, action.chunk)
    if action.kind in _PASSED_DOWN and shape.gives_gradient(action.span):
        return Value(_PASSED_DOWN[action.kind], action.span - 1, action.chunk)
    return None


class ScheduleError(ValueError):
    """A schedule cannot run a round, or its lists are wrong. The text says why, for the record."""


class Schedule(Protocol):
    """Puts the computations of a round in order.

    No chunk is in flight when a round starts or ends. In between each chunk passes each span forward, and backward if
    the span trains. Equal schedules return equal lists for equal shapes.
    """

    def actions(self, shape: RoundShape) -> Sequence[Sequence[Action]]:
        """The computations of each worker, in order. All workers of the pipeline get the same lists.

        Raises:
            ScheduleError: the schedule cannot run this shape, for example with too few chunks.
        """
        ...

    def __hash__(self) -> int: ...
