"""Cuts samples into slices of tokens for TeraPipe, by the paper's dynamic program (Li et al., 2021, section 3.3).

A slice of l tokens after c earlier tokens takes t(l, c) seconds on a stage. In a causal model a slice attends to all
earlier tokens, so later slices cost more for the same length, and the best slices are not equal. Lengths are counted in
grains of several tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]

#: Largest number of limits that are tried, and how many of them at once. All limits of t are tried for samples of up to
#: 90 grains, and most pairs of limits for up to 12 grains.
_LIMITS, _AT_ONCE = 4096, 256
#: Grains of a sample, and the fewest tokens of a grain. Both are used unless the job sets the tokens of a grain.
_GRAINS, _LEAST_GRAIN = 64, 8
#: Most grains of a sample. With as many, a plan takes a second; with 1,024 it takes half a minute.
_MOST_GRAINS = 128


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of slices on one stage, for one micro-batch.

    Attributes:
        forward: (grains + 1, grains + 1) at [l, c] the seconds of a forward of l grains after c grains. Values with
            l + c beyond the sample are not used.
        backward: the same for backwards; zero for a stage that trains nothing.
    """

    forward: Seconds
    backward: Seconds


class MicroBatchSlices(NamedTuple):
    """How one micro-batch is cut: its samples, and the lengths of its slices in order, in grains."""

    samples: int
    lengths: tuple[int, ...]


class RoundPlan(NamedTuple):
    """How a pipeline's samples are cut into micro-batches and slices, and the seconds of a round with this cut."""

    seconds: float
    micro_batches: tuple[MicroBatchSlices, ...]


#: Times of each stage, by the number of samples in a micro-batch.
TimesBySize = Mapping[int, Sequence[StageTimes]]


def round_seconds(times: TimesBySize, micro_batches: Sequence[MicroBatchSlices]) -> float:
    """Seconds of a round: all slices forward through all stages, then all backward through the stages that train.

    For K equal stages it is sum(f + b) + (K - 1) (max f + max b). A simulation of the schedule's lists without messages
    gives the same. Stages that train nothing come first, and have a backward of zero.
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


def plan_round(times: TimesBySize, samples: int) -> RoundPlan:
    """The micro-batches and slices with which a round of `samples` samples is fastest, by `round_seconds`.

    As in the paper, it limits max(t) and takes the best slices within the limit, for each possible limit. It does the
    same for each pair of limits of max(f) and max(b). Long samples have too many pairs, so only some are tried. It also
    tries all equal slices of equal micro-batches.

    Args:
        times: times of each stage, for each allowed number of samples in a micro-batch.
        samples: number of samples of the pipeline in a round.

    Raises:
        ValueError: no micro-batches of these sizes add up to `samples`.
    """
    terms = {size: _terms(stages) for size, stages in times.items()}
    best = _equal_rounds(times, samples)
    for limited in (_by_time, _by_direction):
        for bound, cut in sorted(set(_candidates(terms, samples, best.seconds, limited))):
            if bound >= best.seconds:
                break
            best = min(best, RoundPlan(round_seconds(times, cut), cut))
    if not best.micro_batches:
        raise ValueError(f"micro-batches of {sorted(times)} samples cannot add up to {samples} samples")
    return best


def _equal_rounds(times: TimesBySize, samples: int) -> RoundPlan:
    """The best cut into equal micro-batches of equal slices; infinite seconds if no size divides `samples`."""
    best = RoundPlan(np.inf, ())
    for size, stages in times.items():
        grains = len(stages[0].forward) - 1
        for count in range(1, grains + 1) if samples % size == 0 else ():
            cut = (MicroBatchSlices(size, equal_slices(grains, count)),) * (samples // size)
            best = min(best, RoundPlan(round_seconds(times, cut), cut))
    return best


def equal_slices(total: int, count: int) -> tuple[int, ...]:
    """Cut `total` tokens, or grains, into `count` slices whose lengths differ by at most 1.

    Raises:
        ValueError: there are more slices than tokens, or none.
    """
    if not 1 <= count <= total:
        raise ValueError(f"{total} tokens cannot be cut into {count} slices")
    return tuple(end - start for start, end in pairwise(total * number // count for number in range(count + 1)))


def grain_of(total: int, multiple: int | None) -> int:
    """Tokens of a grain for samples of `total` tokens.

    Args:
        total: tokens of a sample.
        multiple: the job's `sliceMultiple`. A grain is the smallest multiple of it with which the sample has few enough
            grains to plan. None if the job does not set it.
    """
    if multiple is None:
        return min(total, max(_LEAST_GRAIN, -(-total // _GRAINS)))
    return multiple * -(-total // (multiple * _MOST_GRAINS))


def in_tokens(lengths: Iterable[int], grain: int, total: int) -> tuple[int, ...]:
    """Convert lengths in grains to lengths in tokens. The last grain of a sample may be smaller than the others."""
    ends = [min(total, grain * end) for end in accumulate(lengths, initial=0)]
    return tuple(end - start for start, end in pairwise(ends))


def scaled(lengths: Sequence[int], total: int) -> tuple[int, ...]:
    """Cut shorter samples of `total` tokens into as many slices, of about the same shares. Each has at least one token.

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
    """The slices of each micro-batch of a round. All micro-batches have the same number of slices.

    Args:
        lengths: slices of the longest samples. Other samples are cut in the same shares.
        totals: tokens of the samples of each micro-batch. If some are fewer than `len(lengths)`, there are only as many
            slices as the fewest tokens, and all shares are equal.
    """
    count = min(len(lengths), *totals)
    shares = lengths if count == len(lengths) else equal_slices(count, count)
    return [scaled(shares, total) for total in totals]


