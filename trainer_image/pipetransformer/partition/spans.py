"""Which units each stage holds: the one function that every rank asks, so that all agree without a message."""

from collections.abc import Sequence

from .contiguous import partition
from .costs import UnitTimes, layer_costs


def spans(num_layers: int, boundary: int, stages: int, unit_times: Sequence[UnitTimes] | None = None) -> list[range]:
    """Unit indices (0 is the embedding, L+1 the head) of each stage, balanced by time, at least one block a stage.

    `unit_times` must be the same on every rank; without it one block counts as much as another.

    Raises:
        ValueError: there are fewer blocks than stages.
    """
    embedding, *blocks, head = layer_costs(num_layers, boundary, unit_times)
    blocks[0] += embedding
    blocks[-1] += head
    cut = partition(blocks, stages)
    starts = [0, *(run.start + 1 for run in cut[1:])]
    ends = [*starts[1:], num_layers + 2]
    return [range(start, end) for start, end in zip(starts, ends, strict=True)]
