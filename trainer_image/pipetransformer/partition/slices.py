"""Cuts samples into slices of tokens for TeraPipe (Li et al., 2021, section 3.3): the dynamic program of the paper.

A slice of l tokens behind c earlier ones takes t(l, c) seconds on a stage. The first slices of a causal model are
cheaper for their length, so the best slices are not equal. Lengths are counted in grains of several tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]

#: Largest number of limits that are tried, and how many at once. Samples of up to 90 grains have fewer limits of t, and
#: those of up to 12 grains have not many more pairs of limits.
_LIMITS, _AT_ONCE = 4096, 256
#: Grains of a sample, unless the job says how many tokens a grain has, and the tokens of a grain at least.
_GRAINS, _LEAST_GRAIN = 64, 8


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of slices on one stage, for one micro-batch.

    Attributes:
        forward: (grains + 1, grains + 1) seconds of l grains behind c grains, at [l, c]. Values beyond the sample do
            not matter.
        backward: the same for backwards; zero for a stage that trains nothing.
    """

    forward: Seconds
    backward: Seconds


class MicroBatchSlices(NamedTuple):
    """How one micro-batch is cut: its samples, and the lengths of its slices in order, in grains."""

    samples: int
    lengths: tuple[int, ...]


class RoundPlan(NamedTuple):
    """How a pipeline's samples are cut, and the seconds of a round with that."""

    seconds: float
    micro_batches: tuple[MicroBatchSlices, ...]


#: Times of each stage, by the number of samples in a micro-batch.
TimesBySize = Mapping[int, Sequence[StageTimes]]


def round_seconds(times: TimesBySize, micro_batches: Sequence[MicroBatchSlices]) -> float:
    """Seconds of a round: all slices forward through all stages, then all backward through the stages that train.

    For equal stages it is sum(f + b) + (K - 1) (max f + max b). It is what a simulation of the lists gives, without
    seconds of messages. Stages that train nothing come first, with a backward of zero.
    """
    forward = np.zeros(sum(len(each.lengths) for each in micro_batches))
    backward = np.zeros_like(forward)
    stages = range(len(times[micro_batches[0].samples]))
    for stage in stages:
        forward = _through(forward, _at(micro_batches, {size: of[stage].forward for size, of in times.items()}, 1))
    for stage in reversed(stages):
        seconds = _at(micro_batches, {size: of[stage].backward for size, of in times.items()}, -1)
        if seconds.any():
            backward = _through(backward, seconds)
    return float(forward[-1] + backward[-1])


def paper_seconds(times: TimesBySize, micro_batches: Sequence[MicroBatchSlices]) -> float:
    """The paper's objective, sum(t) + (K - 1) max(t) for t = f + b. A frozen stage adds its forward to the second term
    only."""
    total = most = 0.0
    for samples, lengths in micro_batches:
        work, forwards, backwards = _terms(times[samples])
        slices = _with_context(lengths)
        total += sum(work[each] for each in slices)
        most = max(most, *(forwards[each] + backwards[each] for each in slices))
    return float(total + most)


def plan_round(times: TimesBySize, samples: int) -> RoundPlan:
    """The micro-batches and their slices for which a round of `samples` samples takes least, by `round_seconds`.

    The candidates are the best slicings for each limit of max(t), as the paper has them, and for each pair of limits of
    max(f) and max(b). Long samples have too many pairs, so only some are tried. All equal slices of equal micro-batches
    are candidates, too.

    Args:
        times: for each size of a micro-batch that is allowed.
        samples: of the pipeline.

    Raises:
        ValueError: no micro-batches of these sizes have that many samples.
    """
    terms = {size: _terms(stages) for size, stages in times.items()}
    best = _equal_rounds(times, samples)
    for limited in (_by_time, _by_direction):
        for bound, cut in sorted(set(_candidates(terms, samples, best.seconds, limited))):
            if bound >= best.seconds:
                break
            best = min(best, RoundPlan(round_seconds(times, cut), cut))
    if not best.micro_batches:
        raise ValueError(f"no micro-batches of {sorted(times)} samples have {samples} samples together")
    return best


def plan_paper(times: TimesBySize, samples: int) -> RoundPlan:
    """As `plan_round`, but the best by the paper's objective."""
    return min(_candidates({size: _terms(stages) for size, stages in times.items()}, samples, np.inf, _by_time))


