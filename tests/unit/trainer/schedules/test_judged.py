"""Every generator's lists are right, by a judge that knows nothing of ours, and the judge refuses broken ones."""

import ast
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import pipelining

from pipetransformer.partition import Cut
from pipetransformer.schedules import (
    Action,
    Asynchronous,
    GPipe,
    OneForwardOneBackward,
    Operation,
    Receive,
    RoundShape,
    Schedule,
    ScheduleError,
    Send,
    planned,
)
from pipetransformer.schedules.from_torch import FromTorch, Interleaved, ZeroBubble, ZeroBubbleV
from pipetransformer.schedules.operations import input_of
from tests.testkit.trainer import judge_schedule, schedule_mutants
from tests.testkit.trainer.judge_schedule import judge
from tests.testkit.trainer.judged_schedules import MOST_WORKERS, document, generators, owners_of, shape_of
from tests.testkit.trainer.schedule_mutants import in_a_circle, mutants


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Schedule, RoundShape]:
    """A round of any generator, with a frozen prefix anywhere."""
    schedule, spans = draw(st.sampled_from(generators()))
    workers = draw(st.integers(1, MOST_WORKERS))
    owners = owners_of(schedule, spans, workers)
    return schedule, shape_of(schedule, owners, draw(st.integers(1, 4 * workers)), draw(st.integers(0, len(owners))))


def written(schedule: Schedule, owners: tuple[int, ...], chunks: int, frozen: int = 0) -> str:
    shape = RoundShape(owners, chunks, frozen)
    return document(planned(schedule, shape), shape)


STEPS = RoundShape((0, 1, 2), 6, 1, steps=(2, 1, 3))


def some_rounds() -> list[str]:
    """Rounds whose mutants are judged: more than one message a pair, a ring of workers, halves, frozen spans."""
    return [
        written(GPipe(), (0, 1, 2), 3),
        written(OneForwardOneBackward(), (0, 1, 2, 3), 6, 1),
        written(Interleaved(2), (0, 1, 2, 0, 1, 2), 6, 2),
        written(Interleaved(3), (0, 1) * 3, 4),
        written(ZeroBubble(2), (0, 1, 2, 0, 1, 2), 6),
        written(ZeroBubbleV(), (0, 1, 2, 3, 3, 2, 1, 0), 8, 3),
        document(planned(Asynchronous(), STEPS), STEPS),
    ]


@settings(max_examples=400, deadline=None)
@given(rounds())
def test_every_list_that_a_generator_gives_is_right(round_: tuple[Schedule, RoundShape]) -> None:
    schedule, shape = round_
    try:
        lists = planned(schedule, shape)
    except ScheduleError:
        return  # which rounds are refused is in test_from_torch.py
    assert judge(document(lists, shape)).faults == []


@settings(max_examples=200, deadline=None)
@given(rounds())
def test_only_pairs_that_a_regroup_has_opened_send_to_each_other(round_: tuple[Schedule, RoundShape]) -> None:
    schedule, shape = round_
    try:
        lists = planned(schedule, shape)
    except ScheduleError:
        return
    opened = Cut([range(number, number + 1) for number in range(len(shape.owners))], 1, shape.owners).pairs
    sent = {(worker, one.peer) for worker, mine in enumerate(lists) for one in mine if isinstance(one, Send)}
    assert {(min(pair), max(pair)) for pair in sent} <= opened


@pytest.mark.parametrize("number", range(7))
def test_every_mutant_is_refused(number: int) -> None:
    read = some_rounds()[number]
    assert not judge(read).faults and not in_a_circle(read)
    kinds: Counter[str] = Counter()
    for seed in range(5):
        for reason, mutant in mutants(read, random.Random(seed)):
            assert judge(mutant).faults, (reason, mutant)
            kinds[reason.split("]")[-1]] += 1
    assert kinds.total() >= 50
    assert len(kinds) >= 11, kinds


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(some_rounds()), st.data())
def test_the_judge_agrees_with_a_sort_about_two_operations_that_change_places(read: str, data: st.DataObject) -> None:
    """Many such lists are still right, and the judge must not refuse those."""
    broken = json.loads(read)
    mine = broken["lists"][data.draw(st.integers(0, len(broken["lists"]) - 1))]
    first, second = data.draw(st.integers(0, len(mine) - 1)), data.draw(st.integers(0, len(mine) - 1))
    mine[first], mine[second] = mine[second], mine[first]
    wrong = not schedule_mutants.same_ends(broken) or in_a_circle(json.dumps(broken))
    assert bool(judge(json.dumps(broken)).faults) == wrong


Orders = list[list[Operation]]


def received_on_need(orders: Orders, shape: RoundShape) -> Orders:
    """A planner that posts each receive right before the computation that needs it."""
    found: Orders = []
    for mine in orders:
        receives = {one.value: one for one in mine if isinstance(one, Receive)}
        found.append([])
        for one in mine:
            if isinstance(one, Action) and (value := input_of(one, shape)) in receives:
                found[-1].append(receives[value])
            if not isinstance(one, Receive):
                found[-1].append(one)
    return found


def received_at_once(orders: Orders, shape: RoundShape) -> Orders:
    """A planner that posts all receives when the round begins."""
    return [sorted(mine, key=lambda one: not isinstance(one, Receive)) for mine in orders]


