"""Cuts units into stages. Each stage has at least one layer; embedding and head stay with the layer next to them."""

from collections.abc import Sequence
from dataclasses import replace

from .contiguous import MemoryBound, partition
from .costs import assumed_costs, training_seconds


def spans(num_layers: int, boundary: int, stages: int) -> list[range]:
    """The units of each stage, cut by assumed costs with `boundary` frozen layers. All workers get the same result.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    forward, backward = training_seconds(assumed_costs(num_layers).at(1), boundary)
    return cut_units([f + b for f, b in zip(forward, backward, strict=True)], stages)


def cut_units(
    unit_costs: Sequence[float], stages: int, memory: MemoryBound | None = None, prefix: int = 1
) -> list[range]:
    """Cut the units (0 is the embedding, L + 1 the head) so that the most expensive stage is as cheap as possible.

    Args:
        unit_costs: costs of the L + 2 units.
        stages: number of stages.
        memory: limit on the bytes of each worker, with needs by unit; no limit by default.
        prefix: this many leading units, with the embedding, stay together with the unit after them.

    Raises:
        MemoryBoundError: no cut fits the limit.
        ValueError: there are fewer layers outside of the prefix than stages.
    """
    if memory is not None:
        memory = replace(memory, needs=[_by_block(row, prefix) for row in memory.needs])
    cut = partition(_by_block(unit_costs, prefix), stages, memory)
    starts = [0, *(run.start + prefix for run in cut[1:])]
    ends = [*starts[1:], len(unit_costs)]
    return [range(start, end) for start, end in zip(starts, ends, strict=True)]


def _by_block(units: Sequence[float], prefix: int) -> list[float]:
    blocks = list(units[prefix:-1])
    blocks[0] += sum(units[:prefix])
    blocks[-1] += units[-1]
    return blocks
