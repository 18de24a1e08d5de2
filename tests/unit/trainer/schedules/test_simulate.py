"""A simulated round takes what formulas and another simulator say, and keeps what its lists keep."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer.schedules import (
    Action,
    ActionKind,
    Ahead,
    GPipe,
    MessageKind,
    OneForwardOneBackward,
    Operation,
    Receive,
    RoundCosts,
    RoundGraph,
    RoundSeconds,
    RoundShape,
    Schedule,
    ScheduleError,
    Send,
    Value,
    planned,
    simulate,
)
from pipetransformer.schedules.operations import input_of, output_of
from pipetransformer.schedules.order import add_messages, lists_of
from tests.testkit.trainer.judged_schedules import generators, owners_of, shape_of
from tests.testkit.trainer.longest_paths import longest_paths
from tests.testkit.yardstick import yardsticks

F, B, I, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT  # noqa: E741

SECONDS = st.floats(0.1, 10).map(lambda value: round(value, 3))


def even(workers: int, chunks: int) -> RoundShape:
    return RoundShape(tuple(range(workers)), chunks)


def at(kind: ActionKind, span: int, chunks: Sequence[int]) -> list[Action]:
    return [Action(kind, span, chunk) for chunk in chunks]


@pytest.mark.parametrize("schedule", [GPipe(), OneForwardOneBackward()], ids=str)
@pytest.mark.parametrize(("workers", "chunks"), [(1, 1), (1, 5), (2, 2), (4, 8), (4, 3), (8, 48)])
def test_equal_stages_take_m_and_k_less_one_turns(schedule: Schedule, workers: int, chunks: int) -> None:
    costs = RoundCosts.by_span([3.0] * workers, [5.0] * workers)
    found = simulate(planned(schedule, even(workers, chunks)), even(workers, chunks), costs)
    assert found.seconds == pytest.approx((chunks + workers - 1) * (3 + 5))
    assert found.idle_share == pytest.approx([(workers - 1) / (chunks + workers - 1)] * workers)
    assert found.busy == pytest.approx([chunks * 8] * workers)


def test_gpipe_with_unequal_stages_waits_for_its_slowest_forward_and_backward() -> None:
    costs = RoundCosts.by_span([1.0, 4.0, 2.0], [3.0, 2.0, 7.0])
    found = simulate(planned(GPipe(), even(3, 6)), even(3, 6), costs)
    assert found.seconds == pytest.approx((1 + 4 + 2) + 5 * 4 + (3 + 2 + 7) + 5 * 7)
    assert found.mean_idle_share == pytest.approx(1 - sum(found.busy) / 3 / found.seconds)


def test_two_spans_a_worker_halve_the_bubble() -> None:
    """Two workers, two spans each, by hand: the depth-first order of Narayanan et al. (2021), section 2.2."""
    shape = RoundShape((0, 1, 0, 1), 4)
    first = [*at(F, 0, [0, 1]), *at(F, 2, [0, 1]), *at(F, 0, [2])]
    first += [*at(B, 2, [0]), *at(F, 0, [3]), *at(B, 2, [1]), *at(F, 2, [2]), *at(B, 0, [0]), *at(F, 2, [3])]
    first += [*at(B, 0, [1]), *at(B, 2, [2, 3]), *at(B, 0, [2, 3])]
    second = [*at(F, 1, [0, 1]), *at(F, 3, [0]), *at(B, 3, [0]), *at(F, 3, [1]), *at(B, 3, [1])]
    second += [*at(F, 1, [2]), *at(B, 1, [0]), *at(F, 1, [3]), *at(B, 1, [1])]
    second += [*at(F, 3, [2]), *at(B, 3, [2]), *at(F, 3, [3]), *at(B, 3, [3]), *at(B, 1, [2, 3])]
    found = simulate([first, second], shape, RoundCosts.by_span([1.0] * 4, [1.0] * 4))
    plain = simulate(OneForwardOneBackward().actions(even(2, 4)), even(2, 4), RoundCosts.by_span([2.0] * 2, [2.0] * 2))
    work = 4 * 2 * (1 + 1)
    assert plain.seconds - work == pytest.approx(4)
    assert found.seconds - work == pytest.approx(4 / 2)


def test_weight_gradients_fill_the_wait_for_the_next_gradient() -> None:
    shape = even(2, 2)
    whole = [[*at(F, 0, [0, 1]), *at(B, 0, [0, 1])], [*at(F, 1, [0]), *at(B, 1, [0]), *at(F, 1, [1]), *at(B, 1, [1])]]
    halves = [
        whole[0],
        [
            *at(F, 1, [0]),
            *at(I, 1, [0]),
            *at(F, 1, [1]),
            *at(I, 1, [1]),
            *at(W, 1, [0, 1]),
        ],
    ]
    costs = RoundCosts.by_span([1.0, 1.0], [2.0, 3.0], [1.0, 2.0], saved_bytes=[1.0, 1.0])
    assert simulate(whole, shape, costs).seconds == pytest.approx(1 + 4 * 2 + 2)
    found = simulate(halves, shape, costs)
    assert found.seconds == pytest.approx(1 + 1 + 1 + 1 + 1 + 2 * 2), "the last worker's weight halves come last"
    assert found.times[0][-1] == pytest.approx((5, 7))
    assert found.peak_bytes == (2, 2), "a chunk is kept until its weight half"


def all_shapes() -> Iterator[tuple[Schedule, RoundShape]]:
    """A round of every generator without and with frozen spans, and rounds with frozen forwards ahead."""
    for schedule, spans in generators():
        owners = owners_of(schedule, spans, 3)
        for frozen in (0, 1):
            yield schedule, shape_of(schedule, owners, 6 * spans, frozen)
    ahead = Ahead(OneForwardOneBackward(), RoundSeconds((2.0,) * 3, (4.0,) * 3, (1.0,) * 6), (0, 1, 2))
    for made in (False, True):
        yield ahead, replace(even(3, 6), prefix_units=6, prefix_made=made, next_chunks=6)


@pytest.mark.parametrize(("schedule", "shape"), list(all_shapes()), ids=str)
def test_a_graph_leads_each_value_from_its_computation_to_the_one_that_needs_it(
    schedule: Schedule, shape: RoundShape
) -> None:
    """`_GraphBuilder` has its own `input_of` and `output_of`, because it must be quick."""
    lists = lists_of(schedule, shape)
    graph = RoundGraph.of(lists, shape)
    nodes: dict[Action, int] = {}
    makers: dict[Value, int] = {}
    messages = set(range(1, len(graph.nodes) + 1))
    sent = 0
    for worker, (actions, own) in enumerate(zip(lists, graph.computations, strict=True)):
        messages -= set(own)
        for action, node in zip(actions, own, strict=True):
            if action.kind is not ActionKind.STEP:
                nodes[action] = node
                if (value := output_of(action, shape)) is not None:
                    makers[value] = node
                    sent += shape.owners[value.span] != worker

    assert len(messages) == sent
    for action, node in nodes.items():
        needed = graph.nodes[node - 1][1]
        made = graph.nodes[needed - 1][0] if needed in messages else needed
        value = input_of(action, shape)
        assert made == (0 if value is None else makers[value]), action


def test_any_action_takes_its_constant_seconds_too() -> None:
    shape, costs = even(4, 8), RoundCosts.by_span([3.0] * 4, [5.0] * 4)
    found = simulate(planned(GPipe(), shape), shape, replace(costs, action_seconds=0.5))
    assert found.seconds == pytest.approx((8 + 3) * (3.5 + 5.5))
    assert found.busy == pytest.approx([8 * 9] * 4)
    ahead = Ahead(GPipe(), RoundSeconds((3.0,) * 4, (5.0,) * 4, (1.0, 1.0)), (0, 1, 2, 3))
    shape = replace(shape, prefix_units=2, prefix_made=True, next_chunks=8)
    lists, costs = ahead.actions(shape), replace(costs, prefix=(1.0, 1.0))
    free, dear = (sum(simulate(lists, shape, replace(costs, action_seconds=each)).busy) for each in (0.0, 0.5))
    assert dear - free == pytest.approx(0.5 * sum(map(len, lists))), "also those that compute frozen units"


def test_a_round_without_backwards_takes_m_and_k_less_one_forwards() -> None:
    shape = replace(even(4, 8), first_trained=4)
    costs = RoundCosts.by_span([2.0] * 4, [1.0] * 4, saved_bytes=[1.0] * 4)
    found = simulate(planned(OneForwardOneBackward(), shape), shape, costs)
    assert found.seconds == pytest.approx((8 + 3) * 2)
    assert found.peak_bytes == (0,) * 4


def test_messages_of_a_pair_pass_one_after_another() -> None:
    """Two chunks that are made at once arrive 10 and 20 seconds later; without the queue both would after 10."""
    shape = RoundShape((0, 1), 2, first_trained=2)
    costs = RoundCosts.by_span([0.0, 1.0], [0.0, 0.0], message_seconds=10.0)
    assert simulate(planned(GPipe(), shape), shape, costs).times[1] == ((10, 11), (20, 21))
    assert simulate(GPipe().actions(shape), shape, costs).times[1] == ((10, 11), (11, 12))


def test_a_message_begins_when_both_ends_have_issued_it() -> None:
    shape = RoundShape((0, 1, 1), 1, first_trained=3)
    value = Value(MessageKind.ACTIVATION, 1, 0)
    computing = [Action(F, 1, 0), Action(F, 2, 0)]
    lists: list[list[Operation]] = [[Action(F, 0, 0), Send(value, 1)], [Receive(value, 0), *computing]]
    costs = RoundCosts.by_span([5.0, 2.0, 3.0], [0.0] * 3, message_seconds=7.0)
    assert simulate(lists, shape, costs).times[1] == ((12, 14), (14, 17))
    with pytest.raises(ScheduleError, match="worker 1 at Action"):
        simulate([lists[0], computing], shape, costs)
    other = Value(MessageKind.ACTIVATION, 1, 1)
    with pytest.raises(ScheduleError, match="issues"):
        simulate([lists[0], [Receive(other, 0), *computing]], shape, costs)


def test_lists_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(ScheduleError, match="wait for values that never come"):
        simulate([at(B, 0, [0]), at(F, 1, [0])], even(2, 1), RoundCosts.by_span([1.0] * 2, [1.0] * 2))


def test_slices_have_their_own_seconds() -> None:
    shape = RoundShape((0, 1), 4, first_trained=2, slices=2)
    seconds = {(F, 0): (1.0, 2.0), (F, 1): (3.0, 5.0)}
    found = simulate(GPipe().actions(shape), shape, RoundCosts(seconds, (0.0, 1.0)))
    assert found.times[0] == ((0, 1), (1, 3), (3, 4), (4, 6))
    assert found.times[1] == ((1, 4), (4, 9), (9, 12), (12, 17))


def test_a_worker_keeps_what_its_chunks_in_flight_keep() -> None:
    shape = replace(even(4, 8), first_trained=1)
    costs = RoundCosts.by_span([1.0] * 4, [2.0] * 4, saved_bytes=[100, 10, 7, 5])
    assert simulate(planned(OneForwardOneBackward(), shape), shape, costs).peak_bytes == (0, 30, 14, 5)
    assert simulate(planned(GPipe(), shape), shape, costs).peak_bytes == (0, 80, 56, 40)


@pytest.mark.parametrize("holders", [(0,), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("made", [False, True])
def test_frozen_forwards_ahead_take_the_time_that_their_schedule_plans(holders: tuple[int, ...], made: bool) -> None:
    seconds = RoundSeconds((3.0,) * 4, (6.0,) * 4, (1.0,) * 12)
    shape = replace(even(4, 8), prefix_units=12, prefix_made=made, next_chunks=8)
    schedule = Ahead(OneForwardOneBackward(), seconds, holders)
    costs = RoundCosts.by_span(seconds.forward, seconds.backward, prefix=seconds.prefix)
    found = simulate(schedule.actions(shape), shape, costs)
    assert sum(found.busy) == pytest.approx(4 * 8 * 9 + 8 * 12 * (1 if made else 2))
    if made:
        assert schedule.bound_seconds(shape) <= found.seconds
    if made and len(holders) == 4:
        assert found.seconds <= 1.1 * schedule.bound_seconds(shape)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[list[Action]], RoundShape, RoundCosts]:
    """Any lists that can run: computations whose inputs are there, in an order that is drawn."""
    workers = draw(st.integers(1, 4))
    owners = tuple(draw(st.permutations([*range(workers), *draw(st.lists(st.integers(0, workers - 1), max_size=4))])))
    shape = RoundShape(owners, draw(st.integers(1, 5)), draw(st.integers(0, len(owners))))
    spans = len(owners)
    split = draw(st.booleans())
    lists: list[list[Action]] = [[] for _ in range(workers)]
    able = {Action(F, 0, chunk) for chunk in range(shape.chunks)}
    while able:
        action = draw(st.sampled_from(sorted(able, key=lambda one: (one.kind, one.span, one.chunk))))
        able.remove(action)
        lists[owners[action.span]].append(action)
        span, chunk = action.span, action.chunk
        halves = split and span > shape.first_trained
        if action.kind is F:
            if span + 1 < spans:
                able.add(Action(F, span + 1, chunk))
            elif shape.trains(span):
                able.add(Action(I if halves else B, span, chunk))
        elif action.kind in (B, I):
            if action.kind is I:
                able.add(Action(W, span, chunk))
            if span > shape.first_trained:
                able.add(Action(I if split and span - 1 > shape.first_trained else B, span - 1, chunk))
    rows = st.lists(SECONDS, min_size=spans, max_size=spans)
    costs = RoundCosts.by_span(
        draw(rows), draw(rows), draw(rows), message_seconds=draw(st.sampled_from([0.0, 0.7])), action_seconds=0.1
    )
    return lists, shape, costs


@settings(deadline=None)
@given(rounds())
def test_every_computation_ends_where_the_longest_path_to_it_does(
    drawn: tuple[list[list[Action]], RoundShape, RoundCosts],
) -> None:
    lists, shape, costs = drawn
    found, ends = simulate(lists, shape, costs), longest_paths(*drawn)
    for actions, times in zip(lists, found.times, strict=True):
        assert [end for _, end in times] == pytest.approx([ends[action] for action in actions])
        assert [end - start for start, end in times] == pytest.approx(
            [costs.seconds[action.kind, action.span][0] + costs.action_seconds for action in actions]
        )
    assert found.seconds == pytest.approx(max(ends.values()))
    assert found.busy == pytest.approx([sum(end - start for start, end in times) for times in found.times])


@settings(deadline=None)
@given(rounds())
def test_messages_of_a_pair_queue_in_any_lists(drawn: tuple[list[list[Action]], RoundShape, RoundCosts]) -> None:
    lists, shape, costs = drawn
    operations = add_messages(lists, shape)
    found, ends = simulate(operations, shape, costs), longest_paths(operations, shape, costs)
    for actions, times in zip(lists, found.times, strict=True):
        assert [end for _, end in times] == pytest.approx([ends[action] for action in actions])


def test_sixteen_workers_and_64_chunks_are_simulated_in_some_milliseconds() -> None:
    shape, costs = even(16, 64), RoundCosts.by_span([1.0] * 16, [2.0] * 16)
    lists = OneForwardOneBackward().actions(shape)
    assert yardsticks(lambda: simulate(lists, shape, costs), times=5) < 6


def test_half_of_a_backward_is_its_weight_gradient_unless_that_was_measured() -> None:
    halves, measured = RoundCosts.by_span([1.0], [4.0]), RoundCosts.by_span([1.0], [4.0], [1.0])
    assert [halves.seconds[kind, 0] for kind in (F, B, I, W)] == [(1.0,), (4.0,), (2.0,), (2.0,)]
    assert [measured.seconds[kind, 0] for kind in (F, B, I, W)] == [(1.0,), (4.0,), (3.0,), (1.0,)]
