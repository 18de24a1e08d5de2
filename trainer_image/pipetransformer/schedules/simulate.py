"""Simulates a round: how long it takes, when each worker is idle, and how much memory its chunks keep.

A worker runs its list one operation after another. A computation waits for its input, then takes its own seconds and
`action_seconds`. Sends and receives take no time of the worker. In lists with messages (`order.planned`), two workers
exchange one message at a time in their order, as in one communicator. A message begins once both workers have issued
it. In lists without messages, a value arrives `message_seconds` after it is made. The simulation leaves out the
optimizer, the reduction and contention between pairs of workers. A `STEP` waits for no message.
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from .operations import (
    Action,
    ActionKind,
    MessageKind,
    Operation,
    Receive,
    RoundShape,
    ScheduleError,
    Send,
    Value,
)

#: What determines a node's seconds: (kind, span, slice) of a computation, the units of a `PREFIX`, or the slice number
#: of a message.
_Cost = tuple[ActionKind, int, int] | range | int
#: The number of chunks that a worker keeps at one time, as pairs (span, chunks).
_Kept = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """What the computations and messages of a round cost.

    Attributes:
        seconds: seconds of each kind of computation on each span, by slice; a single number serves all slices.
        message_seconds: seconds of a message between two workers, by slice; a single number serves all slices.
        action_seconds: seconds that each computation takes in addition, such as those to launch it.
        saved_bytes: bytes that a chunk keeps in each span from its forward to the end of its backward; empty if nothing
            is kept. With slices of tokens it is the mean over the slices of a micro-batch.
        prefix: seconds of each frozen unit before span 0, for `PREFIX` computations.
    """

    seconds: Mapping[tuple[ActionKind, int], Sequence[float]]
    message_seconds: Sequence[float] = (0.0,)
    action_seconds: float = 0.0
    saved_bytes: Sequence[float] = ()
    prefix: Sequence[float] = ()

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
        prefix: Sequence[float] = (),
    ) -> "RoundCosts":
        """Costs of a round of whole micro-batches.

        Args:
            forward: seconds of each span's forward.
            backward: seconds of each span's whole backward.
            weight_gradient: the seconds of `backward` that a `WEIGHT_GRADIENT` takes; by default half of them.
            message_seconds: seconds of a message.
            action_seconds: seconds that each computation takes in addition.
            saved_bytes: bytes that a chunk keeps in each span.
            prefix: seconds of each frozen unit before span 0.
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
        return cls(seconds, (message_seconds,), action_seconds, saved_bytes, prefix)


@dataclass(frozen=True, slots=True)
class Simulated:
    """The result of a simulated round. All sequences are by worker. Times are in seconds from the round's start.

    Attributes:
        seconds: when the last computation or message of the round ends.
        busy: seconds of the worker's computations.
        idle_share: share of `seconds` that the worker does not compute.
        peak_bytes: most bytes that the worker keeps at one time for chunks between their forward and the end of their
            backward.
        ends: when the worker's last computation ends.
        times: start and end of each computation, in the order of the worker's list.
    """

    seconds: float
    busy: tuple[float, ...]
    idle_share: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    ends: tuple[float, ...]
    times: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def mean_idle_share(self) -> float:
        """Mean of `idle_share` over the workers."""
        return sum(self.idle_share) / len(self.idle_share)


def simulate(lists: Sequence[Sequence[Operation]], shape: RoundShape, costs: RoundCosts) -> Simulated:
    """Simulate a round.

    Args:
        lists: the operations of each worker: `planned(schedule, shape)`, or computations without messages.
        shape: the shape of the round.
        costs: what computations and messages cost.

    Raises:
        ScheduleError: the lists cannot be run: an operation waits for a value that never comes, or two workers issue
            different messages to each other.
        KeyError: `costs` lacks a kind of computation.
    """
    return RoundGraph.of(lists, shape).simulate(costs)


