"""Predicts a step of a cut by simulating the schedule's lists: its seconds, its idle share and the bytes of a worker.

The chunks that a worker keeps in flight decide its memory. Only a part of a long round over many spans is simulated,
and the rest is assumed to continue at the same pace. Results are kept, because layouts with the same number of stages
share cuts and micro-batch sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from pipetransformer.freeze.boundary import first_trainable
from pipetransformer.schedules import (
    Ahead,
    Asynchronous,
    RoundCosts,
    RoundGraph,
    RoundSeconds,
    RoundShape,
    Schedule,
    ScheduleError,
    lists_of,
)

from .costs import UnitCost, training_seconds

#: A round is simulated as a whole if its chunks times its spans are at most this.
_WHOLE = 256
#: A longer round has a constant pace after this many chunks for each worker.
_PACE = 3


class _Sums:
    """Sums over contiguous units."""

    def __init__(self, values: Sequence[float]) -> None:
        self._upto = [0.0, *accumulate(values)]

    def over(self, spans: Sequence[range]) -> tuple[float, ...]:
        return tuple(self._upto[span.stop] - self._upto[span.start] for span in spans)


class UnitWork:
    """What one micro-batch costs in each unit, for one micro-batch size and one boundary.

    Attributes:
        boundary: number of frozen layers.
        miss_share: share of the frozen forwards that the first worker computes, because its cache lacks their outputs.
        first_trainable: the first unit that trains.
        seconds: seconds of each unit's forward and backward, if all frozen forwards are computed.
        cached_seconds: the same, but frozen forwards count only their share `miss_share`.
        active_seconds: the same without frozen forwards.
        saved_bytes: bytes that each unit keeps for the backward.
    """

    def __init__(
        self,
        units: Sequence[UnitCost],
        boundary: int,
        *,
        miss_share: float,
        message_seconds: float,
        action_seconds: float,
        recompute: bool,
    ) -> None:
        """
        Args:
            units: costs of the units at the micro-batch size.
            boundary: number of frozen layers.
            miss_share: share of the frozen forwards that the first worker computes.
            message_seconds: seconds to send an activation or a gradient from one worker to another.
            action_seconds: seconds that each computation takes in addition to those of its units.
            recompute: whether units run their forward again for their backward. Then the first half of a backward does
                the work of both, because each half would repeat the forward.
        """
        self.boundary, self.miss_share = boundary, miss_share
        self.first_trainable = first_trainable(boundary)
        forward, backward = training_seconds(units, boundary)
        cached, _ = training_seconds(units, boundary, miss_share)
        self.seconds = [f + b for f, b in zip(forward, backward, strict=True)]
        self.cached_seconds = [f + b for f, b in zip(cached, backward, strict=True)]
        self.active_seconds = [0.0] * self.first_trainable + self.seconds[self.first_trainable :]
        self._prefix = tuple(cached[: self.first_trainable])
        trains = [unit >= self.first_trainable for unit in range(len(units))]
        self.saved_bytes = [unit.saved_bytes * active for unit, active in zip(units, trains, strict=True)]
        self._forward, self._cached, self._backward = _Sums(forward), _Sums(cached), _Sums(backward)
        weights = [0.0 if recompute else unit.weights_backward for unit in units]
        self._weights = _Sums([seconds * active for seconds, active in zip(weights, trains, strict=True)])
        self._saved = _Sums(self.saved_bytes)
        self._message, self._action = message_seconds, action_seconds

    def of_spans(self, owners: tuple[int, ...], spans: Sequence[range], holders: int = 0) -> "SpanWork":
        """What a micro-batch costs in each span. The first span does not compute the samples that its cache has.

        Args:
            owners: worker of each span.
            spans: units of each span, in the order of the model.
            holders: number of workers that run frozen forwards one round ahead; 0 if the spans run them.
        """
        first = range(self.first_trainable, spans[0].stop) if holders else spans[0]
        return SpanWork(
            owners,
            sum(span.stop <= self.first_trainable for span in spans),
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
        weights: the part of `backward` that the second half of a backward takes.
        saved: bytes that each span keeps for a backward.
        message: seconds to send an activation or a gradient from one worker to another.
        action: seconds that each computation takes in addition to those of its units.
        prefix: seconds of each frozen unit whose forwards run one round ahead.
        holders: number of workers that run these forwards: the first workers of the pipeline.
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
        """The schedule that runs `prefix` one round ahead, in the idle time of `inner`, which orders the spans."""
        forward, backward = (tuple(one + self.action for one in each) for each in (self.forward, self.backward))
        return Ahead(inner, RoundSeconds(forward, backward, self.prefix), tuple(range(self.holders)))

    def bound(self, *, halves: bool) -> "Bound":
        """A lower bound of a round's seconds under any schedule. It is the largest of these times:

        - For each worker: a chunk has to reach its first span, then it computes all chunks on all its spans. If
          backwards are whole, the backwards of the spans before follow its last one.
        - One chunk passes all spans forward and backward.
        - If workers run frozen forwards one round ahead: the work of these workers, shared evenly.

        Args:
            halves: whether the schedule may compute the two halves of a backward at different times.
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
            if lowest is None:  # after its last forward, that chunk still has the rest of its way
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
    """A lower bound of a round's seconds, by the number of micro-batches: the largest of some lines.

    Attributes:
        lines: (seconds at 0 micro-batches, seconds for each micro-batch) of each line.
    """

    lines: Sequence[tuple[float, float]]

    def at(self, micro_batches: int) -> float:
        """The least seconds of a round with this number of micro-batches."""
        return max(constant + slope * micro_batches for constant, slope in self.lines)


