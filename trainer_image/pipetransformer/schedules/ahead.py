"""Runs frozen forwards of the next round in the idle time of this round.

This is possible because the training of this round changes no frozen unit. Another schedule, the inner one, orders the
units that train. When a worker would wait, it runs frozen units of the next round's chunks. They cost no time if they
fit into the idle time of the inner schedule. No round can be shorter than `bound_seconds`; these lists come within a
few percent of it.
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .operations import Action, ActionKind, MessageKind, RoundShape, Schedule, ScheduleError, Value, input_of, output_of

#: Ways to fill gaps; `Ahead` tries each and takes the shortest round, because none is always best. The first number is
#: the share of a frozen unit's forward that a gap must have room for. With 0 a worker is never idle, but its input may
#: arrive while it still runs a frozen unit. With 1 a frozen unit delays no action. The second says whether a worker
#: takes a chunk of the next round only if it can still finish all its work within `bound_seconds`.
_WAYS = ((0.0, False), (1.0, False), (1.0, True))


@dataclass(frozen=True, slots=True)
class RoundSeconds:
    """Expected seconds of the computations of one chunk.

    Attributes:
        forward: seconds of one forward through the units that train, for each span.
        backward: seconds of one whole backward, for each span. Each half of a backward counts as half of them.
        prefix: seconds of one forward, for each frozen unit before span 0.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    prefix: tuple[float, ...]

    def of(self, action: Action) -> float:
        match action.kind:
            case ActionKind.FORWARD:
                return self.forward[action.span]
            case ActionKind.BACKWARD:
                return self.backward[action.span]
            case ActionKind.INPUT_GRADIENT | ActionKind.WEIGHT_GRADIENT:
                return self.backward[action.span] / 2
            case ActionKind.PREFIX:
                return sum(self.prefix[unit] for unit in action.units)
            case ActionKind.STEP:
                return 0.0


@dataclass(frozen=True, slots=True)
class Ahead:
    """Adds `PREFIX` actions to the lists of another schedule. It changes no number that the other schedule computes.

    One worker runs all frozen units of a chunk, so that only the output of the last unit is sent. `seconds` decides
    only the order of the actions. A wrong expectation makes a round slower, but never wrong.

    Attributes:
        inner: the schedule that orders the units that train.
        seconds: expected seconds of each computation.
        holders: the workers that hold the frozen units. The owner of span 0 must be among them.
    """

    inner: Schedule
    seconds: RoundSeconds
    holders: tuple[int, ...]

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        """The lists of a round.

        Unless `shape.prefix_made`, the chunks of this round also have `PREFIX` actions, before those of the next round.
        A shape without `prefix_units` gets the lists of the inner schedule.

        Raises:
            ScheduleError: the inner schedule cannot run the shape, or no `PREFIX` actions can be added to it.
        """
        return self._filled(shape).lists

    def bound_seconds(self, shape: RoundShape) -> float:
        """A lower bound of the seconds of a round, for any way to add `PREFIX` actions to the inner schedule.

        It is the larger of two times: the inner schedule alone, and all work shared evenly by the workers. It assumes
        that the round runs the frozen units of as many chunks as it trains, so it does not hold for the last round.
        """
        return self._bound_seconds(shape, self._inner_actions(shape))

    def _inner_actions(self, shape: RoundShape) -> Sequence[Sequence[Action]]:
        return self.inner.actions(_without_prefix(shape))

    def _bound_seconds(self, shape: RoundShape, inner: Sequence[Sequence[Action]]) -> float:
        work = _Work(self, _without_prefix(shape), inner)
        alone = _Filling(work)
        alone.fill()
        seconds = sum(one.seconds for computations in work.inner for one in computations)
        return max(alone.end, (seconds + shape.chunks * sum(self.seconds.prefix)) / shape.workers)

    def _filled(self, shape: RoundShape) -> "_Filling":
        if shape.prefix_units:
            self._check(shape)
        inner = self._inner_actions(shape)
        bound = self._bound_seconds(shape, inner)
        work = _Work(self, shape, inner)
        fillings = [_Filling(work, room, bound if within else math.inf) for room, within in _WAYS]
        for filling in fillings:
            filling.fill()
        return min(fillings, key=lambda filling: filling.end)

    def _check(self, shape: RoundShape) -> None:
        if shape.slices > 1:
            raise ScheduleError("frozen forwards can run ahead only for whole micro-batches, not for slices of tokens")
        if not shape.trains(0):
            raise ScheduleError("frozen forwards can run ahead only if the first span trains")
        if shape.owners[0] not in self.holders:
            raise ScheduleError("the worker of the first span does not hold the frozen units")


def _without_prefix(shape: RoundShape) -> RoundShape:
    return replace(shape, prefix_units=0, prefix_made=False, next_chunks=0)


@dataclass(frozen=True, slots=True)
class _Computation:
    """A computation of the inner schedule: its seconds, and the numbers of the values that it needs and gives, or
    -1 if there is none."""

    action: Action
    seconds: float
    needs: int
    gives: int


class _Work:
    """What the workers have to do in a round. Several ways to fill gaps share it.

    Attributes:
        inner: the computations of each worker in the inner schedule.
        prefix: seconds of one forward, for each frozen unit.
        holders: the workers that hold the frozen units.
        shape: the shape of the round.
        made_prefixes: the number of the value that each chunk's last frozen unit gives.
        num_values: how many values there are.
    """

    def __init__(self, ahead: Ahead, shape: RoundShape, inner: Sequence[Sequence[Action]]) -> None:
        numbers: dict[Value | None, int] = {None: -1}  # the first value gets 0

        def number(value: Value | None) -> int:
            return numbers.setdefault(value, len(numbers) - 1)

        seconds = ahead.seconds
        self.inner = [
            [
                _Computation(one, seconds.of(one), number(input_of(one, shape)), number(output_of(one, shape)))
                for one in own
            ]
            for own in inner
        ]
        self.prefix, self.holders, self.shape = seconds.prefix, frozenset(ahead.holders), shape
        self.made_prefixes = {chunk: number(Value(MessageKind.PREFIX, 0, chunk)) for chunk in shape.prefixes}
        self.num_values = len(numbers) - 1


