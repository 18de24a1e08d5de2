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
from functools import lru_cache
from itertools import accumulate
from numbers import Integral

from pipetransformer.errors import SpecError

from .operations import (
    Action,
    ActionKind,
    Operation,
    Receive,
    RoundShape,
    Schedule,
    ScheduleError,
    Send,
    Value,
    input_of,
    output_of,
)

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


@lru_cache(maxsize=256)
def planned(schedule: Schedule, shape: RoundShape) -> tuple[tuple[Operation, ...], ...]:
    """The operations of each worker: its computations in the schedule's order, and its messages.

    Raises:
        ScheduleError: the schedule cannot run this shape (`lists_of`), or the input of a computation is never produced
            before it.
        SpecError: the schedule fails (`lists_of`).
    """
    return add_messages(lists_of(schedule, shape), shape)


def lists_of(schedule: Schedule, shape: RoundShape) -> list[list[Action]]:
    """The lists of a schedule, which may be the user's code. Without this, its errors would look like a broken
    connection.

    Raises:
        ScheduleError: the schedule cannot run this shape, leaves a computation out or has one too many.
        SpecError: the schedule raises another error, or returns something else than actions, or one of their
            fields is of another type.
    """
    try:
        lists = [list(actions) for actions in schedule.actions(shape)]
    except ScheduleError:
        raise
    except Exception as error:
        asked = f"{schedule} for {len(set(shape.owners))} workers and {shape.chunks} chunks"
        raise SpecError("schedule", f"{asked}: {type(error).__name__}: {error}") from error
    for action in (each for actions in lists for each in actions):
        if not _is_action(action):
            raise SpecError(
                "schedule", f"{schedule} returned {action!r}, which is not an Action with fields of its types"
            )
    _check(lists, shape)
    return lists


def _is_action(given: object) -> bool:
    """Whether `given`, which may come from the user's code, is an action whose fields have their types."""
    return (
        isinstance(given, Action)
        and isinstance(given.kind, ActionKind)
        and isinstance(given.span, Integral)
        and isinstance(given.chunk, Integral)
        and isinstance(given.units, range)
    )


def _check(lists: Sequence[Sequence[Action]], shape: RoundShape) -> None:
    """Check that each chunk passes each span exactly once: forward and, if the span trains, backward.

    Raises:
        ScheduleError: the lists lack a computation, or have one too many, or one of another worker's span.
    """
    if len(lists) != shape.workers:
        raise ScheduleError(f"the schedule must return a list for each of {shape.workers} workers, not {len(lists)}")
    found: dict[tuple[int, int], list[ActionKind]] = defaultdict(list)
    prefixes: dict[int, list[tuple[int, range]]] = defaultdict(list)
    for worker, actions in enumerate(lists):
        for action in actions:
            if action.kind is ActionKind.PREFIX:
                prefixes[action.chunk].append((worker, action.units))
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
    _check_prefixes(prefixes, shape)


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


def _check_prefixes(prefixes: Mapping[int, Sequence[tuple[int, range]]], shape: RoundShape) -> None:
    """Check that for each chunk of `shape.prefixes` one worker runs all frozen units, in order.

    Raises:
        ScheduleError: other chunks have `PREFIX` actions, or a chunk's frozen units run otherwise.
    """
    if sorted(prefixes) != list(shape.prefixes):
        raise ScheduleError(f"frozen units run for the chunks {sorted(prefixes)}, not for {list(shape.prefixes)}")
    for chunk, parts in prefixes.items():
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
    # Begin with all workers that have something to compute. Computations run in simulated time, so that messages stand
    # in the order in which they begin.
    operations: list[list[Operation]] = [[] for _ in lists]
    made: dict[Value, float] = {}  # when each value is ready
    place = [0] * len(lists)
    waiting: dict[Value, int] = {}  # the worker that waits for a value
    ready = [(0.0, worker) for worker, actions in enumerate(lists) if actions]
    while ready:
        # Take the worker that is free first. Let it wait if the input of its next computation is not there yet.
        now, worker = heapq.heappop(ready)
        action = lists[worker][place[worker]]
        value = input_of(action, shape)
        if value is not None and value not in made:
            waiting[value] = worker
            continue
        start = max(now, made.get(value, 0.0) if value is not None else 0.0)
        if start > now:  # other workers may have a computation before that
            heapq.heappush(ready, (start, worker))
            continue
        # Append the computation. Its worker is free again once it ends.
        end = start + _TURNS[action.kind]
        operations[worker].append(action)
        place[worker] += 1
        if place[worker] < len(lists[worker]):
            heapq.heappush(ready, (end, worker))
        # If another worker takes the output, append the send and the receive. Wake a worker that waits for it.
        output = output_of(action, shape)
        if output is not None:
            made[output] = end
            taker = shape.owners[output.span]
            if taker != worker:
                operations[worker].append(Send(output, taker))
                operations[taker].append(Receive(output, worker))
            if output in waiting:
                heapq.heappush(ready, (end, waiting.pop(output)))
    # A worker that is not at the end of its list waits for a value that no worker makes.
    stuck = [
        f"worker {worker} at {mine[at]}"
        for worker, (mine, at) in enumerate(zip(lists, place, strict=True))
        if mine[at:]
    ]
    if stuck:
        raise ScheduleError(f"these computations wait for inputs that are never produced: {', '.join(stuck)}")
    return tuple(map(tuple, operations))
