"""Asynchronous schedules are refused with the field and the reason where they cannot be right."""

from typing import Any

import pytest

from pipetransformer.errors import SpecError
from pipetransformer.job.load import load_job
from pipetransformer_contract.spec import ASYNCHRONOUS, TrainerSpec

TIED = {
    "model": {"name": "tests.testkit.user_code.tied_model:make_model", "numLayers": 6},
    "data": {"name": "tests.testkit.user_code.tied_model:make_data"},
}
VIT = {
    "model": {"name": "vit", "numLayers": 4, "hiddenSize": 16, "numHeads": 2, "patchSize": 4},
    "data": {"name": "digits"},
}


def make_spec(parts: dict[str, Any], training: dict[str, Any] | None = None, **pipeline: Any) -> TrainerSpec:
    return TrainerSpec.model_validate(
        {
            **parts,
            "training": {"steps": 4, "globalBatchSize": 8} | (training or {}),
            "pipeline": {"stages": 2, "microBatchSize": 4} | pipeline,
        }
    )


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
@pytest.mark.parametrize(
    ("training", "pipeline", "field", "words"),
    [
        ({"maxGradientNorm": 1.0}, {}, "spec.training.maxGradientNorm", "before the norm of the whole gradient"),
        ({"activationCheckpointing": True}, {}, "spec.training.activationCheckpointing", "would use other weights"),
        (None, {"frozenForward": "Ahead"}, "spec.pipeline.frozenForward", "which leave no idle time"),
        (None, {"spansPerWorker": 2}, "spec.pipeline.spansPerWorker", "spansPerWorker is for the schedules"),
    ],
)
def test_what_cannot_be_right_is_refused(
    schedule: str, training: dict[str, Any] | None, pipeline: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(SpecError, match=words) as refused:
        load_job(make_spec(VIT, training, schedule=schedule, **pipeline))
    assert refused.value.field == field


def test_steps_per_round_are_refused_for_another_schedule() -> None:
    with pytest.raises(SpecError, match="stepsPerRound is for the schedules PipeOptim") as refused:
        load_job(make_spec(VIT, stepsPerRound=4))
    assert refused.value.field == "spec.pipeline.stepsPerRound"


@pytest.mark.parametrize(
    ("sections", "training"),
    [
        ({"evaluation": {"everySteps": 3}}, {}),
        ({"checkpoint": {"location": "/data", "everySteps": 3}}, {}),
        ({"mirror": {"everySteps": 3}}, {}),
        ({}, {"globalBatchSize": 511}),  # 1,527 samples make an epoch of 3 steps
    ],
)
def test_a_round_is_no_longer_than_until_other_work_follows(sections: dict[str, Any], training: dict[str, Any]) -> None:
    pipeline = {"schedule": "PipeDream", "stepsPerRound": 16}
    spec = make_spec(VIT, {"steps": 40} | training, **pipeline)

    assert load_job(TrainerSpec.model_validate(spec.to_wire() | sections)).steps_per_round == 3


def test_a_predicted_step_counts_the_idle_ends_of_the_rounds_that_the_job_will_run() -> None:
    def seconds(steps_per_round: int, **sections: Any) -> float:
        pipeline = {"microBatchSize": 1, "schedule": "PipeDream", "stepsPerRound": steps_per_round}
        spec = make_spec(VIT, {"steps": 40}, **pipeline)
        layouts = load_job(TrainerSpec.model_validate(spec.to_wire() | sections)).layouts
        return layouts.step_model(None).step_seconds(0, layouts.cut(0, 2, 1, None), 1)

    assert seconds(16) < seconds(3) == seconds(16, evaluation={"everySteps": 3})


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_a_parameter_that_stages_share_is_refused_unless_there_is_one_stage(schedule: str) -> None:
    with pytest.raises(SpecError, match=r"is shared by several stages.*untie it, or use a schedule") as refused:
        load_job(make_spec(TIED, schedule=schedule))
    assert refused.value.field == "spec.pipeline.schedule"

    load_job(make_spec(TIED, schedule=schedule, stages=1))
