"""What follows a step, decided from the control state alone."""

from unittest import mock

import pytest

from pipetransformer.errors import SpecError
from pipetransformer.freeze import Explicit, PolicyCopy
from pipetransformer.models import Ties
from pipetransformer.state.control import Control
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.training.after_step import check_progress, is_done, move_boundary
from pipetransformer.training.non_finite import Beginning
from pipetransformer_contract.spec import FreezePoint


def job(**changes: object) -> mock.Mock:
    job = mock.Mock(num_layers=4, total_steps=10)
    job.order.epoch.return_value = 0
    job.model.ties = Ties()
    job.spec.evaluation.patience = None
    job.spec.training.max_skipped_steps = 2
    for name, value in changes.items():
        setattr(job, name, value)
    return job


def test_a_boundary_that_moves_says_when_and_one_that_falls_says_that_too() -> None:
    policy = PolicyCopy(
        Explicit([FreezePoint(step=step, boundary=boundary) for step, boundary in ((2, 3), (5, 1), (8, 4))]), {}
    )
    state = WorkerState(4)
    noted = []
    for step in range(10):
        state.control.step = step
        moved = move_boundary(job(), policy, state)
        control = state.control
        assert control.decided_step == step
        noted.append((moved, control.boundary, control.boundary_step, control.fell_step))

    assert noted[:3] == [(False, 0, 0, 0), (False, 0, 0, 0), (True, 3, 2, 0)]
    assert noted[4:6] == [(False, 3, 2, 0), (True, 1, 5, 5)]
    assert noted[8:] == [(True, 4, 8, 5), (False, 4, 8, 5)]


def test_a_job_gives_up_after_more_skipped_steps_in_a_row_than_it_allows() -> None:
    check_progress(job(), Control(step=7, skipped_steps=2), Beginning("loss"))

    with pytest.raises(SpecError, match="3 steps in a row were not finite, 2 may be skipped; at step 7"):
        check_progress(job(), Control(step=8, skipped_steps=3), Beginning("loss"))


def test_a_job_is_done_after_its_last_step_or_once_its_patience_is_over() -> None:
    patient = job()
    patient.spec.evaluation.patience = 3

    assert [is_done(patient, Control(step=9, evaluations_since_best=number)) for number in (0, 2, 3)] == [
        False,
        False,
        True,
    ]
    assert is_done(patient, Control(step=10)) and is_done(job(), Control(step=10))
    assert not is_done(job(), Control(step=9, evaluations_since_best=99))
