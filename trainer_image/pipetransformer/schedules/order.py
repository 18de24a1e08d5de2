"""Adds messages to a schedule's lists, in one order that all workers share.

NCCL matches the messages of two workers by their order alone, so both must issue the same sequence. The planner goes
through the computations of all workers in one shared order: a computation comes after those that produce its input. It
appends each computation to its worker's list. Then it appends the message to the sender's and to the receiver's list at
once, so both get the same sequence. No deadlock is possible, even if each send blocks until its receive. Take the first
operation in the shared order that is not done: all operations that it waits for are done.
"""

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate

from .actions import Action, ActionKind, RoundShape, Schedule, ScheduleError

#: Assumed durations. They only decide which worker's computation comes first in the shared order.
_TURNS = {
    ActionKind.FORWARD: 1.0,
    ActionKind.BACKWARD: 2.0,
    ActionKind.INPUT_GRADIENT: 1.0,
    ActionKind.WEIGHT_GRADIENT: 1.0,
    ActionKind.STEP: 0.0,
    ActionKind.PREFIX: 1.0,
}

#: The computations that one chunk may have on one span, in order.
_FROZEN = ((ActionKind.FORWARD,),)
_TRAINED = (
    (ActionKind.FORWARD, ActionKind.BACKWARD),
    (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT),
)


class MessageKind(StrEnum):
    ACTIVATION = "Activation"
    GRADIENT = "Gradient"
    PREFIX = "Prefix"
    WEIGHT = "Weight"


