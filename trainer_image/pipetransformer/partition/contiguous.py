"""The best contiguous partition. PipeTransformer's Algorithm 1 only approximates it, with a greedy search.

If a cut needs further criteria, such as the size of activations that cross it, add them here.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class MemoryBound:
    """A limit on the bytes of each worker.

    Attributes:
        needs: (stages, items) bytes of each item in each stage. They should not rise from a stage to the next: under
            1F1B an earlier stage keeps activations of more micro-batches. They do rise if the first stage keeps frozen
            layers in host memory. Then the search may miss partitions that fit.
        limit: bytes that one worker may use.
        held: bytes that each worker holds in addition to its items.
    """

    needs: Sequence[Sequence[float]]
    limit: float
    held: float = 0.0

    @property
    def room(self) -> float:
        """Bytes that the items of one worker may use; negative if a worker has less than `held`."""
        return self.limit - self.held


class MemoryBoundError(ValueError):
    """No partition fits the memory. `needed` are the bytes that a worker would need, `limit` those that it has."""

    def __init__(self, stages: int, stage: int, item: int, needed: float, limit: float) -> None:
        super().__init__(
            f"{stages} stages do not fit the memory: stage {stage} would need {needed:.0f} bytes with item {item}, but"
            f" a worker has {limit:.0f}"
        )
        self.needed = needed
        self.limit = limit


def partition(costs: Sequence[float], stages: int, memory: MemoryBound | None = None) -> list[range]:
    """Cut `costs` into `stages` contiguous, non-empty runs so that the most expensive run is as cheap as possible.

    It bisects the cost of the most expensive run (Pinar and Aykanat, 2004, section 4.3). A greedy probe tells whether a
    bound is feasible. The bisection only stops at sums of runs, so it ends exactly at the optimum. Ties are resolved
    the same way everywhere: it balances the runs from the last to the first, then prefers the earlier cut.

    Args:
        costs: costs of the items, in order; not negative.
        stages: number of runs.
        memory: limit on the bytes of each run; no limit by default.

    Raises:
        MemoryBoundError: no partition fits the limit.
        ValueError: there are fewer items than stages.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"cannot cut {len(costs)} items into {stages} stages")
    search = _Search(costs, stages, memory)
    found = search.cut(search.best_bound())
    search.check(found)
    return found


class _Search:
    """The search for one partition, with sums over the first items of costs and bytes."""

    def __init__(self, costs: Sequence[float], stages: int, memory: MemoryBound | None) -> None:
        self.num_items = len(costs)
        self.stages = stages
        self.memory = memory
        self.upto = [0.0, *accumulate(map(float, costs))]
        needs = memory.needs if memory else []
        self.bytes_upto = [[0.0, *accumulate(map(float, row))] for row in needs]

    def best_bound(self) -> float:
        """Cost of the most expensive run in the best partition."""
        upto = self.upto
        if not self._kept(self.furthest_ends(float("inf"))[0]):
            raise self._error()
        high = upto[-1]
        low = max(max(after - before for before, after in pairwise(upto)), high / self.stages * (1 - 1e-12))
        while low < high:
            bound = low + (high - low) / 2
            if bound >= high:
                bound = low
            ends, next_bound = self.furthest_ends(bound)
            if self._kept(ends):
                high = max(upto[end] - upto[start] for start, end in pairwise([0, *ends]))
            else:
                low = next_bound
        return high

    def furthest_ends(self, bound: float) -> tuple[list[int], float]:
        """How far the first 1, 2, ... runs reach if each costs at most `bound`. Also returns the next larger bound that
        could let them reach further."""
        ends: list[int] = []
        end, next_bound = 0, float("inf")
        for stage in range(self.stages):
            start = end
            end = _furthest_end(self.upto, start, bound)
            if self.memory is not None:
                fits = _furthest_end(self.bytes_upto[stage], start, self.memory.room)
                if fits <= end:
                    ends.append(end := fits)
                    continue
            if end < self.num_items:
                next_bound = min(next_bound, self.upto[end + 1] - self.upto[start])
            ends.append(end)
        return ends, next_bound

    def cut(self, bound: float) -> list[range]:
        """A partition whose runs cost at most `bound`. It is built from the last run to the first."""
        ends, _ = self.furthest_ends(bound)
        runs: list[range] = []
        end = self.num_items
        for stage in range(self.stages - 1, 0, -1):
            earliest = max(stage, self._earliest_start(stage, end, bound))
            latest = min(ends[stage - 1], end - 1)
            even = self.upto[end] * stage / (stage + 1)
            start = bisect_left(self.upto, even)
            if start > 0 and even - self.upto[start - 1] <= self.upto[start] - even:
                start -= 1
            start = min(max(start, earliest), latest)
            runs.append(range(start, end))
            end = start
        return [range(end), *reversed(runs)]

    def check(self, runs: Sequence[range]) -> None:
        """Check that each run fits the memory. A run can only be too large if needs rise from a stage to the next.

        Raises:
            MemoryBoundError: a run does not fit.
        """
        for stage, (run, upto) in enumerate(zip(runs, self.bytes_upto, strict=False)):
            assert self.memory is not None
            needed = upto[run.stop] - upto[run.start]
            if needed > self.memory.room:
                raise self._error_of(stage, run.stop - 1, needed)

    def _kept(self, ends: Sequence[int]) -> bool:
        """Whether non-empty runs can cover all items, if run i ends at `ends[i]` or before."""
        return ends[-1] == self.num_items and all(end > stage for stage, end in enumerate(ends))

    def _earliest_start(self, stage: int, end: int, bound: float) -> int:
        start = _earliest_start(self.upto, end, bound)
        if self.memory is None:
            return start
        return max(start, _earliest_start(self.bytes_upto[stage], end, self.memory.room))

    def _error(self) -> MemoryBoundError:
        assert self.memory is not None
        ends, _ = self.furthest_ends(float("inf"))
        short = next((stage for stage, end in enumerate(ends) if end <= stage), self.stages - 1)
        start = ends[short - 1] if short else 0
        item = ends[short]
        needed = self.bytes_upto[short][item + 1] - self.bytes_upto[short][start]
        return self._error_of(short, item, needed)

    def _error_of(self, stage: int, item: int, needed: float) -> MemoryBoundError:
        assert self.memory is not None
        return MemoryBoundError(self.stages, stage, item, needed + self.memory.held, self.memory.limit)


def _furthest_end(upto: Sequence[float], start: int, bound: float) -> int:
    """Largest `end` with `upto[end] - upto[start] <= bound`; `start` if there is none. The bisection for
    `upto[start] + bound` may be off by a rounding error, so the loops after it compare the differences."""
    end = max(start, bisect_right(upto, upto[start] + bound) - 1)
    while end > start and upto[end] - upto[start] > bound:
        end -= 1
    while end + 1 < len(upto) and upto[end + 1] - upto[start] <= bound:
        end += 1
    return end


def _earliest_start(upto: Sequence[float], end: int, bound: float) -> int:
    """Smallest `start` with `upto[end] - upto[start] <= bound`."""
    start = bisect_left(upto, upto[end] - bound)
    while start < end and upto[end] - upto[start] > bound:
        start += 1
    while start > 0 and upto[end] - upto[start - 1] <= bound:
        start -= 1
    return start
