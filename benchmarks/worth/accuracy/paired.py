"""Comparisons of runs that have the same seeds: order, head and training samples."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scipy.stats import t

_CONFIDENCE = 0.95
#: Accuracies by seed.
BySeed = Mapping[int, float]


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences and its one-sided 95 % bound from below; -inf with less than two pairs."""

    mean: float
    low95: float
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Point:
    """A policy on a curve of accuracy over work.

    Attributes:
        work: mean of its runs.
        accuracy: by seed.
    """

    work: float
    accuracy: BySeed


def difference(one: BySeed, other: BySeed) -> Difference:
    """`one` less `other`, over the seeds that both have, by Student's t.

    Raises:
        ValueError: they share no seed.
    """
    seeds = tuple(sorted(one.keys() & other.keys()))
    if not seeds:
        raise ValueError(f"no seed is in both: {sorted(one)} and {sorted(other)}")
    found = [one[seed] - other[seed] for seed in seeds]
    mean = statistics.mean(found)
    if len(found) < 2:
        return Difference(mean, -math.inf, seeds)
    error = statistics.stdev(found) / math.sqrt(len(found))
    return Difference(mean, mean - float(t.ppf(_CONFIDENCE, len(found) - 1)) * error, seeds)


def at_equal_work(curve: Sequence[Point], work: float, seeds: Sequence[int]) -> dict[int, float]:
    """The best that the curve reaches with at most `work`, by seed: one of its points, or between two neighbours.

    Between neighbours accuracy is interpolated linearly in the work, seed by seed. Which of these is best is decided
    by the mean over the seeds, in favour of the curve. A candidate that lacks one of `seeds` is left out. Empty if no
    candidate is left.
    """
    points = sorted(curve, key=lambda point: point.work)
    candidates: list[dict[int, float]] = [dict(point.accuracy) for point in points if point.work <= work]
    for low, high in pairwise(points):
        if low.work <= work < high.work and high.work > low.work:
            share = (work - low.work) / (high.work - low.work)
            both = low.accuracy.keys() & high.accuracy.keys()
            candidates.append({s: low.accuracy[s] + share * (high.accuracy[s] - low.accuracy[s]) for s in both})
    complete = [found for found in candidates if found.keys() >= set(seeds)]
    if not complete:
        return {}
    best = max(complete, key=lambda found: statistics.mean(found[seed] for seed in seeds))
    return {seed: best[seed] for seed in seeds}
