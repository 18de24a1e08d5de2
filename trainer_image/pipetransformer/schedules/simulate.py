"""Predicts how long a round takes, when each worker is idle and how much it keeps, by playing its lists.

The model: a worker runs its list one operation after another. A computation waits for its input, then takes its own
seconds and the constant seconds of any action. Sends and receives take no time of the worker. In lists with messages
(`order.planned`), the messages of two workers pass one after another in their order, both directions together, as in
one communicator. A message begins once both workers have issued it. In lists without messages a value arrives its
message's seconds after it is made. Optimizer, reduction and contention between pairs of workers are not in it.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .actions import Action, ActionKind, RoundShape, ScheduleError
from .order import MessageKind, Operation, Receive, Send, Value

#: Where the values of a kind begin, in numbers of spans and chunks.
_BASES = {MessageKind.ACTIVATION: 0, MessageKind.GRADIENT: 1, MessageKind.PREFIX: 2}
#: Seconds by kind of computation, span and slice.
_Table = dict[ActionKind, dict[int, Sequence[float]]]


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """What the computations and messages of a round cost.

    Attributes:
        seconds: seconds of each kind of computation on each span, by slice; a single number serves all slices.
        message_seconds: seconds of a message between two workers, by slice; a single number serves all slices.
        action_seconds: seconds that any computation takes in addition, such as those of its launch.
        saved_bytes: bytes that a chunk keeps in each span from its forward to the end of its backward; empty if nothing
            is kept. For slices the mean of a micro-batch's chunks.
        prefix_seconds: seconds of each frozen unit that `PREFIX` actions compute.
    """

    seconds: Mapping[tuple[ActionKind, int], Sequence[float]]
    message_seconds: Sequence[float] = (0.0,)
    action_seconds: float = 0.0
    saved_bytes: Sequence[float] = ()
    prefix_seconds: Sequence[float] = ()

    @classmethod
    def by_span(
        cls,
        forward: Sequence[float],
        backward: Sequence[float],
        weight_gradient: Sequence[float] | None = None,
        *,
        message_seconds: float = 0.0,
        action_seconds: float = 0.0,
        saved_bytes: Sequence[float] = (),
    ) -> "RoundCosts":
        """Costs of whole micro-batches.

        Args:
            forward: seconds of each span's forward.
            backward: seconds of each span's whole backward.
            weight_gradient: the part of `backward` that an own action can take; by default a half.
            message_seconds: seconds of a message.
            action_seconds: seconds of any action.
            saved_bytes: bytes that a chunk keeps in each span.
        """
        weights = [seconds / 2 for seconds in backward] if weight_gradient is None else weight_gradient
        inputs = [max(0.0, whole - part) for whole, part in zip(backward, weights, strict=True)]
        rows = {
            ActionKind.FORWARD: forward,
            ActionKind.BACKWARD: backward,
            ActionKind.INPUT_GRADIENT: inputs,
            ActionKind.WEIGHT_GRADIENT: weights,
            ActionKind.STEP: [0.0] * len(forward),
        }
        seconds = {(kind, span): (value,) for kind, row in rows.items() for span, value in enumerate(row)}
        return cls(seconds, (message_seconds,), action_seconds, saved_bytes)


@dataclass(frozen=True, slots=True)
class Simulated:
    """A round as it was played. All sequences are by worker.

    Attributes:
        seconds: from the round's start to the end of its last computation.
        busy: seconds of computations.
        idle_share: share of `seconds` without a computation.
        peak_chunks: largest number of chunks, each in one span, that wait for the end of their backward.
        peak_bytes: most bytes that such chunks keep.
        times: start and end of each computation, in the order of the worker's list.
    """

    seconds: float
    busy: tuple[float, ...]
    idle_share: tuple[float, ...]
    peak_chunks: tuple[int, ...]
    peak_bytes: tuple[float, ...]
    times: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def mean_idle_share(self) -> float:
        """Share of the workers' time without a computation."""
        return sum(self.idle_share) / len(self.idle_share)


def simulate(lists: Sequence[Sequence[Operation]], shape: RoundShape, costs: RoundCosts) -> Simulated:
    """Play the lists of a round: `planned(schedule, shape)`, or computations without messages.

    Raises:
        ScheduleError: the lists cannot be run: an operation waits for what never comes, or the two ends of a pair of
            workers issue different messages.
        KeyError: `costs` lacks a kind of computation.
    """
    return _Round(lists, shape, costs).play()


@dataclass(slots=True)
class _Worker:
    """One worker's list, and how far it was played."""

    operations: Sequence[Operation]
    place: int = 0
    now: float = 0.0
    busy: float = 0.0
    chunks: int = 0
    bytes: float = 0.0
    peak_chunks: int = 0
    peak_bytes: float = 0.0
    times: list[tuple[float, float]] = field(default_factory=list)


@dataclass(slots=True)
class _Pair:
    """The messages of two workers. `early` holds what one of them has issued and the other has not yet."""

    free_at: float = 0.0
    early: deque[tuple[int, Value, float]] = field(default_factory=deque)