class Step:
    """The work of a pipeline in a step, before it is cut into spans.

    Attributes:
        units: what a micro-batch costs in each unit.
        micro_batches: number of micro-batches (M).
        state_bytes: bytes of each unit, without the activations that it keeps for backwards.
        off_units: the first `off_units` units are in host memory, on the first span's worker and where they are copies.
        prefix_bytes: bytes of each unit on the first span's worker and as a copy: `state_bytes`, or 0 for units in host
            memory.
        brought_bytes: bytes of the largest unit in host memory. It comes to the device for its forward if the cache
            lacks a sample.
        made_bytes: most bytes that outputs computed ahead take on the first worker.
    """

    def __init__(
        self,
        units: UnitWork,
        micro_batches: int,
        state_bytes: Sequence[float],
        reduction_seconds: Sequence[float],
        made_bytes: float,
        off_units: int,
        steps_per_round: int,
    ) -> None:
        """
        Args:
            units: what a micro-batch costs in each unit.
            micro_batches: number of micro-batches (M).
            state_bytes: bytes of each unit, without the activations that it keeps for backwards.
            reduction_seconds: seconds to sum each unit's gradients over the pipelines.
            made_bytes: most bytes that outputs computed ahead take on the first worker.
            off_units: number of leading units in host memory (see the class).
            steps_per_round: steps of a round, if the schedule is asynchronous.
        """
        self.units, self.micro_batches, self.state_bytes = units, micro_batches, state_bytes
        self.made_bytes, self.off_units, self._steps_per_round = made_bytes, off_units, steps_per_round
        self.prefix_bytes = [0.0] * off_units + [*state_bytes[off_units:]]
        self.brought_bytes = max(state_bytes[:off_units], default=0.0)
        self._state, self._prefix_state = _Sums(state_bytes), _Sums(self.prefix_bytes)
        self._reduction = _Sums(reduction_seconds)

    def steps_of(self, schedule: Schedule) -> int:
        """Number of steps in a round of this schedule: more than 1 only for an asynchronous schedule."""
        return self._steps_per_round if isinstance(schedule, Asynchronous) else 1

    def predict(
        self, schedule: Schedule, owners: tuple[int, ...], spans: Sequence[range], holders: int = 0
    ) -> "Predicted":
        """Predict the step by simulation.

        The reduction of a worker's gradients overlaps with its last backward. Only the rest of the reduction is added
        to the worker's time.

        Args:
            schedule: orders the computations of the round.
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
            copies = sum(self.prefix_bytes[: self.units.first_trainable]) + self.brought_bytes
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
    """A predicted step.

    Attributes:
        seconds: seconds of the step.
        idle_share: share of the step that workers do not compute, as a mean over the workers.
        bytes_by_worker: most bytes of each worker at one time: its units, and the activations kept for backwards.
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
    """The most chunks that each worker keeps at one time, if each worker has one span and all spans train."""
    none = (0.0,) * workers
    work = SpanWork(tuple(range(workers)), 0, none, none, none, (1.0,) * workers)
    return tuple(map(round, _play(schedule, micro_batches, work).bytes))


@dataclass(frozen=True, slots=True)
class _Played:
    """A simulated round, by worker.

    Attributes:
        ends: seconds from the round's start to the end of the worker's last computation.
        busy: seconds of the worker's computations.
        bytes: most bytes that the worker keeps for backwards at one time.
    """

    ends: tuple[float, ...]
    busy: tuple[float, ...]
    bytes: tuple[float, ...]

    def after(self, earlier: "_Played", times: float) -> "_Played":
        """A longer round: this one plus `times` its difference to a shorter round, `earlier`."""

        def grown(now: Sequence[float], before: Sequence[float]) -> tuple[float, ...]:
            return tuple(a + times * (a - b) for a, b in zip(now, before, strict=True))

        return _Played(grown(self.ends, earlier.ends), grown(self.busy, earlier.busy), grown(self.bytes, earlier.bytes))


def _play(schedule: Schedule, chunks: int, work: SpanWork) -> _Played:
    """Simulate a round. For a long one simulate two rounds of K, 2 K or 3 K chunks, and assume that it continues at the
    same pace. If the schedule cannot run these, simulate the whole round."""
    workers = max(work.owners) + 1
    if chunks <= workers or chunks * len(work.owners) <= _WHOLE:
        return _simulated(schedule, chunks, work)
    short = workers * min((chunks - 1) // workers, _PACE - 1)
    try:
        first, second = (_simulated(schedule, some, work) for some in (short, short + workers))
    except ScheduleError:
        return _simulated(schedule, chunks, work)
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
    found = _graph(schedule, shape).simulate(costs, times=False)
    return _Played(found.ends, found.busy, found.peak_bytes)


@lru_cache(maxsize=64)
def _graph(schedule: Schedule, shape: RoundShape) -> RoundGraph:
    return RoundGraph.of(lists_of(schedule, shape), shape)
