"""Slices of tokens through regroups, a freeze and a death: the losses are those of whole samples on one worker."""

from pathlib import Path
from typing import Any

import pytest

from pipetransformer_contract.spec import TrainerSpec
from tests.testkit.trainer.harness import Ran, Scripted, run_job

pytestmark = pytest.mark.timeout(180)

STEPS = 9
CHANGES = [
    Scripted(2, 1, [0, 1]),
    Scripted(2, 2, [0, 1, 2, 3], at_step=3),
    Scripted(3, 1, [0, 1, 2], at_step=6, leavers=[3]),
]


def make_spec(pipeline: dict[str, Any], **changes: Any) -> TrainerSpec:
    """A padded causal model in float64; a layer freezes at step 4, two more at step 7, one of which trains again."""
    spec: dict[str, Any] = {
        "model": {"name": "tests.testkit.user_code.causal_model:make_model", "numLayers": 6},
        "data": {"name": "tests.testkit.user_code.causal_model:make_data"},
        "training": {
            "steps": STEPS,
            "globalBatchSize": 12,
            "optimizer": {"name": "AdamW", "learningRate": 0.003, "weightDecay": 0.01},
            "maxGradientNorm": 2.0,
            "precision": "Float64",
            "seed": 3,
        },
        "freeze": {
            "policy": "Explicit",
            "boundaries": [{"step": 4, "boundary": 1}, {"step": 7, "boundary": 3}, {"step": 8, "boundary": 2}],
        },
        "pipeline": {"stages": 2, "microBatchSize": 3} | pipeline,
        "numShards": 4,
        "workers": 4,
    }
    return TrainerSpec.model_validate(spec | changes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Whole samples on one worker."""
    return run_job(make_spec({"schedule": "GPipe"}), [Scripted(1, 1, [0])], tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("slices", [{"tokenSlices": 3}, {"tokenSlices": "Auto", "sliceMultiple": 2}], ids=str)
def test_slices_compute_what_whole_samples_on_one_worker_do(slices: dict[str, Any], alone: Ran, tmp_path: Path) -> None:
    run = run_job(make_spec({"schedule": "TeraPipe"} | slices), CHANGES, tmp_path)
    assert [step["step"] for step in run.steps] == list(range(STEPS))
    for ours, theirs in zip(run.steps, alone.steps, strict=True):
        assert ours["frozenLayers"] == theirs["frozenLayers"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9), ours["step"]
        assert ours["gradientNorm"] == pytest.approx(theirs["gradientNorm"], rel=1e-9), ours["step"]
    assert run.summary["test_accuracy"] == alone.summary["test_accuracy"]