#: What a computation on one span takes from the same kind of computation on the next span.
_PASSED_DOWN = {
    ActionKind.BACKWARD: MessageKind.GRADIENT,
    ActionKind.INPUT_GRADIENT: MessageKind.GRADIENT,
    ActionKind.STEP: MessageKind.WEIGHT,
}


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that one computation makes for another. `span` is the span that takes it, for `chunk`.

    An `ACTIVATION` is the span's input. A `GRADIENT` is the gradient of the span's output. A `PREFIX` is the output of
    the last frozen unit; for a chunk of the next round, that round uses it. A `WEIGHT` is the sum of the weights of a
    step's samples, by which a `STEP` divides its gradients; its `chunk` is the number of the step.
    """

    kind: MessageKind
    span: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send `value` to the worker `peer`."""

    value: Value
    peer: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Post the receive of `value` from the worker `peer`, without waiting. The computation that needs it waits."""

    value: Value
    peer: int


Operation = Action | Send | Receive


def needed(action: Action, shape: RoundShape) -> Value | None:
    """The value that this computation takes from another one of this round; None if it takes none."""
    if action.kind is ActionKind.FORWARD:
        if action.span > 0:
            return Value(MessageKind.ACTIVATION, action.span, action.chunk)
        made_now = shape.prefix_units and not shape.prefix_made
        return Value(MessageKind.PREFIX, 0, action.chunk) if made_now else None
    if action.kind in _PASSED_DOWN and action.span < len(shape.owners) - 1:
        return Value(_PASSED_DOWN[action.kind], action.span, action.chunk)
    return None


def given(action: Action, shape: RoundShape) -> Value | None:
    """The value that this computation makes for another one; None if it makes none."""
    if action.kind is ActionKind.FORWARD and action.span < len(shape.owners) - 1:
        return Value(MessageKind.ACTIVATION, action.span + 1, action.chunk)
    if action.kind is ActionKind.PREFIX and action.units.stop == shape.prefix_units:
        return Value(MessageKind.PREFIX, 0, action.chunk)
    if action.kind in _PASSED_DOWN and shape.gives_gradient(action.span):
        return Value(_PASSED_DOWN[action.kind], action.span - 1, action.chunk)
    return None


@lru_cache(maxsize=256)
def planned(schedule: Schedule, shape: RoundShape) -> tuple[tuple[Operation, ...], ...]:
    """The operations of each worker: its computations in the schedule's order, and its messages.

    Raises:
        ScheduleError: the schedule cannot run this shape, leaves a computation out or has one too many, or the input
            of a computation is never produced before it.
    """
    lists = schedule.actions(shape)
    _check(lists, shape)
    return add_messages(lists, shape)


def _check(lists: Sequence[Sequence[Action]], shape: RoundShape) -> None:
    """Check that each chunk passes each span exactly once: forward and, if the span trains, backward.

    Raises:
        ScheduleError: the lists lack a computation, or have one too many, or one of another worker's span.
    """
    if len(lists) != shape.workers:
        raise ScheduleError(f"the schedule must return a list for each of {shape.workers} workers, not {len(lists)}")
    found: dict[tuple[int, int], list[ActionKind]] = defaultdict(list)
    pieces: dict[int, list[tuple[int, range]]] = defaultdict(list)
    for worker, actions in enumerate(lists):
        for action in actions:
            if action.kind is ActionKind.PREFIX:
                pieces[action.chunk].append((worker, action.units))
                continue
            if action.span not in shape.spans_of(worker):
                raise ScheduleError(f"the list of worker {worker} computes span {action.span}, which it does not own")
            if action.kind is not ActionKind.STEP:
                found[action.span, action.chunk].append(action.kind)
    for span in range(len(shape.owners)):
        for chunk in range(shape.chunks):
            kinds = tuple(found.pop((span, chunk), ()))
            if kinds not in (_TRAINED if shape.trains(span) else _FROZEN):
                words = ", ".join(kinds) or "nothing"
                raise ScheduleError(f"span {span} computes {words} for chunk {chunk} of {shape.chunks}")
    if found:
        span, chunk = min(found)
        raise ScheduleError(f"span {span} computes chunk {chunk}, but the number of chunks is {shape.chunks}")
    _check_steps(lists, shape)
    _check_prefixes(pieces, shape)


def _check_steps(lists: Sequence[Sequence[Action]], shape: RoundShape) -> None:
    """Check that each span that trains has each step of the round between the step's last backward and the next one.

    Raises:
        ScheduleError: a span lacks a step, or has one at another place.
    """
    ends = list(enumerate(accumulate(shape.steps)))
    for span, owner in enumerate(shape.owners):
        passed, taken = 0, []
        for action in lists[owner]:
            if action.span == span:
                passed += action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)
                if action.kind is ActionKind.STEP:
                    taken.append((action.chunk, passed))
        wanted = ends if shape.trains(span) else []
        if taken != wanted:
            raise ScheduleError(
                f"span {span} has its steps, as (step, backwards before it), at {taken}, not at {wanted}"
            )


def _check_prefixes(pieces: Mapping[int, Sequence[tuple[int, range]]], shape: RoundShape) -> None:
    """Check that for each chunk of `shape.prefixes` one worker runs all frozen units, in order.

    Raises:
        ScheduleError: other chunks have `PREFIX` actions, or a chunk's frozen units run otherwise.
    """
    if sorted(pieces) != list(shape.prefixes):
        raise ScheduleError(f"frozen units run for the chunks {sorted(pieces)}, not for {list(shape.prefixes)}")
    for chunk, parts in pieces.items():
        units = [unit for _, part in parts for unit in part]
        workers = sorted({worker for worker, _ in parts})
        if len(workers) > 1 or units != list(range(shape.prefix_units)):
            raise ScheduleError(
                f"chunk {chunk} runs the frozen units {units} on the workers {workers}: one worker must run all "
                f"{shape.prefix_units}, in order"
            )


def add_messages(lists: Sequence[Sequence[Action]], shape: RoundShape) -> tuple[tuple[Operation, ...], ...]:
    """Add messages to the computations of each worker.

    Raises:
        ScheduleError: the lists cannot be run, because the input of a computation is never produced before it.
    """
    operations: list[list[Operation]] = [[] for _ in lists]
    made: dict[Value, float] = {}  # when each value is ready
    place = [0] * len(lists)
    waiting: dict[Value, int] = {}  # the worker that waits for a value
    ready = [(0.0, worker) for worker, actions in enumerate(lists) if actions]
    while ready:
        now, worker = heapq.heappop(ready)
        action = lists[worker][place[worker]]
        value = needed(action, shape)
        if value is not None and value not in made:
            waiting[value] = worker
            continue
        start = max(now, made.get(value, 0.0) if value is not None else 0.0)
        if start > now:  # other workers may have a computation before that
            heapq.heappush(ready, (start, worker))
            continue
        end = start + _TURNS[action.kind]
        operations[worker].append(action)
        place[worker] += 1
        if place[worker] < len(lists[worker]):
            heapq.heappush(ready, (end, worker))
        gift = given(action, shape)
        if gift is not None:
            made[gift] = end
            taker = shape.owners[gift.span]
            if taker != worker:
                operations[worker].append(Send(gift, taker))
                operations[taker].append(Receive(gift, worker))
            if gift in waiting:
                heapq.heappush(ready, (end, waiting.pop(gift)))
    stuck = [
        f"worker {worker} at {mine[at]}"
        for worker, (mine, at) in enumerate(zip(lists, place, strict=True))
        if mine[at:]
    ]
    if stuck:
        raise ScheduleError(f"these computations wait for inputs that are never produced: {', '.join(stuck)}")
    return tuple(map(tuple, operations))
