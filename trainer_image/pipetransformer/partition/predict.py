"""Predicts a step of a cut: its seconds and idle share by simulating the schedule's lists, and the bytes of a worker.

What a list keeps in flight decides the memory. Of a long round over many spans only shorter ones are simulated, and the
rest is taken to go on at the same pace. Results are kept, because layouts of the same number of stages share cuts and
micro-batch sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from pipetransformer.schedules import Ahead, Asynchronous, Program, RoundCosts, RoundSeconds, RoundShape, Schedule

from .costs import UnitCost, training_seconds

#: Chunks times spans up to which a round is simulated as a whole.
_WHOLE = 256
#: Chunks for each worker after which a longer round has found its pace.
_PACE = 3


class _Sums:
    """Sums over contiguous units."""

    def __init__(self, values: Sequence[float]) -> None:
        self._upto = [0.0, *accumulate(values)]

    def over(self, spans: Sequence[range]) -> tuple[float, ...]:
        return tuple(self._upto[span.stop] - self._upto[span.start] for span in spans)


class UnitWork:
    """What the units cost for one micro-batch size and one boundary.

    Attributes:
        first_active: the first unit that trains.
        seconds: seconds of each unit in a round, forward and backward, if all frozen forwards are computed.
        cached_seconds: the same with the share of frozen forwards that the cache does not save.
        active_seconds: the same without frozen forwards.
        saved_bytes: bytes that each unit keeps for the backward of a micro-batch.
    """

    def __init__(
        self,
        units: Sequence[UnitCost],
        boundary: int,
        *,
        miss_share: float = 1.0,
        message_seconds: float = 0.0,
        action_seconds: float = 0.0,
    ) -> None:
        """
        Args:
            units: costs of the units at the size.
            boundary: number of frozen layers.
            miss_share: share of the samples that the cache of the first worker does not have.
            message_seconds: seconds of an activation or a gradient between two workers.
            action_seconds: seconds that any computation takes in addition to its units.
        """
        self.boundary, self.miss_share = boundary, miss_share
        self.first_active = boundary + 1 if boundary else 0
        forward, backward = training_seconds(units, boundary)
        cached, _ = training_seconds(units, boundary, miss_share)
        self.seconds = [f + b for f, b in zip(forward, backward, strict=True)]
        self.cached_seconds = [f + b for f, b in zip(cached, backward, strict=True)]
        self.active_seconds = [0.0] * self.first_active + self.seconds[self.first_active :]
        self._prefix = tuple(cached[: self.first_active])
        trains = [unit >= self.first_active for unit in range(len(units))]
        self.saved_bytes = [unit.saved_bytes * active for unit, active in zip(units, trains, strict=True)]
        self._forward, self._cached, self._backward = _Sums(forward), _Sums(cached), _Sums(backward)
        self._weights = _Sums([unit.weights_backward * active for unit, active in zip(units, trains, strict=True)])
        self._saved = _Sums(self.saved_bytes)
        self._message, self._action = message_seconds, action_seconds

    def of_spans(self, owners: tuple[int, ...], spans: Sequence[range], holders: int = 0) -> "SpanWork":
        """What spans cost. The first one does not compute what its cache has.

        Args:
            owners: worker of each span.
            spans: units of each span, in the order of the model.
            holders: number of workers that run frozen forwards one round ahead; 0 if the spans run them.
        """
        first = range(self.first_active, spans[0].stop) if holders else spans[0]
        return SpanWork(
            owners,
            sum(span.stop <= self.first_active for span in spans),
            self._cached.over([first]) + self._forward.over(spans[1:]),
            self._backward.over(spans),
            self._weights.over(spans),
            self._saved.over(spans),
            self._message,
            self._action,
            self._prefix if holders else (),
            holders,
        )


@dataclass(frozen=True, slots=True)
class SpanWork:
    """What a micro-batch costs in each span.

    Attributes:
        owners: worker of each span.
        first_trained: number of leading spans that train nothing.
        forward: seconds of each span's forward.
        backward: seconds of each span's backward.
        weights: the part of `backward` that makes the gradients of weights.
        saved: bytes that each span keeps for a backward.
        message: seconds of an activation or a gradient between two workers.
        action: seconds that any computation takes in addition to its units.
        prefix: seconds of each frozen unit whose forwards run one round ahead.
        holders: number of workers that run them, the first ones.
    """

    owners: tuple[int, ...]
    first_trained: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weights: tuple[float, ...]
    saved: tuple[float, ...]
    message: float = 0.0
    action: float = 0.0
    prefix: tuple[float, ...] = ()
    holders: int = 0

    def ahead(self, inner: Schedule) -> Ahead:
        """Runs `prefix` one round ahead, in the idle time of a schedule over the spans."""
        forward, backward = (tuple(one + self.action for one in each) for each in (self.forward, self.backward))
        return Ahead(inner, RoundSeconds(forward, backward, self.prefix), tuple(range(self.holders)))

    def bound(self, *, halves: bool) -> "Bound":
        """A lower bound of a round's seconds under any schedule.

        A worker can start once a chunk has reached its first span, and computes all chunks on all its spans. If
        backwards are whole, its last one is followed by those of the spans before. The way of one chunk there and back
        is a bound, too. Forwards one round ahead share the workers' time with the rest.

        Args:
            halves: whether the schedule may compute the two halves of a backward apart.
        """
        spans = range(len(self.owners))
        trained = range(self.first_trained, len(self.owners))
        forward = [seconds + self.action for seconds in self.forward]
        backward = [self.backward[span] + self.action if span in trained else 0.0 for span in spans]
        links = [self.message if one != other else 0.0 for one, other in pairwise(self.owners)]
        back = [
            backward[span] - (self.weights[span] if halves and span > self.first_trained else 0.0) for span in spans
        ]
        heads = [0.0, *accumulate(one + link for one, link in zip(forward, links, strict=False))]
        links_back = [link if span in trained else 0.0 for span, link in enumerate(links)]
        tails = [0.0, *accumulate(one + link for one, link in zip(back, links_back, strict=False))]
        way = heads[-1] + forward[-1] + tails[-1] + back[-1]
        lines = [(way, 0.0)]
        for worker in range(max(self.owners) + 1):
            own = [span for span in spans if self.owners[span] == worker]
            lowest = next((span for span in own if span in trained), None)
            tail = 0.0
            if lowest is None:  # its last forward is followed by the rest of that chunk's way
                tail = way - heads[own[-1]] - forward[own[-1]]
            elif not halves:
                tail = tails[lowest]
            lines.append((heads[own[0]] + tail, sum(forward[span] + backward[span] for span in own)))
        if self.holders:
            helping = [span for span in spans if self.owners[span] < self.holders]
            work = sum(forward[span] + backward[span] for span in helping) + sum(self.prefix)
            lines.append((0.0, work / self.holders))
        return Bound(lines)


@dataclass(frozen=True, slots=True)
class Bound:
    """The largest of some lines over the number of micro-batches: (constant, slope)."""

    lines: Sequence[tuple[float, float]]

    def at(self, micro_batches: int) -> float:
        """Seconds of a round of that many micro-batches, at least."""
        return max(constant + slope * micro_batches for constant, slope in self.lines)


class Step:
    """A step of a pipeline, apart from how it is cut.

    Attributes:
        units: what the units cost.
        micro_batches: number of micro-batches (M).
        state_bytes: bytes of each unit without what it keeps for backwards.
        off_units: number of leading units that a first span, or a copy of it, keeps off the device.
        prefix_bytes: as `state_bytes`, of units of the first span and of copies. Those off the device take nothing.
        brought_bytes: bytes of the largest unit that is off the device. It comes back for a moment when the cache lacks
            a sample.
        made_bytes: most bytes of what frozen units have made ahead, on the first worker.
    """

    def __init__(
        self,
        units: UnitWork,
        micro_batches: int,
        state_bytes: Sequence[float],
        reduction_seconds: Sequence[float],
        made_bytes: float = 0.0,
        off_units: int = 0,
        steps_per_round: int = 1,
    ) -> None:
        """
        Args:
            units: what the units cost.
            micro_batches: number of micro-batches (M).
            state_bytes: bytes of each unit without what it keeps for backwards.
            reduction_seconds: seconds to sum each unit's gradients over the pipelines.
            made_bytes: most bytes of what frozen units have made ahead, on the first worker.
            off_units: number of leading units that a first span, or a copy of it, keeps off the device.
            steps_per_round: steps until an asynchronous schedule empties the pipeline.
        """
        self.units, self.micro_batches, self.state_bytes = units, micro_batches, state_bytes
        self.made_bytes, self.off_units, self._steps_per_round = made_bytes, off_units, steps_per_round
        self.prefix_bytes = [0.0] * off_units + [*state_bytes[off_units:]]
        self.brought_bytes = max(state_bytes[:off_units], default=0.0)
        self._state, self._prefix_state = _Sums(state_bytes), _Sums(self.prefix_bytes)
        self._reduction = _Sums(reduction_seconds)

    def steps_of(self, schedule: Schedule) -> int:
        """Steps of a round."""
        return self._steps_per_round if isinstance(schedule, Asynchronous) else 1

    def predict(
        self, schedule: Schedule, owners: tuple[int, ...], spans: Sequence[range], holders: int = 0
    ) -> "Predicted":
        """Predict the step by simulation.

        The reduction of a worker's gradients overlaps with its last backward. What remains is added to the worker's
        time.

        Args:
            schedule: orders the round.
            owners: worker of each span.
            spans: units of each span, in the order of the model.
            holders: number of workers that run frozen forwards one round ahead; 0 if the spans run them.

        Raises:
            ScheduleError: the schedule cannot run this many micro-batches over these spans.
        """
        work = self.units.of_spans(owners, spans, holders)
        steps = self.steps_of(schedule)
        played = _play(schedule, self.micro_batches * steps, work)
        workers = max(owners) + 1
        state, reductions, backwards = ([0.0] * workers for _ in range(3))
        held_by_span = self._prefix_state.over(spans[:1]) + self._state.over(spans[1:])
        of_spans = (held_by_span, self._reduction.over(spans), work.backward)
        for owner, held, reduction, backward in zip(owners, *of_spans, strict=True):
            state[owner] += held
            reductions[owner] += reduction
            backwards[owner] += backward
        state[owners[0]] += self.brought_bytes
        if holders:
            copies = sum(self.prefix_bytes[: self.units.first_active]) + self.brought_bytes
            state = [held + copies * (0 < worker < holders) for worker, held in enumerate(state)]
            state[owners[0]] += self.made_bytes
        seconds = max(
            end / steps + max(0.0, reduction - backward)
            for end, reduction, backward in zip(played.ends, reductions, backwards, strict=True)
        )
        idle = 1 - sum(played.busy) / steps / workers / seconds if seconds else 0.0
        held_bytes = tuple(round(kept + own) for kept, own in zip(played.bytes, state, strict=True))
        return Predicted(seconds, max(0.0, idle), held_bytes)


@dataclass(frozen=True, slots=True)
class Predicted:
    """A step.

    Attributes:
        seconds: of the step.
        idle_share: share of it in which workers compute nothing.
        bytes_by_worker: most bytes of each worker: its units, and what they keep for backwards.
    """

    seconds: float
    idle_share: float
    bytes_by_worker: tuple[int, ...]

    @property
    def bytes_per_worker(self) -> int:
        """Bytes of the worker that holds the most."""
        return max(self.bytes_by_worker)


@lru_cache(maxsize=128)
def peak_chunks(schedule: Schedule, workers: int, micro_batches: int) -> tuple[int, ...]:
    """The largest number of chunks that each worker keeps, if each has one span and all of them train."""
    none = (0.0,) * workers
    work = SpanWork(tuple(range(workers)), 0, none, none, none, (1.0,) * workers)
    return tuple(map(round, _play(schedule, micro_batches, work).bytes))


@dataclass(frozen=True, slots=True)
class _Played:
    """When each worker ended, how long it computed, and the most bytes that it kept for backwards."""

    ends: tuple[float, ...]
    busy: tuple[float, ...]
    bytes: tuple[float, ...]

    def after(self, earlier: "_Played", times: float) -> "_Played":
        """This round with `times` the difference to a shorter round added."""

        def grown(now: Sequence[float], before: Sequence[float]) -> tuple[float, ...]:
            return tuple(a + times * (a - b) for a, b in zip(now, before, strict=True))

        return _Played(grown(self.ends, earlier.ends), grown(self.busy, earlier.busy), grown(self.bytes, earlier.bytes))


def _play(schedule: Schedule, chunks: int, work: SpanWork) -> _Played:
    """Simulate a round; of a long one, two rounds of K, 2 K or 3 K chunks, and go on at the same pace."""
    workers = max(work.owners) + 1
    if chunks <= workers or chunks * len(work.owners) <= _WHOLE:
        return _simulated(schedule, chunks, work)
    short = workers * min((chunks - 1) // workers, _PACE - 1)
    first, second = (_simulated(schedule, some, work) for some in (short, short + workers))
    return second.after(first, (chunks - short - workers) / workers)


@lru_cache(maxsize=4096)
def _simulated(schedule: Schedule, chunks: int, work: SpanWork) -> _Played:
    costs = RoundCosts.by_span(
        work.forward,
        work.backward,
        work.weights,
        message_seconds=work.message,
        action_seconds=work.action,
        saved_bytes=work.saved,
        prefix=work.prefix,
    )
    shape = RoundShape(work.owners, chunks, work.first_trained)
    if work.holders:
        schedule = work.ahead(schedule)
        shape = replace(shape, prefix_units=len(work.prefix), prefix_made=True, next_chunks=chunks)
    found = _program(schedule, shape).play(costs, times=False)
    return _Played(found.ends, found.busy, found.peak_bytes)


@lru_cache(maxsize=64)
def _program(schedule: Schedule, shape: RoundShape) -> Program:
    return Program.of(schedule.actions(shape), shape)
