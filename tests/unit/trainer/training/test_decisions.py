"""What follows a step, decided from the control state alone."""

from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import pytest

from pipetransformer.errors import SpecError
from pipetransformer.freeze import Explicit, FreezeObservation, FreezePolicy, PolicyCopy
from pipetransformer.models import Ties
from pipetransformer.state.control import Control
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.training.after_step import check_progress, is_done, move_boundary
from pipetransformer.training.non_finite import Beginning
from pipetransformer.training.round import _steps_of_round
from pipetransformer.training.vote import Vote
from pipetransformer_contract.spec import FreezePoint, FreezeTrial, ScheduleName


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


class Seeing(FreezePolicy):
    """Remembers what it sees."""

    seen: ClassVar[list[FreezeObservation]] = []

    def decide(self, observation: FreezeObservation) -> int:
        self.seen.append(observation)
        return observation.boundary


def test_a_policy_sees_what_the_newest_step_gave_and_an_evaluation_only_once() -> None:
    Seeing.seen.clear()
    asked, state, policy = job(), WorkerState(4), PolicyCopy(Seeing(), {})
    asked.order.epoch = lambda step: step // 2
    state.control = Control(
        step=4,
        last_vote=Vote(loss_sum=6.0, weight=3.0, square_norms=[9.0, 36.0, 0.0, 0.0, 0.0, 81.0]).to_list(),
        last_step={"learning_rate": 0.25},
        last_similarities=[0.5],
        metrics={"loss": 0.75},
        evaluated_step=4,
    )

    move_boundary(asked, policy, state)
    state.control.step = 5
    move_boundary(asked, policy, state)

    evaluated = FreezeObservation(
        step=4, epoch=2, boundary=0, num_layers=4, unit_gradient_norms=[1.0, 2.0, 0.0, 0.0, 0.0, 3.0],
        learning_rate=0.25, similarities=[0.5], loss=2.0, held_out_loss=0.75,
    )  # fmt: skip
    assert Seeing.seen == [evaluated, replace(evaluated, step=5, held_out_loss=None)]


def test_a_trial_sees_each_step_of_a_round_and_its_layers_are_told_apart_from_settled_ones() -> None:
    """Rounds of two steps, the second of which freezes two layers after step 12."""
    policy = PolicyCopy(Explicit([FreezePoint(step=12, boundary=2)]), {}, None, FreezeTrial(steps=10))
    state, settled = WorkerState(4), {}
    for step in range(2, 23, 2):
        state.control.step = step
        state.control.last_vote = Vote(loss_sum=2.0 / step, weight=1.0, square_norms=[1.0] * 6).to_list()
        state.control.earlier_steps = [{"step": step - 2, "loss": 2.0 / (step - 1)}]
        move_boundary(job(), policy, state)
        settled[step] = (state.control.boundary, state.control.settled_boundary)

    assert (settled[10], settled[12], settled[20], settled[22]) == ((0, 0), (2, 0), (2, 0), (2, 2))
    steps, losses = state.control.policy["trial"]["training"]
    assert steps == list(range(1, 23)) and losses == pytest.approx([2.0 / step for step in steps])


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


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({}, 8),
        ({"intervals": [1000, 5]}, 4),
        ({"intervals": [7, 1000]}, 3),
        ({"intervals": [6, 5]}, 1),
        ({"total_steps": 14}, 3),
        ({"points": [FreezePoint(step=16, boundary=1)]}, 5),
        ({"one_a_round_until": 12}, 1),
        ({"one_a_round_until": 11}, 8),
        ({"first_step": 11}, 1),
        ({"stages": 1}, 1),
        ({"schedule": ScheduleName.GPIPE}, 1),
    ],
)
def test_a_round_ends_where_other_work_follows_a_step(fields: dict[str, Any], steps: int) -> None:
    """The next round begins after 11 steps, and may have 8."""
    asked = job(total_steps=fields.get("total_steps", 1000), intervals=fields.get("intervals", [1000]))
    asked.spec.pipeline.most_steps = 8
    control = Control(step=11, one_a_round_until=fields.get("one_a_round_until", 0))
    layout: Any = mock.Mock(schedule=fields.get("schedule", ScheduleName.PIPE_OPTIM), stages=fields.get("stages", 4))
    policy = PolicyCopy(Explicit(fields.get("points", [])), {})

    assert _steps_of_round(asked, control, layout, policy, fields.get("first_step", 3)) == steps