def _with_context(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Each length, with the sum of the lengths before it."""
    return list(zip(lengths, accumulate(lengths, initial=0), strict=False))


def _at(micro_batches: Sequence[MicroBatchSlices], tables: Mapping[int, Seconds], step: int) -> Seconds:
    """The seconds of all slices, in the order of their runs. With `step` -1 the last slice of each micro-batch
    runs first, as in backwards."""
    return np.array(
        [tables[samples][slice_] for samples, lengths in micro_batches for slice_ in _with_context(lengths)[::step]]
    )


def _through(ready: Seconds, seconds: Seconds) -> Seconds:
    """When each slice leaves a stage. The stage runs one slice after another.

    Args:
        ready: when each slice is ready for the stage.
        seconds: seconds of each slice on the stage.
    """
    work = np.cumsum(seconds)
    left: Seconds = work + np.maximum.accumulate(ready - (work - seconds))
    return left


class _Terms(NamedTuple):
    """Seconds of slices, by length and context.

    Attributes:
        work: forward and backward on the stage that takes longest for the slice.
        forwards: sum of the forwards on all other stages.
        backwards: sum of the backwards on all other stages.
    """

    work: Seconds
    forwards: Seconds
    backwards: Seconds


def _terms(stages: Sequence[StageTimes]) -> _Terms:
    forward, backward = np.array([each.forward for each in stages]), np.array([each.backward for each in stages])
    longest = (forward + backward).argmax(axis=0)[None]
    there = (np.take_along_axis(each, longest, axis=0)[0] for each in (forward, backward))
    of_forward, of_backward = there
    return _Terms(of_forward + of_backward, forward.sum(axis=0) - of_forward, backward.sum(axis=0) - of_backward)


#: Returns the seconds that get a limit: no slice may take more than the limit of each.
_Limited = Callable[[_Terms], Sequence[Seconds]]


def _by_time(terms: _Terms) -> Sequence[Seconds]:
    return [terms.forwards + terms.backwards]


def _by_direction(terms: _Terms) -> Sequence[Seconds]:
    return [terms.forwards, terms.backwards]


def _candidates(terms: Mapping[int, _Terms], samples: int, within: float, limited: _Limited) -> list[RoundPlan]:
    """For each limit, the cut whose sum of work is least. The `seconds` of a plan are that sum plus the largest of each
    limited time. Limits that cannot give a plan below `within` seconds are left out.

    For each size B, f(B) = S*(grains) with S*(i) = min over l of S*(i - l) + t(l, i - l), where t is within the limit.
    Then G(n) = min over B of G(n - B) + f(B).
    """
    work = {size: each.work for size, each in terms.items()}
    times = {size: np.array(limited(each)) for size, each in terms.items()}
    no_limit = np.full((1, len(next(iter(times.values())))), np.inf)
    least = _Program.solve(work, times, samples, no_limit).totals[0]
    found: list[RoundPlan] = []
    for limits in _limits(list(times.values())):
        possible = limits[least + limits.sum(axis=1) < min(within, *(plan.seconds for plan in found), np.inf)]
        if not len(possible):
            break  # larger limits give no better plan
        program = _Program.solve(work, times, samples, possible)
        for number in np.flatnonzero(np.isfinite(program.totals)):
            cut = program.cut(int(number))
            most = np.max([_most(times[size], lengths) for size, lengths in set(cut)], axis=0)
            found.append(RoundPlan(float(program.totals[number] + most.sum()), cut))
    return found


def _most(times: Seconds, lengths: Sequence[int]) -> Seconds:
    """(limited times,) the largest of each limited time among these slices of a sample."""
    most: Seconds = np.array([times[:, length, context] for length, context in _with_context(lengths)]).max(axis=0)
    return most


def _limits(times: Sequence[Seconds]) -> list[Seconds]:
    """The limits to try, sorted by their sum, in arrays (limits, limited times) of at most `_AT_ONCE` limits.

    A limit combines one of the distinct times of slices for each limited time. Distinct times are thinned out, so that
    there are at most `_LIMITS` combinations."""
    grains = times[0].shape[1] - 1
    lengths, starts = np.array([(end - start, start) for end in range(1, grains + 1) for start in range(end)]).T
    slices = np.concatenate([each[:, lengths, starts] for each in times], axis=1)
    each_most = int(_LIMITS ** (1 / len(slices)))
    distinct = [_thinned(np.unique(of_one), each_most) for of_one in slices]
    limits = np.stack(np.meshgrid(*distinct, indexing="ij"), axis=-1).reshape(-1, len(distinct))
    limits = limits[limits.sum(axis=1).argsort(kind="stable")]
    return np.array_split(limits, -(-len(limits) // _AT_ONCE))


def _thinned(values: Seconds, most: int) -> Seconds:
    """At most `most` of the ascending values, evenly chosen. The smallest and the largest are among them."""
    if len(values) <= most:
        return values
    kept: Seconds = values[np.linspace(0, len(values) - 1, most).round().astype(int)]
    return kept


@dataclass(frozen=True, slots=True)
class _Program:
    """Solutions of the dynamic program, one for each limit.

    Attributes:
        totals: (limits,) the least summed work of the round; infinite if no slices are within the limit.
        last: for each size of a micro-batch (limits, grains + 1): the length of the last slice, if the first
            0, 1, ... grains of a sample are cut best.
        sizes: (samples + 1, limits) the size of the last micro-batch, if 0, 1, ... samples are cut best.
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
        """The micro-batches of the best round within limit `number`, the smallest first."""
        sizes, left = [], len(self.sizes) - 1
        while left:
            sizes.append(int(self.sizes[left, number]))
            left -= sizes[-1]
        made = {size: MicroBatchSlices(size, _lengths(self.last[size][number])) for size in set(sizes)}
        return tuple(made[size] for size in sorted(sizes))


def _least_sums(work: Seconds, times: Seconds, limits: Seconds) -> tuple[Seconds, NDArray[np.int64]]:
    """For each limit, the least sum of work of a sample, and the lengths of the last slices (`_Program.last`)."""
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
