"""Which level trains when, and with what learning rate."""

from pathlib import Path

import pytest

from pipetransformer.multilevel import Visit, visits_of
from pipetransformer_contract.spec import MultiLevel
from tests.testkit.trainer.levels import level_job


def test_two_levels_are_a_v() -> None:
    spec = MultiLevel(descent_steps=5, ascent_steps=50, ascent_learning_rate=4e-4)

    assert visits_of(spec, 100) == (Visit(0, 0, 5), Visit(1, 5, 50, 4e-4), Visit(0, 55, 45))


def test_three_levels_go_down_and_up_one_at_a_time() -> None:
    visits = visits_of(MultiLevel(levels=3, descent_steps=2, ascent_steps=10), 40)

    assert [(visit.level, visit.first_step, visit.end) for visit in visits] == [
        (0, 0, 2), (1, 2, 4), (2, 4, 14), (1, 14, 24), (0, 24, 40),
    ]  # fmt: skip


def test_a_job_without_levels_is_one_visit_of_its_model() -> None:
    assert visits_of(None, 9) == (Visit(0, 0, 9),)


def test_each_visit_runs_the_schedule_of_the_learning_rate_and_only_the_first_one_warms_up(tmp_path: Path) -> None:
    training = {"learningRateSchedule": {"shape": "Linear", "warmupSteps": 2}, "optimizer": {"learningRate": 0.1}}
    job = level_job("own-vit", tmp_path, training=training, levels={"ascentLearningRate": 0.4})

    rates = [job.learning_rate(step) for step in (0, 1, 2, 5, 6, 9)]

    assert rates == pytest.approx([0.05, 0.1, 0.4, 0.1, 0.1, 0.05])
