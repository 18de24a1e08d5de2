"""Cuts units into stages. Each stage has at least one layer; embedding and head stay with the layer next to them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

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


#: Loads count as equal if they differ by at most this share.
_EQUAL = 1e-9
#: Costs of the units, by their place in the model from 0 to 1, for the cuts that `cuts_by_worker` begins with: as many
#: units in each span, fewer in the first spans, fewer in the last ones.
_STARTS: tuple[Callable[[float], float], ...] = (lambda _: 1.0, lambda at: 2 - at, lambda at: 1 + at)


def cuts_by_worker(unit_costs: Sequence[float], owners: Sequence[int], prefix: int = 1) -> list[list[range]]:
    """Return the cut of `cut_units`, and up to four others that share the work among workers with several spans.

    The spans of a worker add up, so a cut into equal spans may give one worker twice the work of another. For each of
    the others, borders shift from another first cut, until no shift of one unit takes work from the busier of two
    workers. There may be better cuts. Which one is the fastest depends on the schedule.

    Args:
        unit_costs: costs of the L + 2 units.
        owners: worker of each span.
        prefix: this many leading units, with the embedding, stay together with the unit after them.

    Raises:
        ValueError: there are fewer layers outside of the prefix than spans.
    """
    count = len(unit_costs)
    even = cut_units(unit_costs, len(owners), prefix=prefix)
    firsts = [cut_units([cost(at / count) for at in range(count)], len(owners), prefix=prefix) for cost in _STARTS]
    found = [even]
    for first in (even, *firsts):
        shifted = _shift_borders(first, unit_costs, owners, prefix)
        if shifted not in found:
            found.append(shifted)
    return found


def _shift_borders(
    spans: Sequence[range], unit_costs: Sequence[float], owners: Sequence[int], prefix: int
) -> list[range]:
    """Shift borders by one unit, as long as this takes work from the busier of two workers. The busiest comes first."""
    borders = [prefix, *(span.stop for span in spans[:-1]), len(unit_costs) - 1]
    loads = [0.0] * (max(owners) + 1)
    for owner, span in zip(owners, spans, strict=True):
        loads[owner] += sum(unit_costs[span.start : span.stop])

    def shifts() -> Iterator[tuple[float, float, int, int, int, int, float]]:
        for at, (left, right) in enumerate(pairwise(owners), start=1):
            for border, giver, taker in ((borders[at] - 1, left, right), (borders[at] + 1, right, left)):
                if giver == taker or not borders[at - 1] < border < borders[at + 1]:
                    continue
                moved = unit_costs[min(border, borders[at])]
                busier, then = max(loads[giver], loads[taker]), max(loads[giver] - moved, loads[taker] + moved)
                if then < busier * (1 - _EQUAL):
                    yield -busier, then, at, border, giver, taker, moved

    while best := min(shifts(), default=None):
        _, _, at, border, giver, taker, moved = best
        borders[at] = border
        loads[giver] -= moved
        loads[taker] += moved
    return [range(start, stop) for start, stop in pairwise([0, *borders[1:-1], len(unit_costs)])]


def _by_block(units: Sequence[float], prefix: int) -> list[float]:
    blocks = list(units[prefix:-1])
    blocks[0] += sum(units[:prefix])
    blocks[-1] += units[-1]
    return blocks