@dataclass(frozen=True, slots=True)
class RoundGraph:
    """The lists of a round as a graph, which can be simulated many times with different costs.

    A node is a computation or a message. It starts when the last of its predecessors ends. The numbers of its
    predecessors are below its own. Node 0 is the start of the round.

    Attributes:
        shape: the shape of the round.
        nodes: nodes 1, 2 and so on: the numbers of three predecessors, and an index into `costs`.
        costs: what the nodes can cost.
        computations: the nodes of each worker's computations, in the order of its list.
        counts: how often each entry of `costs` occurs among each worker's computations.
        kept: for each worker, how many chunks of each span it keeps at some times. Only times that can be the peak are
            listed. A time is left out if at another time the worker keeps at least as many chunks of every span.
    """

    shape: RoundShape
    nodes: Sequence[tuple[int, int, int, int]]
    costs: Sequence[_Cost]
    computations: Sequence[Sequence[int]]
    counts: Sequence[Mapping[int, int]]
    kept: Sequence[Sequence[Mapping[int, int]]]

    @classmethod
    def of(cls, lists: Sequence[Sequence[Operation]], shape: RoundShape) -> "RoundGraph":
        """Make the graph of these lists.

        Raises:
            ScheduleError: the lists cannot be run.
        """
        return _GraphBuilder(lists, shape).build()

    def simulate(self, costs: RoundCosts, *, times: bool = True) -> Simulated:
        """Simulate the round with these costs. With `times=False` the `times` of the result are empty.

        Raises:
            KeyError: `costs` lacks a kind of computation.
        """
        seconds = [self._seconds(cost, costs) for cost in self.costs]
        ends = [0.0]
        for first, second, third, cost in self.nodes:
            start = ends[first]
            if ends[second] > start:
                start = ends[second]
            if ends[third] > start:
                start = ends[third]
            ends.append(start + seconds[cost])
        busy = tuple(sum(seconds[cost] * number for cost, number in own.items()) for own in self.counts)
        most = max(ends)
        saved = costs.saved_bytes or [0.0] * len(self.shape.owners)
        return Simulated(
            seconds=most,
            busy=busy,
            idle_share=tuple(1 - one / most if most else 0.0 for one in busy),
            peak_bytes=tuple(
                max(sum(saved[span] * chunks for span, chunks in each.items()) for each in kept) for kept in self.kept
            ),
            ends=tuple(ends[own[-1]] if own else 0.0 for own in self.computations),
            times=tuple(tuple(self._time(node, ends) for node in own) for own in self.computations) if times else (),
        )

    def _time(self, node: int, ends: Sequence[float]) -> tuple[float, float]:
        first, second, third, _ = self.nodes[node - 1]
        return max(ends[first], ends[second], ends[third]), ends[node]

    def _seconds(self, cost: _Cost, costs: RoundCosts) -> float:
        if isinstance(cost, int):
            return _of_slice(costs.message_seconds, cost)
        if isinstance(cost, range):
            return sum(costs.prefix[unit] for unit in cost) + costs.action_seconds
        kind, span, number = cost
        return _of_slice(costs.seconds[kind, span], number) + costs.action_seconds


def _of_slice(row: Sequence[float], number: int) -> float:
    return row[0] if len(row) == 1 else row[number]


@dataclass(slots=True)
class _Worker:
    """One worker's list, and how far the builder has come in it.

    Attributes:
        operations: the worker's list.
        place: index of the operation that comes next.
        newest: node of the worker's newest computation.
        computations: nodes of all its computations so far.
        chunks: chunks that it keeps now, by span.
        kept: the values that `chunks` has had after a forward.
    """

    operations: Sequence[Operation]
    place: int = 0
    newest: int = 0
    computations: list[int] = field(default_factory=list)
    chunks: dict[int, int] = field(default_factory=dict)
    kept: set[_Kept] = field(default_factory=set)


@dataclass(slots=True)
class _Pair:
    """The messages between two workers.

    Attributes:
        newest: node of their newest message.
        early: what one of the two has issued and the other has not yet, as (worker, value, that worker's newest node).
    """

    newest: int = 0
    early: deque[tuple[int, Value, int]] = field(default_factory=deque)


