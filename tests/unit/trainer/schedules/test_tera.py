"""The lists of TeraPipe: the order of a micro-batch's slices, chunks in flight, and messages that all can issue."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.schedules import (
    Action,
    ActionKind,
    OneForwardOneBackward,
    RoundShape,
    ScheduleError,
    Send,
    TeraPipe,
    planned,
)


@st.composite
def shapes(draw: st.DrawFn) -> RoundShape:
    workers, slices = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    micro_batches, first_trained = draw(st.integers(1, 6)), draw(st.integers(0, workers))
    return RoundShape(tuple(range(workers)), micro_batches * slices, first_trained, slices)


@given(shapes(), st.booleans())
def test_slices_go_forward_in_order_and_backward_from_the_last(shape: RoundShape, in_turns: bool) -> None:
    for span, actions in enumerate(TeraPipe(in_turns).actions(shape)):
        forwards = chunks_of(actions, ActionKind.FORWARD)
        backwards = chunks_of(actions, ActionKind.BACKWARD)
        assert forwards == list(range(shape.chunks))
        assert sorted(backwards) == (forwards if shape.trains(span) else [])
        for first in range(0, len(backwards), shape.slices):
            assert backwards[first : first + shape.slices] == list(reversed(range(first, first + shape.slices)))
        done: set[int] = set()
        for action in actions:
            if action.kind is ActionKind.FORWARD:
                done.add(action.chunk)
            else:  # all slices of the micro-batch have run forward
                start = action.chunk - action.chunk % shape.slices
                assert done.issuperset(range(start, start + shape.slices))


@given(shapes(), st.booleans())
def test_every_worker_can_run_its_list(shape: RoundShape, in_turns: bool) -> None:
    operations = planned(TeraPipe(in_turns), shape)
    assert sum(isinstance(one, Send) for mine in operations for one in mine) == shape.chunks * (
        shape.workers - 1 + max(0, shape.workers - 1 - shape.first_trained)
    )


@given(shapes())
def test_in_turns_a_worker_keeps_few_chunks_in_flight(shape: RoundShape) -> None:
    for span, actions in enumerate(TeraPipe(in_turns=True).actions(shape)):
        in_flight = most = 0
        for action in actions:
            in_flight += 1 if action.kind is ActionKind.FORWARD else -1
            most = max(most, in_flight)
        if shape.trains(span):
            assert most == min(shape.chunks, shape.workers - span + shape.slices - 1)


def test_one_slice_a_micro_batch_in_turns_is_1f1b() -> None:
    shape = RoundShape((0, 1, 2), chunks=5, first_trained=1)
    assert TeraPipe(in_turns=True).actions(shape) == OneForwardOneBackward().actions(shape)


def test_a_worker_may_have_several_spans_unless_it_works_in_turns() -> None:
    shape = RoundShape((0, 1, 0), chunks=4, slices=2)
    assert len(planned(TeraPipe(), shape)) == 2
    with pytest.raises(ScheduleError, match="one span a worker"):
        TeraPipe(in_turns=True).actions(shape)


def test_chunks_that_are_no_whole_micro_batches_are_refused() -> None:
    with pytest.raises(ScheduleError, match="5 chunks are not whole micro-batches of 2 slices"):
        TeraPipe().actions(RoundShape((0,), chunks=5, slices=2))


def chunks_of(actions: list[Action], kind: ActionKind) -> list[int]:
    return [action.chunk for action in actions if action.kind is kind]