def _equal_rounds(times: TimesBySize, samples: int) -> RoundPlan:
    """The best of all equal slices of equal micro-batches; infinite seconds if no size divides `samples`."""
    best = RoundPlan(np.inf, ())
    for size, stages in times.items():
        grains = len(stages[0].forward) - 1
        for count in range(1, grains + 1) if samples % size == 0 else ():
            cut = (MicroBatchSlices(size, equal_slices(grains, count)),) * (samples // size)
            best = min(best, RoundPlan(round_seconds(times, cut), cut))
    return best


def equal_slices(total: int, count: int) -> tuple[int, ...]:
    """`total` in `count` slices whose lengths differ by at most 1.

    Raises:
        ValueError: there are more slices than tokens, or none.
    """
    if not 1 <= count <= total:
        raise ValueError(f"{total} tokens cannot be cut into {count} slices")
    return tuple(end - start for start, end in pairwise(total * number // count for number in range(count + 1)))


def default_grain(total: int) -> int:
    """Tokens of a grain for samples of `total` tokens."""
    return min(total, max(_LEAST_GRAIN, -(-total // _GRAINS)))


def in_tokens(lengths: Iterable[int], grain: int, total: int) -> tuple[int, ...]:
    """Lengths in grains as lengths in tokens. The last grain of a sample may be smaller than the others."""
    ends = [min(total, grain * end) for end in accumulate(lengths, initial=0)]
    return tuple(end - start for start, end in pairwise(ends))


def scaled(lengths: Sequence[int], total: int) -> tuple[int, ...]:
    """The slices of shorter samples: as many, of about the same shares, each of a token at least.

    Raises:
        ValueError: there are more slices than tokens.
    """
    count, whole = len(lengths), sum(lengths)
    if count > total:
        raise ValueError(f"{total} tokens cannot be cut into {count} slices")
    ends = [0]
    for number, end in enumerate(accumulate(lengths), start=1):
        ends.append(min(max(round(end * total / whole), ends[-1] + 1), total - (count - number)))
    return tuple(end - start for start, end in pairwise(ends))


def round_slices(lengths: Sequence[int], totals: Sequence[int]) -> list[tuple[int, ...]]:
    """The slices of the micro-batches of a round: as many of each, in the shares of `lengths`.

    Args:
        lengths: slices of the longest samples.
        totals: tokens of the samples of each micro-batch. Samples with fewer tokens than slices make all slices equal.
    """
    count = min(len(lengths), *totals)
    shares = lengths if count == len(lengths) else equal_slices(count, count)
    return [scaled(shares, total) for total in totals]


def _with_context(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Each length, with the sum of those before it."""
    return list(zip(lengths, accumulate(lengths, initial=0), strict=False))


def _at(micro_batches: Sequence[MicroBatchSlices], tables: Mapping[int, Seconds], step: int) -> Seconds:
    """The seconds of all slices; `step` is -1 if the last slice of each micro-batch comes first."""
    return np.array(
        [tables[samples][slice_] for samples, lengths in micro_batches for slice_ in _with_context(lengths)[::step]]
    )


def _through(ready: Seconds, seconds: Seconds) -> Seconds:
    """When each slice leaves a stage that works on one after another, from when it is ready for the stage."""
    work = np.cumsum(seconds)
    left: Seconds = work + np.maximum.accumulate(ready - (work - seconds))
    return left


class _Terms(NamedTuple):
    """Seconds of a slice, by length and context: its forward and backward on the stage that works on it longest, and
    its forwards and its backwards on all other stages."""

    work: Seconds
    forwards: Seconds
    backwards: Seconds


def _terms(stages: Sequence[StageTimes]) -> _Terms:
    forward, backward = np.array([each.forward for each in stages]), np.array([each.backward for each in stages])
    longest = (forward + backward).argmax(axis=0)[None]
    there = (np.take_along_axis(each, longest, axis=0)[0] for each in (forward, backward))
    of_forward, of_backward = there
    return _Terms(of_forward + of_backward, forward.sum(axis=0) - of_forward, backward.sum(axis=0) - of_backward)


#: What has a limit: each of these seconds of a slice.
_Limited = Callable[[_Terms], Sequence[Seconds]]


def _by_time(terms: _Terms) -> Sequence[Seconds]:
    return [terms.forwards + terms.backwards]


def _by_direction(terms: _Terms) -> Sequence[Seconds]:
    return [terms.forwards, terms.backwards]


def _candidates(terms: Mapping[int, _Terms], samples: int, within: float, limited: _Limited) -> list[RoundPlan]:
    """The best round for each limit, by the sum of work plus the largest of each limited time, as far as one may be
    below `within`.

    For each size B, f(B) = S*(grains) with S*(i) = min over l of S*(i - l) + t(l, i - l); then G(n) = min over B of
    G(n - B) + f(B). The limit holds for all.
    """
    work = {size: each.work for size, each in terms.items()}
    times = {size: np.array(limited(each)) for size, each in terms.items()}
    no_limit = np.full((1, len(next(iter(times.values())))), np.inf)
    least = _Program.solve(work, times, samples, no_limit).totals[0]
    found: list[RoundPlan] = []
    for limits in _limits(list(times.values())):
        possible = limits[least + limits.sum(axis=1) < min(within, *(plan.seconds for plan in found), np.inf)]
        if not len(possible):
            break  # larger limits are no better
        program = _Program.solve(work, times, samples, possible)
        for number in np.flatnonzero(np.isfinite(program.totals)):
            cut = program.cut(int(number))
            most = np.max([_most(times[size], lengths) for size, lengths in cut], axis=0)
            found.append(RoundPlan(float(program.totals[number] + most.sum()), cut))
    return found


def _most(times: Seconds, lengths: Sequence[int]) -> Seconds:
    """(limited,) the largest of each limited time among the slices."""
    most: Seconds = np.array([times[:, length, context] for length, context in _with_context(lengths)]).max(axis=0)
    return most


def _limits(times: Sequence[Seconds]) -> list[Seconds]:
    """(limits, limited) all combinations of the distinct times of slices, in parts, those with the least sum first."""
    grains = times[0].shape[1] - 1
    lengths, starts = np.array([(end - start, start) for end in range(1, grains + 1) for start in range(end)]).T
    slices = np.concatenate([each[:, lengths, starts] for each in times], axis=1)
    each_most = int(_LIMITS ** (1 / len(slices)))
    distinct = [_thinned(np.unique(of_one), each_most) for of_one in slices]
    limits = np.stack(np.meshgrid(*distinct, indexing="ij"), axis=-1).reshape(-1, len(distinct))
    limits = limits[limits.sum(axis=1).argsort(kind="stable")]
    return np.array_split(limits, -(-len(limits) // _AT_ONCE))


def _thinned(values: Seconds, most: int) -> Seconds:
    """At most that many of the ascending values, the largest among them."""
    if len(values) <= most:
        return values
    kept: Seconds = values[np.linspace(0, len(values) - 1, most).round().astype(int)]
    return kept


@dataclass(frozen=True, slots=True)
class _Program:
    """Solutions of the dynamic program, one for each limit.

    Attributes:
        totals: (limits,) the least summed work of the round; infinite if no slices are within the limit.
        last: by size, (limits, grains + 1) length of the last slice of the best slicing of that many grains.
        sizes: (limits, samples + 1) size of the last micro-batch of the best cut of that many samples.
    """

    totals: Seconds
    last: Mapping[int, NDArray[np.int64]]
    sizes: NDArray[np.int64]

    @classmethod
    def solve(
        cls, work: Mapping[int, Seconds], times: Mapping[int, Seconds], samples: int, limits: Seconds
    ) -> "_Program":
        of_size, last = {}, {}
        for size in work:
            of_size[size], last[size] = _least_sums(work[size], times[size], limits)
        totals = np.full((samples + 1, len(limits)), np.inf)
        totals[0] = 0.0
        sizes = np.zeros((samples + 1, len(limits)), dtype=np.int64)
        for count in range(1, samples + 1):
            fitting = [size for size in work if size <= count]
            if fitting:
                options = np.array([totals[count - size] + of_size[size] for size in fitting])
                totals[count], sizes[count] = options.min(axis=0), np.array(fitting)[options.argmin(axis=0)]
        return cls(totals[samples], last, sizes)

    def cut(self, number: int) -> tuple[MicroBatchSlices, ...]:
        """The micro-batches for the limit of this number, the smallest first."""
        micro_batches, left = [], len(self.sizes) - 1
        while left:
            size = int(self.sizes[left, number])
            micro_batches.append(MicroBatchSlices(size, _lengths(self.last[size][number])))
            left -= size
        return tuple(sorted(micro_batches))


def _least_sums(work: Seconds, times: Seconds, limits: Seconds) -> tuple[Seconds, NDArray[np.int64]]:
    """The least summed work of a sample for each limit, and the lengths of last slices (see `_Program`)."""
    grains = len(work) - 1
    sums = np.full((len(limits), grains + 1), np.inf)
    sums[:, 0] = 0.0
    last = np.zeros((len(limits), grains + 1), dtype=np.int64)
    for end in range(1, grains + 1):
        lengths = np.arange(1, end + 1)
        starts = end - lengths
        allowed = (times[:, lengths, starts] <= limits[:, :, None]).all(axis=1)
        options = np.where(allowed, sums[:, starts] + work[lengths, starts], np.inf)
        last[:, end] = options.argmin(axis=1) + 1
        sums[:, end] = options.min(axis=1)
    return sums[:, -1], last


def _lengths(last: NDArray[np.int64]) -> tuple[int, ...]:
    lengths: list[int] = []
    end = len(last) - 1
    while end:
        lengths.append(int(last[end]))
        end -= lengths[-1]
    return tuple(reversed(lengths))
