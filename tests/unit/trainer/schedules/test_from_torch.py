"""torch's classes give lists without a process group, and say in words which rounds they cannot run."""

from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    ScheduleDualPipeV,
    _Action,
    _ComputationType,
)

from pipetransformer.schedules import (
    Action,
    ActionKind,
    GPipe,
    OneForwardOneBackward,
    RoundShape,
    ScheduleError,
    planned,
)
from pipetransformer.schedules.from_torch import FromTorch, Interleaved, ZeroBubble, ZeroBubbleV, _made, _translated
from pipetransformer.schedules.order import add_messages
from tests.testkit.trainer.judge_schedule import judge
from tests.testkit.trainer.judged_schedules import document

FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD
INPUT, WEIGHT = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT


class StepsAlone(pipelining.Schedule1F1B):
    """Overrides only what runs."""

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        pass


class Written(pipelining.ScheduleGPipe):
    """Writes its order down: one worker, whose second chunk comes first."""

    order: tuple[str, ...] = ("0F1", "0F0", "0B0", "0B1")

    def _get_pipeline_order(self) -> dict[int, list[_Action | None]]:
        return {0: [None, *(_Action.from_str(action) for action in self.order)]}


class Forgetful(Written):
    order = ("0F1", "0F0", "0B0")


class Sending(Written):
    order = ("0F1", "0SEND_F1")


class Empty(PipelineScheduleMulti):
    """Gives no order."""


def test_what_is_read_of_torch_and_is_not_public_is_there() -> None:
    """If this fails, look at `_made` and `_translated`: lists come from names that torch may change."""
    assert {kind.value for kind in _ComputationType} >= {"F", "B", "I", "W", "OVERLAP_F_B", "REDUCE_GRAD"}
    assert {"computation_type", "stage_index", "microbatch_index", "sub_actions"} <= set(_Action._fields)
    assert hasattr(ScheduleDualPipeV, "_prepare_schedule_with_comms")
    assert hasattr(pipelining.Schedule1F1B, "_get_pipeline_order")


@pytest.mark.parametrize(
    ("schedule", "ours"),
    [(pipelining.ScheduleGPipe, GPipe()), (pipelining.Schedule1F1B, OneForwardOneBackward())],
)
def test_schedules_with_one_span_a_worker_have_the_work_of_ours(schedule: type, ours: Any) -> None:
    shape = RoundShape((0, 1, 2, 3), chunks=6, first_trained=1)
    lists, expected = FromTorch(schedule).actions(shape), ours.actions(shape)
    assert [sorted(map(str, mine)) for mine in lists] == [sorted(map(str, mine)) for mine in expected]
    add_messages(lists, shape)


def test_1f1b_of_torch_is_ours_because_its_own_order_forgets_a_chunk() -> None:
    """Its list is wrong in torch 2.13, what it runs is not. When this fails, `_lists` needs no exception any longer."""
    shape = RoundShape((0, 1), chunks=4)
    order = _made(pipelining.Schedule1F1B, 1, 2, 4).pipeline_order
    with pytest.raises(ScheduleError, match="wait for inputs that are never produced"):
        add_messages([list(_translated(order[worker])) for worker in range(2)], shape)
    assert FromTorch(pipelining.Schedule1F1B).actions(shape) == OneForwardOneBackward().actions(shape)


def test_named_schedules_place_their_spans() -> None:
    assert Interleaved(3).owners(2) == (0, 1, 0, 1, 0, 1)
    assert ZeroBubble().owners(3) == (0, 1, 2, 0, 1, 2)
    assert ZeroBubbleV().owners(3) == (0, 1, 2, 2, 1, 0)
    for schedule, of_torch in (
        (Interleaved(3), FromTorch(pipelining.ScheduleInterleaved1F1B, 3)),
        (ZeroBubble(2), FromTorch(pipelining.ScheduleInterleavedZeroBubble, 2)),
        (ZeroBubbleV(), FromTorch(pipelining.ScheduleZBVZeroBubble, 2)),
    ):
        assert schedule.owners(4) == of_torch.owners(4)