@dataclass(slots=True)
class _PrefixRun:
    """Some frozen units that a worker computes for a chunk, without a break."""

    chunk: int
    start: int
    stop: int

    @property
    def action(self) -> Action:
        return Action(ActionKind.PREFIX, 0, self.chunk, range(self.start, self.stop))


class _Filling:
    """Plays the lists of the inner schedule in simulated time, and fills gaps with forwards of frozen units.

    The forward of a frozen unit for a chunk goes into a gap only if its share `room` fits there.
    If a worker has other computations left, it takes a chunk of the next round only if it can finish both by
    `deadline`, in seconds.

    Attributes:
        end: seconds from the round's start to the end of its last computation.
    """

    def __init__(self, work: _Work, room: float = 0.0, deadline: float = math.inf) -> None:
        workers = len(work.inner)
        self.end = 0.0
        self._work, self._room, self._deadline = work, room, deadline
        self._done: list[list[_Computation | _PrefixRun]] = [[] for _ in range(workers)]
        self._place = [0] * workers  # of the next computation in the worker's inner list
        #: Seconds of the inner computations that each worker has left.
        self._left = [sum(one.seconds for one in own) for own in work.inner]
        self._pool = deque(work.shape.prefixes)
        self._begun: list[tuple[int, int] | None] = [None] * workers  # chunk that a worker has begun, and its next unit
        self._made = [math.inf] * work.num_values  # when each value is ready
        self._waiting: dict[int, int] = {}  # the worker that waits for a value
        self._free = [(0.0, worker) for worker in range(workers)]  # when each worker can begin a computation

    @property
    def lists(self) -> list[list[Action]]:
        """The computations of each worker, with those that were added."""
        return [[one.action for one in done] for done in self._done]

    def fill(self) -> None:
        """Play the round from its start to its end. Call it once.

        Raises:
            ScheduleError: the input of a computation is never produced before it.
        """
        while self._free:
            now, worker = heapq.heappop(self._free)
            if not self._run_next(worker, now) and not self._run_prefix_unit(worker, now):
                self._wait(worker)
        if stuck := [one.action for worker in range(len(self._place)) if (one := self._next(worker)) is not None]:
            raise ScheduleError(f"these computations wait for inputs that are never produced: {stuck}")

    def _next(self, worker: int) -> _Computation | None:
        """The worker's next computation of the inner schedule; None if it has run all."""
        inner, place = self._work.inner[worker], self._place[worker]
        return inner[place] if place < len(inner) else None

    def _run_next(self, worker: int, now: float) -> bool:
        """Run the worker's next computation of the inner schedule if its input is ready. Returns whether it ran."""
        computation = self._next(worker)
        if computation is None or self._ready_at(computation) > now:
            return False
        self._place[worker] += 1
        self._left[worker] -= computation.seconds
        self._done[worker].append(computation)
        self._take_time(worker, now + computation.seconds, computation.gives)
        return True

    def _run_prefix_unit(self, worker: int, now: float) -> bool:
        """Run one frozen unit, if one is left and the gap has room for it. Returns whether it ran."""
        if worker not in self._work.holders:
            return False
        begun = self._begun[worker]
        if begun is None:
            if not self._pool or not self._may_take_chunk(worker, now):
                return False
            begun = self._pool[0], 0
        chunk, unit = begun
        seconds, following = self._work.prefix[unit], self._next(worker)
        if following is not None and self._ready_at(following) < now + self._room * seconds:
            return False
        if not unit:
            self._pool.popleft()
        last = unit + 1 == self._work.shape.prefix_units
        self._begun[worker] = None if last else (chunk, unit + 1)
        self._append(worker, chunk, unit)
        self._take_time(worker, now + seconds, self._work.made_prefixes[chunk] if last else -1)
        return True

    def _may_take_chunk(self, worker: int, now: float) -> bool:
        if self._next(worker) is None or self._pool[0] < self._work.shape.chunks:
            return True  # nothing else is left to do, or this round itself needs the chunk
        seconds = now + self._left[worker] + sum(self._work.prefix)
        return seconds <= self._deadline or math.isclose(seconds, self._deadline)

    def _append(self, worker: int, chunk: int, unit: int) -> None:
        """Append the forward of a frozen unit. If the last entry is of the same chunk, both become one action."""
        done = self._done[worker]
        last = done[-1] if done else None
        if isinstance(last, _PrefixRun) and last.chunk == chunk:
            last.stop = unit + 1
        else:
            done.append(_PrefixRun(chunk, unit, unit + 1))

    def _take_time(self, worker: int, end: float, gives: int) -> None:
        """Let the worker be busy until `end`, when the value `gives` is ready."""
        self.end = max(self.end, end)
        heapq.heappush(self._free, (end, worker))
        if gives >= 0:
            self._made[gives] = end
            if gives in self._waiting:
                heapq.heappush(self._free, (end, self._waiting.pop(gives)))

    def _wait(self, worker: int) -> None:
        computation = self._next(worker)
        if computation is None or computation.needs < 0:
            return
        if (ready := self._made[computation.needs]) < math.inf:
            heapq.heappush(self._free, (ready, worker))
        else:
            self._waiting[computation.needs] = worker

    def _ready_at(self, computation: _Computation) -> float:
        return 0.0 if computation.needs < 0 else self._made[computation.needs]
