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

from .operations import Action, ActionKind, RoundShape, Schedule, ScheduleError, Value, given, needed

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

    def round_seconds(self, shape: RoundShape) -> float:
        """Expected seconds of a round, without messages.

        Raises:
            ScheduleError: under the conditions of `actions`.
        """
        return self._filled(shape).end

    def bound_seconds(self, shape: RoundShape) -> float:
        """A lower bound of the seconds of a round, for any way to add `PREFIX` actions to the inner schedule.

        It is the larger of two times: the inner schedule alone, and all work shared evenly by the workers. It assumes
        that the round runs the frozen units of as many chunks as it trains, so it does not hold for the last round.
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
            raise ScheduleError("frozen forwards can run ahead only for whole micro-batches, not for slices of tokens")
        if not shape.trains(0):
            raise ScheduleError("frozen forwards can run ahead only if the first span trains")
        if shape.owners[0] not in self.holders:
            raise ScheduleError("the worker of the first span does not hold the frozen units")


def _without_prefix(shape: RoundShape) -> RoundShape:
    return replace(shape, prefix_units=0, prefix_made=False, next_chunks=0)


class _Filling:
    """Plays the lists of the inner schedule in simulated time, and fills gaps with pieces.

    A piece is the forward of one frozen unit for one chunk. It goes into a gap only if its share `room` fits there.
    A worker with other computations left takes a chunk of the next round only if it can finish the chunk and those
    computations by `deadline`, in seconds.

    Attributes:
        lists: the computations of each worker, with those that were added.
        end: seconds from the round's start to the end of its last computation.
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
        self._left = [sum(map(ahead.seconds.of, actions)) for actions in inner]  # seconds of work not yet in `lists`
        self._pool = deque(shape.prefixes)
        self._piece: list[Action | None] = [None] * len(inner)  # the next piece of the chunk that a worker has begun
        self._made: dict[Value, float] = {}  # when each value is ready
        self._waiting: dict[Value, int] = {}  # the worker that waits for a value
        self._free = [(0.0, worker) for worker in range(len(inner))]  # when each worker can begin a computation

    def fill(self) -> None:
        """Play the round from its start to its end. Call it once.

        Raises:
            ScheduleError: the input of a computation is never produced before it.
        """
        while self._free:
            now, worker = heapq.heappop(self._free)
            if not self._run_next(worker, now) and not self._run_piece(worker, now):
                self._wait(worker)
        if stuck := [action for action in self._next if action is not None]:
            raise ScheduleError(f"these computations wait for inputs that are never produced: {stuck}")

    def _run_next(self, worker: int, now: float) -> bool:
        """Run the worker's next computation of the inner schedule if its input is ready. Returns whether it ran."""
        action = self._next[worker]
        if action is None or self._ready_at(action) > now:
            return False
        self._next[worker] = next(self._rest[worker], None)
        self._left[worker] -= self._seconds.of(action)
        self.lists[worker].append(action)
        self._take_time(action, worker, now)
        return True

    def _run_piece(self, worker: int, now: float) -> bool:
        """Run one frozen unit, if one is left and the gap has room for it. Returns whether it ran."""
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
        """Append a piece. If the last action is the piece before it of the same chunk, both become one action."""
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