def test_a_frozen_prefix_runs_forwards_and_the_span_after_it_whole_backwards() -> None:
    whole = RoundShape((0, 1, 0, 1), chunks=4)
    behind_one = RoundShape((0, 1, 0, 1), chunks=4, first_trained=1)
    first, second = ZeroBubble(2).actions(whole)
    frozen_first, frozen_second = ZeroBubble(2).actions(behind_one)
    assert {action.kind for action in first if action.span == 0} == {FORWARD, BACKWARD}
    assert {action.kind for action in second if action.span == 1} == {FORWARD, INPUT, WEIGHT}
    assert frozen_first == [action for action in first if action.span != 0 or action.kind is FORWARD]
    kept = [action for action in second if (action.span, action.kind) != (1, INPUT)]
    assert frozen_second == [
        Action(BACKWARD, 1, action.chunk) if (action.span, action.kind) == (1, WEIGHT) else action for action in kept
    ]


def test_an_evaluation_runs_forwards_alone() -> None:
    for schedule in (Interleaved(2), ZeroBubble(2), ZeroBubbleV()):
        shape = RoundShape(schedule.owners(2), chunks=4, first_trained=4)
        assert {action.kind for mine in schedule.actions(shape) for action in mine} == {FORWARD}


def test_actions_that_torch_overlaps_are_two() -> None:
    schedule = FromTorch(pipelining.ScheduleDualPipeV, 2)
    shape = RoundShape(schedule.owners(2), chunks=6)
    planned(schedule, shape)  # which checks that nothing is left out


def test_a_class_that_writes_its_order_down_is_taken_at_its_word() -> None:
    assert FromTorch(Written).actions(RoundShape((0,), chunks=2)) == [
        [Action(FORWARD, 0, 1), Action(FORWARD, 0, 0), Action(BACKWARD, 0, 0), Action(BACKWARD, 0, 1)]
    ]


@pytest.mark.parametrize(
    ("schedule", "chunks", "whole"),
    [
        (Interleaved(2), 9, 10),
        (Interleaved(3), 29, 32),
        (ZeroBubble(2), 11, 12),
        (FromTorch(pipelining.ScheduleDualPipeV, 2), 3, 8),
    ],
    ids=str,
)
def test_a_short_round_runs_the_order_of_a_longer_one_and_keeps_no_more_chunks(
    schedule: Any, chunks: int, whole: int
) -> None:
    """As at the end of an epoch. GPipe would keep them all."""
    shape = RoundShape(schedule.owners(4), chunks, first_trained=1)

    lists, longer = schedule.actions(shape), schedule.actions(replace(shape, chunks=whole))

    assert lists == [[action for action in mine if action.chunk < chunks] for mine in longer]
    judged = [judge(document(planned(each, shape), shape)) for each in (schedule, GPipe())]
    assert judged[0].faults == []
    if chunks > 4:
        assert max(judged[0].in_flight) < 0.8 * max(judged[1].in_flight)


@pytest.mark.parametrize(
    ("schedule", "spans", "said"),
    [
        (dict, 1, "is not a schedule class of torch.distributed.pipelining"),
        (StepsAlone, 1, "StepsAlone has no pipeline_order of its own"),
        (pipelining.ScheduleGPipe, 2, "GPipe needs 1 span"),
        (pipelining.ScheduleZBVZeroBubble, 3, "ZBVZeroBubble needs 2 span"),
        (pipelining.ScheduleInterleaved1F1B, 0, "needs at least 1 span"),
    ],
)
def test_a_class_that_gives_no_such_lists_is_refused_before_any_round(schedule: type, spans: int, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        FromTorch(schedule, spans)


@pytest.mark.parametrize(
    ("schedule", "shape", "said"),
    [
        (ZeroBubbleV(), RoundShape((0, 1, 0, 1), 4), r"needs the spans on the workers \(0, 1, 1, 0\)"),
        (Interleaved(2), RoundShape((0, 1), 4), r"needs the spans on the workers \(0, 1, 0, 1\)"),
        (Interleaved(2), RoundShape((0, 1, 0, 1), 4, slices=2), "no order for slices of tokens"),
        (FromTorch(Forgetful), RoundShape((0,), 2), "span 0 computes Forward for chunk 1 of 2"),
        (FromTorch(Sending), RoundShape((0,), 2), "unknown action 0SEND_F1"),
        (FromTorch(Empty), RoundShape((0,), 2), "Empty has no pipeline_order"),
    ],
)
def test_a_round_that_a_schedule_cannot_run_is_refused_in_words(schedule: Any, shape: RoundShape, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        planned(schedule, shape)
