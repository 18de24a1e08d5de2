"""Both ends of each pair of workers issue the same sequence of messages, and every computation has what it needs."""

import re
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.schedules import (
    Action,
    ActionKind,
    GPipe,
    OneForwardOneBackward,
    Operation,
    Receive,
    RoundShape,
    Schedule,
    ScheduleError,
    Send,
    Value,
    planned,
)
from pipetransformer.schedules.operations import input_of
from pipetransformer.schedules.order import add_messages


@st.composite
def shapes(draw: st.DrawFn) -> RoundShape:
    workers = draw(st.integers(1, 8))
    first_trained = draw(st.integers(0, workers))
    return RoundShape(tuple(range(workers)), draw(st.integers(1, 4 * workers)), first_trained)


@given(shapes(), st.sampled_from([GPipe(), OneForwardOneBackward()]))
def test_both_ends_of_a_pair_issue_the_same_messages(shape: RoundShape, schedule: Schedule) -> None:
    orders = planned(schedule, shape)
    for first in range(shape.workers):
        for second in range(first):
            assert messages(orders[first], second) == messages(orders[second], first)


@given(shapes(), st.sampled_from([GPipe(), OneForwardOneBackward()]))
def test_a_worker_has_posted_the_receive_of_what_it_computes_with(shape: RoundShape, schedule: Schedule) -> None:
    for worker, operations in enumerate(planned(schedule, shape)):
        posted: set[Value] = set()
        for operation in operations:
            if isinstance(operation, Receive):
                posted.add(operation.value)
            elif isinstance(operation, Action):
                value = input_of(operation, shape)
                assert value is None or value in posted, (worker, operation)


@given(shapes())
def test_1f1b_keeps_at_most_k_minus_k_chunks_in_flight(shape: RoundShape) -> None:
    for span, actions in enumerate(OneForwardOneBackward().actions(shape)):
        in_flight = most = 0
        for action in actions:
            in_flight += 1 if action.kind is ActionKind.FORWARD else -1
            most = max(most, in_flight)
        if shape.trains(span):
            assert most == min(shape.chunks, shape.workers - span)
            assert in_flight == 0


def test_lists_that_wait_for_each_other_are_refused_with_the_place() -> None:
    shape = RoundShape((0, 1), chunks=1)
    backward_first = [
        [Action(ActionKind.BACKWARD, 0, 0), Action(ActionKind.FORWARD, 0, 0)],
        [Action(ActionKind.FORWARD, 1, 0), Action(ActionKind.BACKWARD, 1, 0)],
    ]
    with pytest.raises(ScheduleError, match=r"worker 0 at .*BACKWARD.*worker 1 at .*FORWARD"):
        add_messages(backward_first, shape)


def messages(operations: tuple[Operation, ...], peer: int) -> list[Value]:
    """The values that a worker exchanges with `peer`, in order."""
    return [one.value for one in operations if isinstance(one, Send | Receive) and one.peer == peer]


@dataclass(frozen=True)
class Listed:
    lists: tuple[tuple[Action, ...], ...]

    def actions(self, shape: RoundShape) -> tuple[tuple[Action, ...], ...]:
        return self.lists


FORWARD, BACKWARD = Action(ActionKind.FORWARD, 0, 0), Action(ActionKind.BACKWARD, 0, 0)


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        ([FORWARD], "span 0 computes Forward for chunk 0 of 1"),
        ([BACKWARD, FORWARD], "span 0 computes Backward, Forward for chunk 0 of 1"),
        ([FORWARD, FORWARD, BACKWARD], "span 0 computes Forward, Forward, Backward for chunk 0 of 1"),
        ([], "span 0 computes nothing for chunk 0 of 1"),
        ([FORWARD, BACKWARD, replace(FORWARD, chunk=1)], "span 0 computes chunk 1, but the number of chunks is 1"),
        ([FORWARD, BACKWARD, replace(FORWARD, span=1)], "the list of worker 0 computes span 1, which it does not own"),
    ],
)
def test_a_schedule_that_leaves_something_out_or_does_it_twice_is_refused(actions: list[Action], words: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{words}$"):
        planned(Listed((tuple(actions),)), RoundShape((0,), 1))


def test_a_schedule_with_too_few_lists_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"^the schedule must return a list for each of 2 workers, not 1$"):
        planned(Listed(((FORWARD, BACKWARD),)), RoundShape((0, 1), 1))


STEP_0, STEP_1 = Action(ActionKind.STEP, 0, 0), Action(ActionKind.STEP, 0, 1)
SECOND = [replace(FORWARD, chunk=1), replace(BACKWARD, chunk=1)]
HALVES = [replace(BACKWARD, kind=kind) for kind in (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)]


@pytest.mark.parametrize(
    ("actions", "found"),
    [
        ([FORWARD, BACKWARD, STEP_0, *SECOND], "[(0, 1)]"),
        ([FORWARD, STEP_0, BACKWARD, *SECOND, STEP_1], "[(0, 0), (1, 2)]"),
        ([FORWARD, BACKWARD, *SECOND, STEP_0, STEP_1], "[(0, 2), (1, 2)]"),
        ([FORWARD, BACKWARD, STEP_1, *SECOND, STEP_0], "[(1, 1), (0, 2)]"),
    ],
)
def test_a_schedule_that_steps_at_another_place_is_refused(actions: list[Action], found: str) -> None:
    shape = RoundShape((0,), 2, steps=(1, 1))
    assert planned(Listed(((FORWARD, *HALVES, STEP_0, *SECOND, STEP_1),)), shape)
    with pytest.raises(ScheduleError, match=re.escape(f"at {found}, not at [(0, 1), (1, 2)]")):
        planned(Listed((tuple(actions),)), shape)
