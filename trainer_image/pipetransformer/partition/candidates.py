"""Finds the fastest way to run one layout that fits the memory: a schedule, a cut and a micro-batch size.

BaPipe (arXiv 2012.12544) explores the schedule together with the partition and the micro-batches. Here each candidate
has a cut whose slowest stage is as fast as possible, or whose workers have about as much to do. It is simulated only
if its lower bound is below the best time so far.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from pipetransformer.schedules import RoundShape, Schedule, ScheduleError, fit, lists_of
from pipetransformer_contract.spec import ScheduleName

from .contiguous import MemoryBound, MemoryBoundError
from .cut import Cut
from .predict import Bound, Predicted, Step, UnitWork, peak_chunks
from .spans import cut_units, cuts_by_worker

#: At most this many candidates of a layout are simulated. If none of them fits the memory, more are.
_MOST_SIMULATED = 12
#: Times count as equal if they differ by at most this share.
_EQUAL = 1e-9
#: Schedules that compute the two halves of a backward (for the input, for the weights) at different times.
IN_HALVES = frozenset({ScheduleName.ZERO_BUBBLE, ScheduleName.ZERO_BUBBLE_V})


@dataclass(frozen=True, slots=True)
class Option:
    """A schedule with a number of spans for each worker (V)."""

    schedule: ScheduleName
    spans_per_worker: int = 1


ONE_FORWARD_ONE_BACKWARD = Option(ScheduleName.ONE_FORWARD_ONE_BACKWARD)
#: The options of `schedule: Auto`, the simplest first. Asynchronous schedules are left out, because they change losses.
AUTO = (
    ONE_FORWARD_ONE_BACKWARD,
    Option(ScheduleName.GPIPE),
    Option(ScheduleName.ZERO_BUBBLE),
    Option(ScheduleName.INTERLEAVED, 2),
    Option(ScheduleName.ZERO_BUBBLE, 2),
    Option(ScheduleName.ZERO_BUBBLE_V, 2),
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a layout.

    Attributes:
        option: the schedule, and the spans of each worker.
        micro_batches: number of micro-batches (M).
        cut: the spans of the layout; None if the layout cannot be cut for this option.
        together: whether all frozen layers are in the first span, whose cache can save their forwards. Otherwise they
            may be spread over the stages.
        holders: the first `holders` workers of a pipeline run frozen forwards one round ahead; 0 if frozen forwards
            run in place.
        least_seconds: lower bound of the seconds of a step.
        predicted: the simulated step; None if it was not simulated.
        why_not: why this candidate was not chosen; empty for the choice.
    """

    option: Option
    micro_batches: int
    cut: Cut | None = None
    together: bool = False
    holders: int = 0
    least_seconds: float = 0.0
    predicted: Predicted | None = None
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Kept:
    """The spans of a cut, and a lower bound for the seconds of rounds over them."""

    spans: list[range]
    bound: Bound


@dataclass(frozen=True, slots=True)
class _Prefix:
    """Where frozen layers are and when they run.

    Attributes:
        together: whether all are in the first span, so that its cache or forwards one round ahead can save time.
            Otherwise they may be spread over the stages.
        holders: the first `holders` workers run them one round ahead; 0 if they run in place.
    """

    together: bool = False
    holders: int = 0


