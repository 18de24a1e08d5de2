"""The exact contiguous partition that the greedy one of PipeTransformer's Algorithm 1 approximates."""

from collections.abc import Sequence
from itertools import accumulate, pairwise


def balance(costs: Sequence[float], stages: int) -> list[range]:
    """Cut `costs` into `stages` contiguous, non-empty runs so that the dearest run is as cheap as possible.

    Dynamic programming over (items, runs); of equally good partitions the one whose cuts come earliest is taken, so
    that every rank finds the same.

    Raises:
        ValueError: there are fewer items than stages.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"cannot cut {len(costs)} items into {stages} stages")
    upto = [0.0, *accumulate(costs)]
    best = [upto]  # best[k][n]: the dearest of k + 1 runs over the first n items
    cuts: list[list[int]] = []
    for runs in range(2, stages + 1):
        row, cut_row = [float("inf")] * (len(costs) + 1), [0] * (len(costs) + 1)
        for end in range(runs, len(costs) + 1):
            for cut in range(runs - 1, end):
                dearest = max(best[-1][cut], upto[end] - upto[cut])
                if dearest < row[end]:
                    row[end], cut_row[end] = dearest, cut
        best.append(row)
        cuts.append(cut_row)
    ends = [len(costs)]
    for cut_row in reversed(cuts):
        ends.append(cut_row[ends[-1]])
    return [range(start, end) for start, end in pairwise([0, *reversed(ends)])]
