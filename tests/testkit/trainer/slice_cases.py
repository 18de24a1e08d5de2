"""Random costs of slices, every slicing by brute force, and a simulation of the lists, beside the planner's answer."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from pipetransformer.partition.slices import (
    MicroBatchSlices,
    StageTimes,
    TimesBySize,
    paper_seconds,
    plan_paper,
    plan_round,
    round_seconds,
)
from pipetransformer.schedules import ActionKind, RoundShape, TeraPipe


def every_slicing(grains: int) -> Iterator[tuple[int, ...]]:
    """All lists of lengths that sum to `grains`."""
    for last in range(1, grains + 1):
        for before in every_slicing(grains - last) if last < grains else [()]:
            yield (*before, last)


def every_round(grains: int, samples: int, sizes: Sequence[int]) -> Iterator[tuple[MicroBatchSlices, ...]]:
    """All ways to cut samples into micro-batches of these sizes, and each micro-batch into slices."""
    if not samples:
        yield ()
    for size in sizes:
        if size <= samples:
            for rest in every_round(grains, samples - size, [each for each in sizes if each <= size]):
                for lengths in every_slicing(grains):
                    yield (*rest, MicroBatchSlices(size, lengths))


def random_times(
    generator: np.random.Generator, grains: int, stages: int, frozen: int, sizes: Sequence[int] = (1,)
) -> TimesBySize:
    """Equal stages, of which the first `frozen` train nothing. Costs are those of a causal model, each off by up to a
    fifth, so that none is a smooth function."""
    tables = {}
    for size in sizes:
        length, context = np.meshgrid(np.arange(grains + 1.0), np.arange(grains + 1.0), indexing="ij")
        fixed, token, pair = generator.uniform(0.0, 2.0), generator.uniform(0.2, 2.0), generator.uniform(0.0, 1.0)
        forward, backward = (
            factor
            * (fixed + size * (token * length + pair * length * (context + length / 2)))
            * generator.uniform(0.8, 1.2, length.shape)
            for factor in (1.0, generator.uniform(1.0, 3.0))
        )
        nothing = np.zeros_like(backward)
        tables[size] = [StageTimes(forward, nothing if stage < frozen else backward) for stage in range(stages)]
    return tables


def simulated_seconds(times: TimesBySize, micro_batches: Sequence[MicroBatchSlices]) -> float:
    """The end of TeraPipe's lists when each computation begins as soon as its worker and its input are there.

    All micro-batches must have the same number of slices.
    """
    (slices,) = {len(each.lengths) for each in micro_batches}
    chunks = [
        (each.samples, length, context)
        for each in micro_batches
        for length, context in zip(each.lengths, accumulate(each.lengths, initial=0), strict=False)
    ]
    stages = len(times[micro_batches[0].samples])
    trained = [any(times[size][stage].backward.any() for size, _, _ in chunks) for stage in range(stages)]
    shape = RoundShape(tuple(range(stages)), len(chunks), trained.index(True) if any(trained) else stages, slices)
    left = [list(mine) for mine in TeraPipe().actions(shape)]
    free = [0.0] * stages
    done: dict[tuple[ActionKind, int, int], float] = {}
    while any(left):
        for stage, mine in enumerate(left):
            while mine:
                kind, chunk = mine[0].kind, mine[0].chunk
                giver = stage - 1 if kind is ActionKind.FORWARD else stage + 1
                inner = 0 <= giver < stages
                if inner and (kind, giver, chunk) not in done:
                    break
                size, length, context = chunks[chunk]
                table = times[size][stage].forward if kind is ActionKind.FORWARD else times[size][stage].backward
                start = max(free[stage], done[kind, giver, chunk] if inner else 0.0)
                free[stage] = done[kind, stage, chunk] = start + float(table[length, context])
                mine.pop(0)
    return max(free)


def planner_worst(cases: int = 60, seed: int = 0) -> tuple[float, float]:
    """Largest relative distance of the planner's round from the best of all rounds: by the paper's objective, and by
    the seconds of the lists. Lengths to 12, 1 to 3 micro-batches, up to 5 stages, any frozen prefix."""
    generator = np.random.default_rng(seed)
    worst_paper = worst_exact = 0.0
    for number in range(cases):
        stages = int(generator.integers(1, 6))
        samples, frozen = int(generator.integers(1, 4)), int(generator.integers(0, stages))
        joint = number % 6 == 0 and samples > 1
        grains = int(generator.integers(1, 5 if joint else 13))
        times = random_times(generator, grains, stages, frozen, (1, 2) if joint else (1,))
        equal = [(MicroBatchSlices(1, lengths),) * samples for lengths in every_slicing(grains)]
        rounds = list(every_round(grains, samples, (1, 2))) if joint else equal
        best_paper, best_exact = (min(of(times, each) for each in rounds) for of in (paper_seconds, round_seconds))
        worst_paper = max(worst_paper, abs(plan_paper(times, samples).seconds / best_paper - 1))
        worst_exact = max(worst_exact, plan_round(times, samples).seconds / best_exact - 1)
    return worst_paper, worst_exact
