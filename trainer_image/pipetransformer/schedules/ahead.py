"""Runs frozen forwards of the next round in the idle time of this one.

What frozen units make of the next round depends on nothing that this round changes. So the schedule inside orders the
units that train, and a worker that would wait for it runs frozen units of the next round's chunks. A round takes no
less than `bound_seconds`; the lists come within a few percent of that. The frozen forwards are free while they fit
into the idle time of the schedule inside.
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .actions import Action, ActionKind, RoundShape, Schedule, ScheduleError
from .order import Value, given, needed

#: Ways to fill gaps: the share of a frozen unit's forward that a gap must have room for, and whether a worker takes
#: only chunks that it can finish within the bound. With a share of 0 a worker is never idle, but what it waits for may
#: come while it computes; with 1 it delays no action. Which way is best depends on the round.
_WAYS = ((0.0, False), (1.0, False), (1.0, True))


@dataclass(frozen=True, slots=True)
class RoundSeconds:
    """Expected seconds of the computations of one chunk.

    Attributes:
        forward: of each span's units that train.
        backward: of each span; a half takes half of it.
        prefix: of each frozen unit before span 0.
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
    """Adds `PREFIX` actions to the lists of another schedule. The result is as exact as that schedule.

    A worker keeps a chunk until all its frozen units have run, because only their output is sent. The lists depend on
    `seconds` only in their order, so a wrong expectation costs time and nothing else.

    Attributes:
        inner: orders the units that train.
        seconds: what computations are expected to take.
        holders: the workers that hold the frozen units; the owner of span 0 is one.
    """

    inner: Schedule
    seconds: RoundSeconds
    holders: tuple[int, ...]

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        """The lists of a round.

        Where the round before has not made this round's prefix, the workers make it first. A shape without
        `prefix_units` gets the lists of the schedule inside.

        Raises:
            ScheduleError: the schedule inside cannot run the shape, or this one cannot.
        """
        return self._filled(shape).lists

    def round_seconds(self, shape: RoundShape) -> float:
        """Expected seconds of a round, without messages.

        Raises:
            ScheduleError: as `actions`.
        """
        return self._filled(shape).end

    def bound_seconds(self, shape: RoundShape) -> float:
        """No schedule with this one inside makes a round of `shape` faster, once the rounds follow each other.

        It is the time of the schedule inside alone, or of all work if the workers share it evenly.
        """
        inner = self.inner.actions(_without_prefix(shape))
        alone = _Filling(self, _without_prefix(shape), inner)
        alone.fill()
        work = sum(self.seconds.of(action) for actions in inner for action in actions)
        return max(alone.end, (work + shape.chunks * sum(self.seconds.prefix)) / shape.workers)

    def _filled(self, shape: RoundShape) -> "_Filling":
        if shape.prefix_units:
            self._check(shape)
        inner = self.inner.actions(_without_prefix(shape))
        bound = self.bound_seconds(shape)
        fillings = [_Filling(self, shape, inner, room, bound if within else math.inf) for room, within in _WAYS]
        for filling in fillings:
            filling.fill()
        return min(fillings, key=lambda filling: filling.end)

    def _check(self, shape: RoundShape) -> None:
        if shape.slices > 1:
            raise ScheduleError("frozen forwards run ahead for whole micro-batches, not for slices of tokens")
        if not shape.trains(0):
            raise ScheduleError("frozen forwards run ahead only if the first span trains")
        if shape.owners[0] not in self.holders:
            raise ScheduleError("the worker of the first span does not hold the frozen units")


def _without_prefix(shape: RoundShape) -> RoundShape:
    return replace(shape, prefix_units=0, prefix_made=False, next_chunks=0)


