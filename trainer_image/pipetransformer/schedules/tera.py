"""TeraPipe: slices of tokens pass through the pipeline one after another, as micro-batches do."""

from dataclasses import dataclass

from .actions import Action, RoundShape, ScheduleError
from .flushed import in_turns, there_and_back


@dataclass(frozen=True, slots=True)
class TeraPipe:
    """Slices of a micro-batch go forward from the first to the last, and backward from the last to the first (Li et
    al., 2021, section 3.2). Spans that train nothing run forwards only.

    Every chunk goes forward before any goes backward. That is the shortest round, whatever the lengths of slices.

    Attributes:
        in_turns: whether workers run a backward and a forward in turns instead, as 1F1B does. Worker k of K then keeps
            at most K - k + S - 1 chunks in flight, for S slices of a micro-batch. It needs less memory if there are
            more than two micro-batches.
    """

    in_turns: bool = False

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        if shape.chunks % shape.slices:
            raise ScheduleError(f"{shape.chunks} chunks are no micro-batches of {shape.slices} slices")
        if not self.in_turns:
            return there_and_back(shape, _backward_order(shape))
        if shape.owners != tuple(range(shape.workers)):
            raise ScheduleError("TeraPipe in turns needs one span a worker")
        return in_turns(shape, _backward_order(shape))


def _backward_order(shape: RoundShape) -> list[int]:
    """All chunks, micro-batch by micro-batch, the last slice of each first."""
    return [
        start + number for start in range(0, shape.chunks, shape.slices) for number in reversed(range(shape.slices))
    ]