class _GraphBuilder:
    """Makes the graph. It goes through each list until an operation waits, and resumes once its value is there."""

    def __init__(self, lists: Sequence[Sequence[Operation]], shape: RoundShape) -> None:
        self._shape = shape
        self._workers = [_Worker(operations) for operations in lists]
        self._with_messages = any(not isinstance(one, Action) for operations in lists for one in operations)
        self._nodes: list[tuple[int, int, int, int]] = []
        self._costs: dict[_Cost, int] = {}
        # The node that brings each value, -1 before it is known. Activations are at span * chunks + chunk, then come
        # gradients in the same order, then prefixes by chunk.
        self._gradients = len(shape.owners) * shape.chunks
        self._prefixes = 2 * self._gradients
        self._arrived = [-1] * (self._prefixes + shape.chunks + shape.next_chunks)
        self._bases = {
            MessageKind.ACTIVATION: 0,
            MessageKind.GRADIENT: self._gradients,
            MessageKind.PREFIX: self._prefixes,
        }
        self._reads_prefix = bool(shape.prefix_units) and not shape.prefix_made
        self._waiting: dict[int, int] = {}  # the worker that waits for a value
        self._ready = list(range(len(lists)))
        self._pairs: dict[tuple[int, int], _Pair] = {}

    def build(self) -> RoundGraph:
        while self._ready:
            self._run(self._ready.pop())
        stuck = [
            f"worker {index} at {worker.operations[worker.place]}"
            for index, worker in enumerate(self._workers)
            if worker.place < len(worker.operations)
        ]
        if stuck:
            raise ScheduleError(f"these operations wait for values that never come: {', '.join(stuck)}")
        return RoundGraph(
            self._shape,
            self._nodes,
            list(self._costs),
            [worker.computations for worker in self._workers],
            [Counter(self._nodes[node - 1][3] for node in worker.computations) for worker in self._workers],
            [_largest(worker.kept) for worker in self._workers],
        )

    def _run(self, index: int) -> None:
        """Add one worker's list to the graph until it waits or ends."""
        worker, chunks, slices = self._workers[index], self._shape.chunks, self._shape.slices
        while worker.place < len(worker.operations):
            operation = worker.operations[worker.place]
            if isinstance(operation, Action):
                kind, span, chunk = operation.kind, operation.span, operation.chunk
                source = self._source(kind, span * chunks + chunk)
                arrived = 0 if source < 0 else self._arrived[source]
                if arrived < 0:
                    self._waiting[source] = index
                    return
                cost: _Cost = operation.units if kind is ActionKind.PREFIX else (kind, span, chunk % slices)
                worker.newest = self._node(worker.newest, arrived, 0, cost)
                worker.computations.append(worker.newest)
                self._note(worker, operation)
                self._give(index, operation)
            else:
                self._issue(index, operation)
            worker.place += 1

    def _node(self, first: int, second: int, third: int, cost: _Cost) -> int:
        self._nodes.append((first, second, third, self._costs.setdefault(cost, len(self._costs))))
        return len(self._nodes)

    def _source(self, kind: ActionKind, place: int) -> int:
        """Index in `_arrived` of the value that a computation needs; negative if it needs none.

        The same as `operations.input_of`, but on indices in `_arrived`, because `Auto` builds graphs of thousands of
        lists. Only a `STEP` needs no value here.
        """
        if kind is ActionKind.FORWARD:
            if place >= self._shape.chunks:
                return place
            return self._prefixes + place if self._reads_prefix else -1
        if kind is ActionKind.BACKWARD or kind is ActionKind.INPUT_GRADIENT:
            return self._gradients + place if place < self._gradients - self._shape.chunks else -1
        return -1

    def _give(self, index: int, action: Action) -> None:
        """Record that the value of a computation has arrived at its taker, unless a message brings it there.

        The values are those of `operations.output_of`, but on indices in `_arrived`, as in `_source`. Only a `STEP`
        gives no value here.
        """
        kind, span, shape = action.kind, action.span, self._shape
        if kind is ActionKind.FORWARD:
            taker, base = span + 1, 0
            if taker == len(shape.owners):
                return
        elif (kind is ActionKind.BACKWARD or kind is ActionKind.INPUT_GRADIENT) and span > shape.first_trained:
            taker, base = span - 1, self._gradients
        elif kind is ActionKind.PREFIX and action.units.stop == shape.prefix_units:
            taker, base = 0, self._prefixes
        else:
            return
        node = self._workers[index].newest
        if shape.owners[taker] != index:
            if self._with_messages:
                return
            node = self._node(node, 0, 0, action.chunk % shape.slices)
        self._arrive(base + taker * shape.chunks + action.chunk, node)

    def _arrive(self, value: int, node: int) -> None:
        self._arrived[value] = node
        waiter = self._waiting.pop(value, None)
        if waiter is not None:
            self._ready.append(waiter)

    def _issue(self, index: int, message: Send | Receive) -> None:
        """Issue one worker's end of a message. Once both workers have issued their ends, the message begins, but not
        before the pair's previous message has ended.

        Raises:
            ScheduleError: the peer has issued another message.
        """
        peer, value, newest = message.peer, message.value, self._workers[index].newest
        pair = self._pairs.setdefault((index, peer) if index < peer else (peer, index), _Pair())
        if not pair.early or pair.early[0][0] == index:
            pair.early.append((index, value, newest))
            return
        _, expected, issued = pair.early.popleft()
        if expected != value:
            raise ScheduleError(f"worker {peer} issues {expected} where worker {index} issues {value}")
        pair.newest = self._node(issued, newest, pair.newest, value.chunk % self._shape.slices)
        if value.kind is MessageKind.WEIGHT:
            return
        base = self._bases[value.kind]
        self._arrive(base + value.span * self._shape.chunks + value.chunk, pair.newest)

    def _note(self, worker: _Worker, action: Action) -> None:
        """Count the chunks that a worker keeps after this computation. A span that trains nothing keeps none."""
        kind, span = action.kind, action.span
        if kind is ActionKind.FORWARD:
            if span >= self._shape.first_trained:
                worker.chunks[span] = worker.chunks.get(span, 0) + 1
                worker.kept.add(tuple(worker.chunks.items()))
        elif kind is ActionKind.BACKWARD or kind is ActionKind.WEIGHT_GRADIENT:
            worker.chunks[span] -= 1


def _largest(kept: Collection[_Kept]) -> list[dict[int, int]]:
    """The entries that can be the peak. An entry is left out if another has at least as many chunks of every span."""
    found: list[dict[int, int]] = []
    for each in sorted((dict(one) for one in kept), key=lambda one: -sum(one.values())):
        if not any(all(other.get(span, 0) >= chunks for span, chunks in each.items()) for other in found):
            found.append(each)
    return found or [{}]