class _Filling:
    """Runs the lists of the schedule inside in simulated time, and fills gaps with pieces of prefixes.

    A gap must have room for the share `room` of a piece. A worker that has other computations left takes a chunk
    of the next round only if it can finish all of them by `deadline`, in seconds.

    Attributes:
        lists: the computations of each worker.
        end: when the last one is done, in seconds.
    """

    def __init__(
        self,
        ahead: Ahead,
        shape: RoundShape,
        inner: Sequence[Sequence[Action]],
        room: float = 0.0,
        deadline: float = math.inf,
    ) -> None:
        self.lists: list[list[Action]] = [[] for _ in inner]
        self.end = 0.0
        self._seconds, self._holders, self._shape = ahead.seconds, ahead.holders, shape
        self._room, self._deadline = room, deadline
        self._rest = [iter(actions) for actions in inner]
        self._next = [next(rest, None) for rest in self._rest]
        self._left = [sum(map(ahead.seconds.of, actions)) for actions in inner]  # seconds of what is not yet in a list
        self._pool = deque(shape.prefixes)
        self._piece: list[Action | None] = [None] * len(inner)  # the next frozen unit of the chunk that a worker has
        self._made: dict[Value, float] = {}  # when each value is there
        self._waiting: dict[Value, int] = {}  # the worker that waits for a value
        self._free = [(0.0, worker) for worker in range(len(inner))]  # when each worker can begin something

    def fill(self) -> None:
        """
        Raises:
            ScheduleError: a computation needs what no earlier one gives.
        """
        while self._free:
            now, worker = heapq.heappop(self._free)
            if not self._run_next(worker, now) and not self._run_piece(worker, now):
                self._wait(worker)
        if stuck := [action for action in self._next if action is not None]:
            raise ScheduleError(f"these computations need what no earlier one gives: {stuck}")

    def _run_next(self, worker: int, now: float) -> bool:
        """Run the worker's next computation if what it needs is there."""
        action = self._next[worker]
        if action is None or self._ready_at(action) > now:
            return False
        self._next[worker] = next(self._rest[worker], None)
        self._left[worker] -= self._seconds.of(action)
        self.lists[worker].append(action)
        self._take_time(action, worker, now)
        return True

    def _run_piece(self, worker: int, now: float) -> bool:
        """Run one frozen unit, if there is one to run and the gap has room for it."""
        if worker not in self._holders:
            return False
        piece = self._piece[worker]
        if piece is None:
            if not self._pool or not self._may_take_chunk(worker, now):
                return False
            piece = Action(ActionKind.PREFIX, 0, self._pool[0], range(1))
        action = self._next[worker]
        if action is not None and self._ready_at(action) < now + self._room * self._seconds.of(piece):
            return False
        if not piece.units.start:
            self._pool.popleft()
        done = piece.units.stop
        self._piece[worker] = replace(piece, units=range(done, done + 1)) if done < self._shape.prefix_units else None
        self._append(worker, piece)
        self._take_time(piece, worker, now)
        return True

    def _may_take_chunk(self, worker: int, now: float) -> bool:
        if self._next[worker] is None or self._pool[0] < self._shape.chunks:
            return True  # nothing else is left to do, or this round itself needs the chunk
        seconds = now + self._left[worker] + sum(self._seconds.prefix)
        return seconds <= self._deadline or math.isclose(seconds, self._deadline)

    def _append(self, worker: int, piece: Action) -> None:
        """Append a piece, as one action with the piece before it if that ends where this one begins."""
        mine = self.lists[worker]
        last = mine[-1] if mine else None
        if last is not None and last.kind is ActionKind.PREFIX and last.chunk == piece.chunk:
            mine[-1] = replace(last, units=range(last.units.start, piece.units.stop))
        else:
            mine.append(piece)

    def _take_time(self, action: Action, worker: int, now: float) -> None:
        end = now + self._seconds.of(action)
        self.end = max(self.end, end)
        heapq.heappush(self._free, (end, worker))
        gift = given(action, self._shape)
        if gift is not None:
            self._made[gift] = end
            if gift in self._waiting:
                heapq.heappush(self._free, (end, self._waiting.pop(gift)))

    def _wait(self, worker: int) -> None:
        action = self._next[worker]
        value = None if action is None else needed(action, self._shape)
        if value is None:
            return
        if value in self._made:
            heapq.heappush(self._free, (self._made[value], worker))
        else:
            self._waiting[value] = worker

    def _ready_at(self, action: Action) -> float:
        value = needed(action, self._shape)
        return 0.0 if value is None else self._made.get(value, float("inf"))
