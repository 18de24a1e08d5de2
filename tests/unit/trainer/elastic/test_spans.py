"""Workers with several spans freeze, regroup, lose workers and return to mirrors, and compute what one worker does."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from pipetransformer.hooks import HookPoint
from pipetransformer_contract.spec import ScheduleName, TrainerSpec
from tests.testkit.trainer.harness import Faults, Scripted, run_job

pytestmark = pytest.mark.timeout(300)

STEPS = 16
MIRROR_EVERY = 2
#: Two pipelines of two workers; worker 1 dies, and three go on alone; two become one pipeline; worker 2 dies.
SCRIPT = [
    Scripted(2, 2, [0, 1, 2, 3]),
    Scripted(1, 3, [0, 2, 3], after_loss=1),
    Scripted(2, 1, [0, 2], at_step=8, leavers=[3]),
    Scripted(1, 1, [0], after_loss=2),
]
FAULTS = {1: Faults(killed_at=(HookPoint.VOTED, 4)), 2: Faults(killed_at=(HookPoint.COMPUTED, 13))}


def make_spec(schedule: ScheduleName, steps: int = STEPS, checkpoint: Path | None = None) -> TrainerSpec:
    """A model whose embedding is its output projection, so that both ends of it share a parameter."""
    return TrainerSpec.model_validate(
        {
            "model": {"name": "tests.testkit.user_code.tied_model:make_model", "numLayers": 6},
            "data": {"name": "tests.testkit.user_code.tied_model:make_data"},
            "training": {
                "steps": steps,
                "globalBatchSize": 16,
                "optimizer": {"name": "AdamW", "learningRate": 0.01, "weightDecay": 0.1},
                "maxGradientNorm": 0.5,
                "precision": "Float64",
            },
            "freeze": {"policy": "Explicit", "boundaries": [{"step": 3, "boundary": 2}, {"step": 10, "boundary": 1}]},
            "pipeline": {"stages": 2, "microBatchSize": 2, "schedule": schedule.value},
            "mirror": {"everySteps": MIRROR_EVERY},
            "checkpoint": None if checkpoint is None else {"location": str(checkpoint), "everySteps": 4},
            "numShards": 4,
            "workers": 4,
        }
    )


@pytest.mark.parametrize("schedule", [ScheduleName.INTERLEAVED, ScheduleName.ZERO_BUBBLE_V])
def test_a_tied_model_in_spans_trains_as_on_one_worker(schedule: ScheduleName, tmp_path: Path) -> None:
    alone = run_job(make_spec(schedule), [Scripted(1, 1, [0])], tmp_path / "alone")

    run = run_job(make_spec(schedule), SCRIPT, tmp_path / "spans", faults=FAULTS)

    assert run.lost_at.keys() == FAULTS.keys()
    why = f"{schedule} needs at least 2 stages"
    ran = [(one["schedule"], one["why_schedule"]) for one in run.summary["generations"]]
    plain = (ScheduleName.ONE_FORWARD_ONE_BACKWARD, why)
    assert ran == [(schedule, ""), plain, (schedule, ""), plain]
    assert [line["step"] for line in run.steps] == list(range(STEPS))
    for ours, theirs in zip(run.steps, alone.steps, strict=True):
        assert ours["frozenLayers"] == theirs["frozenLayers"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9), ours["step"]
        assert ours["gradientNorm"] == pytest.approx(theirs["gradientNorm"], rel=1e-9), ours["step"]
    assert run.summary["steps_redone"] <= 1 + MIRROR_EVERY, "the mirror held both spans of the dead worker"
    weights = safetensors.torch.load_file(run.run_dir / "model" / "model.safetensors")
    assert torch.equal(weights["embedding.tokens.weight"], weights["head.output.weight"])


def test_a_job_resumes_under_another_schedule(tmp_path: Path) -> None:
    """Its spans lie elsewhere, so each worker reads other units from the checkpoint."""
    checkpoint, two = tmp_path / "checkpoint", [Scripted(2, 1, [0, 1])]
    alone = run_job(make_spec(ScheduleName.GPIPE), [Scripted(1, 1, [0])], tmp_path / "alone")
    run_job(make_spec(ScheduleName.INTERLEAVED, STEPS // 2, checkpoint), two, tmp_path / "first")

    run = run_job(make_spec(ScheduleName.ZERO_BUBBLE_V, STEPS, checkpoint), two, tmp_path / "second", job_uid="second")

    assert [one["schedule"] for one in run.summary["generations"]] == [ScheduleName.ZERO_BUBBLE_V]
    losses = {line["step"]: line["loss"] for line in run.steps}
    assert losses.keys() >= set(range(STEPS // 2, STEPS))
    for step, loss in losses.items():
        assert loss == pytest.approx(alone.steps[step]["loss"], rel=1e-9), step
