"""Frozen forwards of the next round fill the idle time of this one, and each frozen unit runs once for each chunk."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipetransformer.partition.contiguous import partition
from pipetransformer.schedules import (
    Action,
    ActionKind,
    Ahead,
    GPipe,
    OneForwardOneBackward,
    Operation,
    Receive,
    RoundSeconds,
    RoundShape,
    Schedule,
    ScheduleError,
    Send,
    Value,
    planned,
)
from pipetransformer.schedules.operations import input_of
from pipetransformer.schedules.simulate import RoundCosts, simulate
from tests.testkit.trainer.judge_schedule import judge
from tests.testkit.trainer.judged_schedules import document


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Ahead, RoundShape]:
    """Any layout, durations, holders, and place of the round among the rounds."""
    workers = draw(st.integers(1, 6))
    prefix_units = draw(st.integers(1, 6))
    seconds = st.floats(0.1, 3.0)
    durations = RoundSeconds(
        forward=tuple(draw(seconds) for _ in range(workers)),
        backward=tuple(draw(seconds) for _ in range(workers)),
        prefix=tuple(draw(seconds) for _ in range(prefix_units)),
    )
    holders = tuple(range(draw(st.integers(1, workers))))
    inners: list[Schedule] = [GPipe(), OneForwardOneBackward()]
    inner = draw(st.sampled_from(inners))
    shape = RoundShape(
        tuple(range(workers)),
        chunks=draw(st.integers(1, 3 * workers)),
        prefix_units=prefix_units,
        prefix_made=draw(st.booleans()),
        next_chunks=draw(st.integers(0, 3 * workers)),
    )
    return Ahead(inner, durations, holders), shape


@given(rounds())
def test_each_frozen_unit_runs_once_for_each_chunk_and_in_order_on_one_holder(case: tuple[Ahead, RoundShape]) -> None:
    ahead, shape = case
    units: dict[int, list[int]] = {}
    workers: dict[int, set[int]] = {}
    for worker, actions in enumerate(ahead.actions(shape)):
        for action in prefix_actions(actions):
            assert worker in ahead.holders
            units.setdefault(action.chunk, []).extend(action.units)
            workers.setdefault(action.chunk, set()).add(worker)
    first = shape.chunks if shape.prefix_made else 0
    assert units == {chunk: list(range(shape.prefix_units)) for chunk in range(first, shape.chunks + shape.next_chunks)}
    assert all(len(each) == 1 for each in workers.values())


@given(rounds())
def test_the_units_that_train_keep_the_order_of_the_schedule_inside(case: tuple[Ahead, RoundShape]) -> None:
    ahead, shape = case
    inner = ahead.inner.actions(RoundShape(shape.owners, shape.chunks))
    lists = [[action for action in actions if action.kind is not ActionKind.PREFIX] for actions in ahead.actions(shape)]
    assert lists == [list(actions) for actions in inner]


@given(rounds())
def test_both_ends_of_a_pair_issue_the_same_messages_and_all_that_is_needed_is_there(
    case: tuple[Ahead, RoundShape],
) -> None:
    ahead, shape = case
    orders = planned(ahead, shape)
    for first in range(shape.workers):
        for second in range(first):
            assert messages(orders[first], second) == messages(orders[second], first)
    for worker, operations in enumerate(orders):
        there: set[Value] = set()
        for operation in operations:
            if isinstance(operation, Receive):
                there.add(operation.value)
            elif isinstance(operation, Action):
                value = input_of(operation, shape)
                own = value is not None and value.kind == "Prefix" and worker == shape.owners[0]
                assert value is None or own or value in there, (worker, operation)


@settings(deadline=None)
@given(rounds())
def test_the_judge_accepts_the_lists(case: tuple[Ahead, RoundShape]) -> None:
    ahead, shape = case
    assert judge(document(planned(ahead, shape), shape)).faults == []


@settings(deadline=None)
@given(rounds(), st.data())
def test_the_judge_refuses_a_frozen_forward_left_out_doubled_or_moved(
    case: tuple[Ahead, RoundShape], data: st.DataObject
) -> None:
    ahead, shape = case
    assume(shape.prefixes)
    read = json.loads(document(planned(ahead, shape), shape))
    places = [
        (worker, place)
        for worker, operations in enumerate(read["lists"])
        for place, operation in enumerate(operations)
        if operation[0] == "P"
    ]
    worker, place = data.draw(st.sampled_from(places))
    mine = read["lists"][worker]
    match data.draw(st.sampled_from(["left out", "doubled", "moved", "last"])):
        case "left out":
            del mine[place]
        case "doubled":
            mine.insert(place, mine[place])
        case "moved":
            assume(shape.workers > 1 and mine[place][2:] != [0, shape.prefix_units])
            read["lists"][worker - 1].append(mine.pop(place))
        case "last":
            sends = [each for each in mine if each[:2] == ["send", "p"] and each[3] == mine[place][1]]
            assume(sends)
            mine.append(mine.pop(place))
    assert judge(json.dumps(read)).faults


@given(rounds())
def test_the_first_worker_gets_the_output_of_each_prefix_once(case: tuple[Ahead, RoundShape]) -> None:
    ahead, shape = case
    first = shape.owners[0]
    got = []
    for operation in planned(ahead, shape)[first]:
        if isinstance(operation, Receive) and operation.value.kind == "Prefix":
            got.append(operation.value.chunk)
        elif isinstance(operation, Action) and operation.kind is ActionKind.PREFIX:
            got += [operation.chunk] if operation.units.stop == shape.prefix_units else []
    assert sorted(got) == list(range(shape.chunks if shape.prefix_made else 0, shape.chunks + shape.next_chunks))


@given(rounds())
def test_messages_and_the_simulation_delay_no_round_without_link_time(case: tuple[Ahead, RoundShape]) -> None:
    ahead, shape = case
    costs = replace(RoundCosts.by_span(ahead.seconds.forward, ahead.seconds.backward), prefix=ahead.seconds.prefix)
    seconds = simulate(planned(ahead, shape), shape, costs).seconds
    assert seconds == pytest.approx(ahead._filled(shape).end)


@given(rounds())
def test_no_round_of_a_run_is_faster_than_the_bound(case: tuple[Ahead, RoundShape]) -> None:
    ahead, shape = case
    steady = replace(shape, prefix_made=True, next_chunks=shape.chunks)
    assert seconds_of(ahead, steady) >= ahead.bound_seconds(steady) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("layers", "workers", "frozen", "chunks", "expected", "bound"),
    [
        (24, 4, 12, 4, 62, 62),
        (24, 4, 12, 8, 98, 98),
        (24, 4, 12, 16, 192, 188),
        (24, 4, 18, 4, 42, 35),
        (24, 4, 18, 8, 78, 70),
        (24, 4, 18, 16, 150, 140),
        (12, 8, 3, 8, 47, 47),
        (12, 8, 3, 16, 87, 87),
        (24, 8, 12, 8, 75, 75),
        (24, 8, 12, 16, 123, 123),
        (24, 4, 6, 4, 95, 95),
        (24, 4, 6, 8, 155, 155),
    ],
)
def test_idle_time_hides_the_frozen_forwards_down_to_the_bound(
    layers: int, workers: int, frozen: int, chunks: int, expected: int, bound: int
) -> None:
    """A forward of one layer takes 1, its backward 2, and 1 in the first layer that trains."""
    costs = [2.0, *[3.0] * (layers - frozen - 1)]
    cut = partition(costs, workers)
    seconds = RoundSeconds(
        forward=tuple(float(len(span)) for span in cut),
        backward=tuple(2.0 * len(span) - (span.start == 0) for span in cut),
        prefix=(1.0,) * frozen,
    )
    ahead = Ahead(OneForwardOneBackward(), seconds, tuple(range(workers)))
    shape = RoundShape(tuple(range(workers)), chunks, prefix_units=frozen, prefix_made=True, next_chunks=chunks)
    assert seconds_of(ahead, shape) == expected
    assert ahead.bound_seconds(shape) == bound


def test_frozen_forwards_of_a_chunk_that_follow_each_other_are_one_action() -> None:
    ahead = Ahead(GPipe(), RoundSeconds((1.0,), (2.0,), (1.0, 1.0, 1.0)), (0,))
    shape = RoundShape((0,), 1, prefix_units=3, prefix_made=True, next_chunks=1)
    assert ahead.actions(shape)[0][-1] == Action(ActionKind.PREFIX, 0, chunk=1, units=range(3))


def test_a_round_whose_prefix_was_not_made_makes_it_first_on_all_holders() -> None:
    ahead = Ahead(OneForwardOneBackward(), RoundSeconds((1.0,) * 4, (2.0,) * 4, (1.0,) * 4), (0, 1, 2, 3))
    lists = ahead.actions(RoundShape((0, 1, 2, 3), 4, prefix_units=4))
    assert [actions[0] for actions in lists] == [
        Action(ActionKind.PREFIX, 0, chunk=chunk, units=range(4)) for chunk in range(4)
    ]


class Fixed(tuple[tuple[Action, ...], ...]):
    """A schedule that always has these lists."""

    def actions(self, shape: RoundShape) -> "Fixed":
        return self


def test_a_schedule_that_leaves_a_frozen_layer_out_is_refused() -> None:
    ahead = Ahead(GPipe(), RoundSeconds((1.0,), (2.0,), (1.0, 1.0, 1.0)), (0,))
    shape = RoundShape((0,), 1, prefix_units=3, prefix_made=True, next_chunks=1)
    *others, last = ahead.actions(shape)[0]
    assert planned(Fixed([(*others, last)]), shape)
    for left in (range(2), range(1, 3), range(0)):
        with pytest.raises(ScheduleError, match=r"chunk 1 runs the frozen units .* on the workers \[0\]"):
            planned(Fixed([(*others, replace(last, units=left))]), shape)
    for actions, ran in ((others, r"\[\]"), ([*others, last, replace(last, chunk=0)], r"\[0, 1\]")):
        with pytest.raises(ScheduleError, match=rf"frozen units run for the chunks {ran}, not for \[1\]"):
            planned(Fixed([tuple(actions)]), shape)


def test_a_schedule_that_divides_the_frozen_layers_of_a_chunk_among_workers_is_refused() -> None:
    shape = RoundShape((0, 1), 1, prefix_units=3, prefix_made=True, next_chunks=1)
    first, second = GPipe().actions(shape)
    halves = [Action(ActionKind.PREFIX, 0, chunk=1, units=units) for units in (range(2), range(2, 3))]
    with pytest.raises(ScheduleError, match=r"chunk 1 runs the frozen units \[0, 1, 2\] on the workers \[0, 1\]"):
        planned(Fixed([(*first, halves[0]), (*second, halves[1])]), shape)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (RoundShape((0, 1), 4, slices=2, prefix_units=1), "slices of tokens"),
        (RoundShape((0, 1), 4, first_trained=1, prefix_units=1), "first span trains"),
        (RoundShape((1, 0), 4, prefix_units=1), "does not hold the frozen units"),
    ],
)
def test_a_round_that_cannot_run_ahead_is_refused_with_the_reason(shape: RoundShape, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        Ahead(GPipe(), RoundSeconds((1.0, 1.0), (2.0, 2.0), (1.0,)), (0,)).actions(shape)


def prefix_actions(actions: Sequence[Action]) -> list[Action]:
    return [action for action in actions if action.kind is ActionKind.PREFIX]


def messages(operations: tuple[Operation, ...], peer: int) -> list[Value]:
    """The values that a worker exchanges with `peer`, in order."""
    return [one.value for one in operations if isinstance(one, Send | Receive) and one.peer == peer]


def seconds_of(schedule: Ahead, shape: RoundShape) -> float:
    """Seconds of a round by the simulation, if each computation takes what is expected and messages take no time."""
    seconds = schedule.seconds
    costs = replace(RoundCosts.by_span(seconds.forward, seconds.backward), prefix=seconds.prefix)
    return simulate(schedule.actions(shape), shape, costs).seconds
