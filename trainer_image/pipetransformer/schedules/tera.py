"""TeraPipe: slices of a micro-batch's tokens pass through the pipeline one after another, as micro-batches do."""

from dataclasses import dataclass

from .flushed import there_and_back
from .operations import Action, RoundShape, ScheduleError


@dataclass(frozen=True, slots=True)
class TeraPipe:
    """Slices of a micro-batch go forward from the first to the last, and backward from the last to the first (Li et
    al., 2021, section 3.2). Spans that train nothing run forwards only.

    All chunks go forward before the first goes backward. That makes the shortest round, whatever the slices' lengths.
    """

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        if shape.chunks % shape.slices:
            raise ScheduleError(f"{shape.chunks} chunks are not whole micro-batches of {shape.slices} slices")
        return there_and_back(shape, _backward_order(shape))


def _backward_order(shape: RoundShape) -> list[int]:
    """The order of backwards: micro-batch by micro-batch, and within each from its last slice to its first."""
    return [
        start + number for start in range(0, shape.chunks, shape.slices) for number in reversed(range(shape.slices))
    ]
