"""BFloat16 computes less exactly, alike in all layouts, and leaves float32 weights."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from pipetransformer_contract.spec import TrainerSpec
from tests.testkit.trainer.harness import Ran, Scripted, run_job

pytestmark = pytest.mark.timeout(240)

STEPS = 8


def run(precision: str, script: list[Scripted], run_dir: Path) -> Ran:
    spec = {
        "model": {"name": "tests.testkit.user_code.tied_model:make_model", "numLayers": 6},
        "data": {"name": "tests.testkit.user_code.tied_model:make_data"},
        "training": {"steps": STEPS, "globalBatchSize": 16, "precision": precision},
        "pipeline": {"stages": 2, "microBatchSize": 4},
        "numShards": 2,
        "workers": 2,
    }
    return run_job(TrainerSpec.model_validate(spec), script, run_dir)


def distances(one: Ran, other: Ran) -> list[float]:
    return [
        abs(ours["gradientNorm"] - theirs["gradientNorm"]) / theirs["gradientNorm"]
        for ours, theirs in zip(one.steps, other.steps, strict=True)
    ]


def test_bfloat16_stays_near_float32_in_every_layout(tmp_path: Path) -> None:
    exact = run("Float32", [Scripted(1, 1, [0])], tmp_path / "exact")
    alone = run("BFloat16", [Scripted(1, 1, [0])], tmp_path / "alone")
    script = [Scripted(2, 1, [0, 1]), Scripted(1, 2, [0, 1], at_step=4)]
    elastic = run("BFloat16", script, tmp_path / "elastic")

    assert len(exact.steps) == STEPS
    assert 1e-5 < max(distances(alone, exact)) < 2e-2
    assert max(distances(elastic, alone)) < 1e-2
    weights = safetensors.torch.load_file(elastic.run_dir / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
