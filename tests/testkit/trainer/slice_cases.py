"""Random costs of slices, every slicing by brute force, and the lists of a plan played."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from pipetransformer.partition import slices
from pipetransformer.partition.slices import (
    MicroBatchSlices,
    RoundPlan,
    StageTimes,
    TimesBySize,
    plan_round,
    round_seconds,
)
from pipetransformer.schedules import ActionKind, RoundCosts, RoundShape, TeraPipe, planned, simulate


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


def simulated_seconds(stages: Sequence[StageTimes], lengths: Sequence[int], micro_batches: int) -> float:
    """Seconds of TeraPipe's lists, if messages take no time."""
    places = list(zip(lengths, accumulate(lengths, initial=0), strict=False))
    trained = [bool(each.backward.any()) for each in stages]
    first_trained = trained.index(True) if any(trained) else len(stages)
    shape = RoundShape(tuple(range(len(stages))), micro_batches * len(places), first_trained, len(places))
    seconds = {
        (kind, span): [float(table[each]) for each in places]
        for span, stage in enumerate(stages)
        for kind, table in ((ActionKind.FORWARD, stage.forward), (ActionKind.BACKWARD, stage.backward))
    }
    return simulate(planned(TeraPipe(), shape), shape, RoundCosts(seconds)).seconds


def paper_seconds(times: TimesBySize, micro_batches: Sequence[MicroBatchSlices]) -> float:
    """Seconds of a round by the paper's formula: sum(t) + (K - 1) max(t), with t = f + b. A frozen stage adds its
    forward to the second term only."""
    total = most = 0.0
    for samples, lengths in micro_batches:
        for place in zip(lengths, accumulate(lengths, initial=0), strict=False):
            seconds = [float(stage.forward[place] + stage.backward[place]) for stage in times[samples]]
            total += max(seconds)
            most = max(most, sum(seconds) - max(seconds))
    return total + most


def plan_paper(times: TimesBySize, samples: int) -> RoundPlan:
    """The planner's micro-batches and slices with which a round is fastest by the paper's formula."""
    terms = {size: slices._terms(stages) for size, stages in times.items()}
    return min(slices._candidates(terms, samples, np.inf, slices._by_time))


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
        worst_exact = max(worst_exact, abs(plan_round(times, samples).seconds / best_exact - 1))
    return worst_paper, worst_exact