@dataclass(frozen=True)
class Search:
    """The search for the best candidate in one layout.

    Attributes:
        stages: workers of a pipeline (K).
        steps: the work of a step, by micro-batch size.
        schedules: the schedule of each option.
        limit: bytes that a worker may use; None if unknown.
        in_place: whether frozen forwards may run in place.
        ahead: whether frozen forwards may run one round ahead. Then layers are frozen, and there are several stages.
        copies_limit: if `limit` is None, bytes that a worker with copies of frozen layers may use; None if unknown.
        by_worker: whether to try cuts by the work of each worker, too, where workers have several spans.
        kept: cuts that searches with the same costs have found, by everything that they depend on.
    """

    stages: int
    steps: Mapping[int, Step]
    schedules: Mapping[Option, Schedule]
    limit: int | None = None
    in_place: bool = True
    ahead: bool = False
    copies_limit: int | None = None
    by_worker: bool = False
    kept: dict[object, list[Kept]] = field(default_factory=dict)

    def best_first(self, options: Sequence[Option]) -> list[Candidate]:
        """All candidates: the choice, then the other simulated ones from the fastest to the slowest, then the rest.

        The choice is the fastest one. Among equally fast ones it has the fewest bytes, then the simplest schedule.

        Args:
            options: the schedules to choose from, the simplest first.

        Raises:
            MemoryBoundError: no candidate fits the memory.
            ScheduleError: the layout can run none of the schedules.
            ValueError: there are fewer layers than stages.
        """
        errors: list[MemoryBoundError] = []
        made = [one for option in options for size in self.steps for one in self._candidates(option, size, errors)]
        refused = [one for one in made if one.why_not]
        possible = sorted((one for one in made if not one.why_not), key=lambda one: one.least_seconds)
        if len(possible) == 1 and self._surely_runs(possible[0]):
            return possible + refused
        fitting: list[Candidate] = []
        unlikely: list[Candidate] = []
        best = math.inf
        for number, candidate in enumerate(possible):
            if fitting and candidate.least_seconds > best * (1 + _EQUAL):
                unlikely.append(replace(candidate, why_not=f"at least {_slower(candidate.least_seconds, best)}"))
            elif fitting and number >= _MOST_SIMULATED:
                unlikely.append(replace(candidate, why_not=f"{_MOST_SIMULATED} others had lower bounds"))
            elif (found := self._simulated(candidate, errors)).why_not:
                refused.append(found)
            else:
                fitting.append(found)
                best = min(best, _seconds(found))
        if fitting:
            return _ranked(fitting, options, best) + unlikely + refused
        if errors:
            raise min(errors, key=lambda error: error.needed)
        raise ScheduleError(refused[0].why_not)

    def _surely_runs(self, candidate: Candidate) -> bool:
        """Whether a candidate needs no simulation: its cut surely fits the memory, and its schedule runs any round."""
        option = candidate.option
        within = self.limit is None or option.spans_per_worker == 1
        return within and not candidate.holders and option.schedule is not ScheduleName.SCRIPT

    def _candidates(self, option: Option, size: int, errors: list[MemoryBoundError]) -> Iterator[Candidate]:
        """The candidates of one option at one micro-batch size: one for each cut with each `_Prefix`. Appends to
        `errors` why candidates do not fit the memory."""
        step = self.steps[size]
        candidate = Candidate(option, step.micro_batches)
        num_layers = len(step.state_bytes) - 2
        try:
            fitted = fit(
                option.schedule, self.stages, option.spans_per_worker, step.micro_batches, num_layers,
                script_schedule=self.schedules[option],
            )  # fmt: skip
        except ScheduleError as error:
            yield replace(candidate, why_not=str(error))
            return
        if fitted.reason:
            yield replace(candidate, why_not=fitted.reason)
            return
        prefixes = list(self._prefixes(step.units, num_layers - len(fitted.owners)))
        if not prefixes:
            spans = len(fitted.owners)
            why_not = f"frozen forwards run ahead only if each of {spans} spans has a layer that trains"
            yield replace(candidate, why_not=why_not)
        for prefix in prefixes:
            found = replace(candidate, together=prefix.together, holders=prefix.holders)
            try:
                cuts = self._cuts(option, size, fitted.owners, prefix)
            except MemoryBoundError as error:
                errors.append(error)
                yield replace(found, why_not=str(error))
                continue
            except ScheduleError as error:
                yield replace(found, why_not=str(error))
                continue
            steps = step.steps_of(self.schedules[option])
            for each in cuts:
                cut = Cut(each.spans, size, fitted.owners, option.schedule)
                least = each.bound.at(step.micro_batches * steps) / steps
                if prefix.holders:
                    cut = replace(cut, ahead_units=step.units.first_trainable, holders=tuple(range(prefix.holders)))
                yield replace(found, cut=cut, least_seconds=least)

    def _prefixes(self, units: UnitWork, spare_layers: int) -> Iterator[_Prefix]:
        """The ways to place the frozen layers, if there are `spare_layers` more layers than spans.

        With a cache, the first span may hold only frozen layers. If these run ahead, it also needs a layer that trains.
        """
        if self.in_place:
            yield _Prefix()
        if self.in_place and 0 < units.boundary <= spare_layers + 1 and units.miss_share < 1:
            yield _Prefix(together=True)
        if self.ahead and units.boundary <= spare_layers:
            yield _Prefix(together=True, holders=self.stages)
            yield _Prefix(together=True, holders=1)

    def _cuts(self, option: Option, size: int, owners: tuple[int, ...], prefix: _Prefix) -> list[Kept]:
        """Cuts that may be the fastest. With one span a worker it is the one whose slowest span is as fast as possible,
        within the memory. With several spans the memory of these cuts is not known before they are simulated.

        Raises:
            MemoryBoundError: no cut fits.
            ScheduleError: the schedule cannot run this many micro-batches.
        """
        step = self.steps[size]
        units = step.units
        peaks: tuple[int, ...] = ()
        if self.limit is not None and len(owners) == self.stages:
            schedule = self.schedules[option]
            chunks = step.micro_batches * step.steps_of(schedule)
            peaks = _not_rising(peak_chunks(schedule, self.stages, chunks))
        halves = option.schedule in IN_HALVES
        made_bytes = step.made_bytes if peaks and prefix.holders else 0.0  # depends on the number of pipelines
        key = (size, owners, halves, units.boundary, units.miss_share, step.off_units, prefix, peaks, made_bytes)
        if key not in self.kept:
            seconds = units.cached_seconds if prefix.together else units.seconds
            seconds = units.active_seconds if prefix.holders else seconds
            together = 1 if not prefix.together else units.first_trainable if prefix.holders else units.boundary
            if self.by_worker and len(owners) > self.stages:
                cuts = cuts_by_worker(seconds, owners, together)
            else:
                cuts = [cut_units(seconds, len(owners), self._memory(step, peaks, prefix) if peaks else None, together)]
            self.kept[key] = [
                Kept(spans, units.of_spans(owners, spans, prefix.holders).bound(halves=halves)) for spans in cuts
            ]
        return self.kept[key]

    def _memory(self, step: Step, peaks: Sequence[int], prefix: _Prefix) -> MemoryBound:
        """The bytes that each unit needs in each stage, with one span a worker.

        If all workers hold the frozen units, the bytes of these units count as `held` instead.

        Args:
            step: the work of a step.
            peaks: chunks that each stage keeps at one time.
            prefix: where frozen layers are.
        """
        assert self.limit is not None
        copied = step.units.first_trainable if prefix.holders > 1 else 0
        held_by_all = sum(step.prefix_bytes[:copied]) + (step.brought_bytes if copied else 0.0)
        needs = []
        for stage, chunks in enumerate(peaks):
            state = step.state_bytes if stage else step.prefix_bytes
            each = zip([0.0] * copied + [*state[copied:]], step.units.saved_bytes, strict=True)
            needs.append([held + chunks * saved for held, saved in each])
        # The embedding is always on the first worker.
        needs[0][0] += (step.made_bytes if prefix.holders else 0.0) + (0.0 if copied else step.brought_bytes)
        return MemoryBound(needs, self.limit, held_by_all)

    def _simulated(self, candidate: Candidate, errors: list[MemoryBoundError]) -> Candidate:
        """Simulate a candidate. Return it with `why_not` if it does not fit the memory or its schedule cannot run.
        Appends to `errors` why it does not fit."""
        cut = candidate.cut
        assert cut is not None
        schedule, step = self.schedules[candidate.option], self.steps[cut.micro_batch_size]
        try:
            if cut.schedule is ScheduleName.SCRIPT:  # a prediction may simulate only shorter rounds than this one
                lists_of(schedule, RoundShape(cut.owners, step.micro_batches))
            found = step.predict(schedule, cut.owners, cut.spans, candidate.holders)
        except ScheduleError as error:
            return replace(candidate, why_not=str(error))
        limit = self.copies_limit if self.limit is None and candidate.holders > 1 else self.limit
        if limit is None or found.bytes_per_worker <= limit:
            return replace(candidate, predicted=found)
        stage = found.bytes_by_worker.index(found.bytes_per_worker)
        too_much = MemoryBoundError(self.stages, stage, cut.units_of(stage)[-1], found.bytes_per_worker, limit)
        errors.append(too_much)
        return replace(candidate, predicted=found, why_not=str(too_much))