def sent_one_later(orders: Orders, shape: RoundShape) -> Orders:
    """A planner that sends a value only after the worker's next computation."""
    found: Orders = []
    for mine in orders:
        found.append([])
        late: list[Operation] = []
        for one in mine:
            if isinstance(one, Send):
                late.append(one)
                continue
            found[-1].append(one)
            if isinstance(one, Action):
                found[-1] += late
                late = []
        found[-1] += late
    return found


def sent_too_early(orders: Orders, shape: RoundShape) -> Orders:
    """A planner that issues a send before the computation that makes its value."""
    found: Orders = []
    for mine in orders:
        found.append([])
        for one in mine:
            if isinstance(one, Send):
                found[-1].insert(len(found[-1]) - 1, one)
            else:
                found[-1].append(one)
    return found


#: Generators, spans of each worker, and pairs of workers whose ends disagree if receives are posted on need.
OUT_OF_ORDER: list[tuple[Schedule, int, int]] = [
    (OneForwardOneBackward(), 1, 3),
    (Interleaved(2), 2, 4),
    (ZeroBubble(2), 2, 4),
    (ZeroBubbleV(), 2, 3),
    (FromTorch(pipelining.ScheduleDualPipeV, 2), 2, 3),
]


@pytest.mark.parametrize(("schedule", "spans", "pairs"), OUT_OF_ORDER, ids=lambda value: str(value))
def test_right_lists_with_their_messages_in_a_wrong_order_are_refused(
    schedule: Schedule, spans: int, pairs: int
) -> None:
    shape = RoundShape(owners_of(schedule, spans, 4), 8)
    right: Orders = [list(mine) for mine in planned(schedule, shape)]
    assert judge(document(right, shape)).faults == []

    faults = judge(document(received_on_need(right, shape), shape)).faults

    assert len(faults) == 2 * pairs, faults  # each end says so
    assert all("do not issue the same messages in the same order" in fault for fault in faults)


@settings(max_examples=200, deadline=None)
@given(rounds(), st.sampled_from([received_on_need, received_at_once, sent_one_later, sent_too_early]))
def test_the_judge_agrees_with_a_sort_about_other_planners(
    round_: tuple[Schedule, RoundShape], planner: Callable[[Orders, RoundShape], Sequence[Sequence[Operation]]]
) -> None:
    schedule, shape = round_
    try:
        right: Orders = [list(mine) for mine in planned(schedule, shape)]
    except ScheduleError:
        return
    read = document(planner(right, shape), shape)
    wrong = not schedule_mutants.same_ends(json.loads(read)) or in_a_circle(read)
    assert bool(judge(read).faults) == wrong


def test_the_judge_imports_only_the_standard_library() -> None:
    assert judge_schedule.__file__
    imported = set()
    for node in ast.walk(ast.parse(Path(judge_schedule.__file__).read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module))
    assert imported and {name.split(".")[0] for name in imported} <= sys.stdlib_module_names


def test_chunks_in_flight_are_counted_by_worker() -> None:
    assert judge(written(GPipe(), (0, 1, 2), 5)).in_flight == [5, 5, 5]
    assert judge(written(OneForwardOneBackward(), (0, 1, 2), 5)).in_flight == [3, 2, 1]
    assert judge(written(OneForwardOneBackward(), (0, 1, 2), 5, 1)).in_flight == [0, 2, 1]


def one_worker(*operations: list[Any], **options: Any) -> str:
    return json.dumps({"owners": [0], "chunks": 2, "first_trained": 0, "lists": [operations], **options})


def test_versions_of_weights_are_those_that_each_computation_sees() -> None:
    """Asynchronous 1F1B: the second chunk went forward before the first one's step."""
    operations = ["F", 0, 0], ["F", 0, 1], ["B", 0, 0], ["S", 0, 0], ["B", 0, 1], ["S", 0, 1]
    verdict = judge(one_worker(*operations, steps=[1, 1]))
    assert verdict.faults == []
    assert verdict.versions == {(0, 0): {"F": 0, "B": 0}, (0, 1): {"F": 0, "B": 1}}


def test_slices_go_forward_in_order_and_backward_in_reverse() -> None:
    forwards, backwards = (["F", 0, 0], ["F", 0, 1]), (["B", 0, 1], ["B", 0, 0])
    assert judge(one_worker(*forwards, *backwards, slices=2)).faults == []
    (wrong, _) = judge(one_worker(*forwards, *reversed(backwards), slices=2)).faults
    assert wrong == "worker 0 computes B of slice 0 of micro-batch 0 on span 0, where slice 1 is next"
    assert judge(one_worker(*reversed(forwards), *backwards, slices=2)).faults


def test_a_circle_is_found_that_only_sends_without_buffers_have() -> None:
    """Three workers that each send before they receive, while both ends of each pair agree."""
    first: list[Any] = []
    second: list[Any] = []
    third: list[Any] = []
    for chunk in range(3):
        first += [["F", 0, chunk], ["send", "a", 1, chunk, 1]]
        second += [["receive", "a", 1, chunk, 0], ["F", 1, chunk], ["send", "a", 2, chunk, 2]]
        third += [["receive", "a", 2, chunk, 1], ["F", 2, chunk], ["send", "a", 3, chunk, 0]]
    for chunk in range(3):
        first += [["receive", "a", 3, chunk, 2], ["F", 3, chunk]]
    round_ = {"owners": [0, 1, 2, 0], "chunks": 3, "first_trained": 4, "lists": [first, second, third]}
    faults = judge(json.dumps(round_)).faults
    assert len(faults) == 3
    assert all("waits for ever" in fault and "if every send waits" in fault for fault in faults)
    assert in_a_circle(json.dumps(round_))