class _Round:
    def __init__(self, lists: Sequence[Sequence[Operation]], shape: RoundShape, costs: RoundCosts) -> None:
        self._shape, self._costs = shape, costs
        self._workers = [_Worker(operations) for operations in lists]
        self._with_messages = any(not isinstance(one, Action) for operations in lists for one in operations)
        self._seconds = _table(costs, shape.slices)
        self._message_seconds = _by_slice(costs.message_seconds, shape.slices)
        self._saved_bytes = costs.saved_bytes or [0.0] * len(shape.owners)
        # When a value is there: activations by span * chunks + chunk, then gradients, then prefixes by chunk.
        self._gradients = len(shape.owners) * shape.chunks
        self._arrived: list[float | None] = [None] * (2 * self._gradients + shape.chunks + shape.next_chunks)
        self._waiting: dict[int, int] = {}  # the worker that waits for a value
        self._ready = list(range(len(lists)))
        self._pairs: dict[tuple[int, int], _Pair] = {}

    def play(self) -> Simulated:
        while self._ready:
            self._run(self._ready.pop())
        workers = self._workers
        stuck = [
            f"worker {index} at {worker.operations[worker.place]}"
            for index, worker in enumerate(workers)
            if worker.place < len(worker.operations)
        ]
        if stuck:
            raise ScheduleError(f"these operations wait for what never comes: {', '.join(stuck)}")
        seconds = max(worker.now for worker in workers)
        return Simulated(
            seconds,
            tuple(worker.busy for worker in workers),
            tuple(1 - worker.busy / seconds if seconds else 0.0 for worker in workers),
            tuple(worker.peak_chunks for worker in workers),
            tuple(worker.peak_bytes for worker in workers),
            tuple(tuple(worker.times) for worker in workers),
        )

    def _run(self, index: int) -> None:
        """Play one worker's list until it waits or ends."""
        worker = self._workers[index]
        operations, place, now = worker.operations, worker.place, worker.now
        arrived, seconds, times = self._arrived, self._seconds, worker.times
        chunks, slices, extra = self._shape.chunks, self._shape.slices, self._costs.action_seconds
        while place < len(operations):
            operation = operations[place]
            if not isinstance(operation, Action):
                self._issue(index, operation, now)
                place += 1
                continue
            kind, span, chunk = operation.kind, operation.span, operation.chunk
            source = self._source(kind, span * chunks + chunk)
            if source >= 0:
                there = arrived[source]
                if there is None:
                    self._waiting[source] = index
                    break
                if there > now:
                    now = there
            if kind is ActionKind.PREFIX:
                own = sum(self._costs.prefix_seconds[unit] for unit in operation.units)
            else:
                own = seconds[kind][span][chunk % slices]
            end = now + own + extra
            times.append((now, end))
            worker.busy += end - now
            now = end
            place += 1
            self._note(worker, operation)
            self._give(index, operation, now)
        worker.place, worker.now = place, now

    def _source(self, kind: ActionKind, place: int) -> int:
        """Index of the value that a computation needs; negative if it needs none."""
        if kind is ActionKind.FORWARD:
            if place >= self._shape.chunks:
                return place
            return 2 * self._gradients + place if place in self._shape.prefixes else -1
        if kind is ActionKind.BACKWARD or kind is ActionKind.INPUT_GRADIENT:
            return self._gradients + place if place < self._gradients - self._shape.chunks else -1
        return -1

    def _give(self, index: int, action: Action, now: float) -> None:
        """Hand on what a computation has made, unless a message does."""
        kind, span, shape = action.kind, action.span, self._shape
        if kind is ActionKind.FORWARD:
            taker, base = span + 1, 0
            if taker == len(shape.owners):
                return
        elif (kind is ActionKind.BACKWARD or kind is ActionKind.INPUT_GRADIENT) and span > shape.first_trained:
            taker, base = span - 1, self._gradients
        elif kind is ActionKind.PREFIX and action.units.stop == shape.prefix_units:
            taker, base = 0, 2 * self._gradients
        else:
            return
        if shape.owners[taker] != index:
            if self._with_messages:
                return
            now += self._message_seconds[action.chunk % shape.slices]
        self._arrive(base + taker * shape.chunks + action.chunk, now)

    def _arrive(self, value: int, when: float) -> None:
        self._arrived[value] = when
        waiter = self._waiting.pop(value, None)
        if waiter is not None:
            self._ready.append(waiter)

    def _issue(self, index: int, message: Send | Receive, now: float) -> None:
        """Issue one end of a message. The later end begins it, after the message before."""
        peer, value = message.peer, message.value
        pair = self._pairs.setdefault((index, peer) if index < peer else (peer, index), _Pair())
        if not pair.early or pair.early[0][0] == index:
            pair.early.append((index, value, now))
            return
        _, expected, issued = pair.early.popleft()
        if expected != value:
            raise ScheduleError(f"worker {peer} issues {expected} where worker {index} issues {value}")
        chunk = value.chunk
        pair.free_at = max(pair.free_at, issued, now) + self._message_seconds[chunk % self._shape.slices]
        base = _BASES[value.kind] * self._gradients
        self._arrive(base + value.span * self._shape.chunks + chunk, pair.free_at)

    def _note(self, worker: _Worker, action: Action) -> None:
        """Count what a worker keeps. A span that trains nothing keeps nothing."""
        kind, span = action.kind, action.span
        if kind is ActionKind.FORWARD:
            if span >= self._shape.first_trained:
                worker.chunks += 1
                worker.bytes += self._saved_bytes[span]
                worker.peak_chunks = max(worker.peak_chunks, worker.chunks)
                worker.peak_bytes = max(worker.peak_bytes, worker.bytes)
        elif kind is ActionKind.BACKWARD or kind is ActionKind.WEIGHT_GRADIENT:
            worker.chunks -= 1
            worker.bytes -= self._saved_bytes[span]


def _table(costs: RoundCosts, slices: int) -> _Table:
    """The seconds by kind, for quick access."""
    table: _Table = {}
    for (kind, span), row in costs.seconds.items():
        table.setdefault(kind, {})[span] = _by_slice(row, slices)
    return table


def _by_slice(row: Sequence[float], slices: int) -> Sequence[float]:
    return row if len(row) == slices else [row[0]] * slices
