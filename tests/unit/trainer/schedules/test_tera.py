"""The lists of TeraPipe: the order of a micro-batch's slices, and messages that all can issue."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.schedules import (
    Action,
    ActionKind,
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


@given(shapes())
def test_slices_go_forward_in_order_and_backward_from_the_last(shape: RoundShape) -> None:
    for span, actions in enumerate(TeraPipe().actions(shape)):
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


@given(shapes())
def test_every_worker_can_run_its_list(shape: RoundShape) -> None:
    operations = planned(TeraPipe(), shape)
    assert sum(isinstance(one, Send) for mine in operations for one in mine) == shape.chunks * (
        shape.workers - 1 + max(0, shape.workers - 1 - shape.first_trained)
    )


def test_a_worker_may_have_several_spans() -> None:
    shape = RoundShape((0, 1, 0), chunks=4, slices=2)
    assert len(planned(TeraPipe(), shape)) == 2


def test_chunks_that_are_no_whole_micro_batches_are_refused() -> None:
    with pytest.raises(ScheduleError, match="5 chunks are not whole micro-batches of 2 slices"):
        TeraPipe().actions(RoundShape((0,), chunks=5, slices=2))


def chunks_of(actions: list[Action], kind: ActionKind) -> list[int]:
    return [action.chunk for action in actions if action.kind is kind]