def _not_rising(chunks: Sequence[int]) -> tuple[int, ...]:
    """The smallest numbers that are at least `chunks` and do not rise from a stage to the next (see `MemoryBound`)."""
    return tuple(accumulate(reversed(chunks), max))[::-1]


def _ranked(fitting: Sequence[Candidate], options: Sequence[Option], best: float) -> list[Candidate]:
    """The choice first, then the others from the fastest to the slowest, each with its `why_not`."""

    def rank(candidate: Candidate) -> tuple[bool, float, int, int]:
        assert candidate.predicted is not None
        seconds, needed = candidate.predicted.seconds, candidate.predicted.bytes_per_worker
        slower = seconds > best * (1 + _EQUAL)
        return slower, seconds if slower else best, needed, options.index(candidate.option)

    choice, *others = sorted(fitting, key=rank)
    return [choice, *(replace(one, why_not=_loss(one, choice)) for one in others)]


def _loss(candidate: Candidate, choice: Candidate) -> str:
    assert candidate.predicted is not None and choice.predicted is not None
    if candidate.predicted.seconds > choice.predicted.seconds * (1 + _EQUAL):
        return _slower(candidate.predicted.seconds, choice.predicted.seconds)
    if candidate.predicted.bytes_per_worker > choice.predicted.bytes_per_worker:
        return "as fast, but needs more memory"
    return "as fast, but not simpler"


def _slower(seconds: float, best: float) -> str:
    return f"{seconds / best - 1:.1%} slower" if best else "slower"


def _seconds(candidate: Candidate) -> float:
    assert candidate.predicted is not None
    return candidate.predicted.seconds
