"""Frozen forwards that run one round ahead give the same bits as in place, through all that can happen to a job."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from pipetransformer.hooks import HookPoint
from pipetransformer_contract.spec import FrozenForward, TrainerSpec
from tests.testkit.trainer.harness import Faults, Ran, Scripted, run_job

pytestmark = pytest.mark.timeout(300)

STEPS = 18


def make_spec(frozen_forward: FrozenForward, cache: str) -> TrainerSpec:
    """The digits ViT with dropout. Layers freeze after 2 and 6 steps, train again after 11, and freeze after 14."""
    boundaries = [(2, 2), (6, 3), (11, 2), (14, 4)]
    return TrainerSpec.model_validate(
        {
            "model": {
                "name": "vit", "numLayers": 8, "hiddenSize": 16, "numHeads": 2, "mlpSize": 32, "patchSize": 4,
                "dropout": 0.1,
            },
            "data": {"name": "tests.testkit.user_code.few_held_out:load"},
            "training": {"steps": STEPS, "globalBatchSize": 24, "maxGradientNorm": 2.0, "precision": "Float32"},
            "evaluation": {"everySteps": 4},
            "freeze": {
                "policy": "Explicit",
                "boundaries": [{"step": step, "boundary": boundary} for step, boundary in boundaries],
            },
            "pipeline": {"stages": 3, "microBatchSize": 3, "frozenForward": frozen_forward.value},
            "cache": {"policy": cache},
            "mirror": {"everySteps": 2},
            "numShards": 4,
            "workers": 4,
        }
    )  # fmt: skip


#: Each freeze is followed by a regroup, so that there are copies of what has frozen: another K, two pipelines, a
#: layout again; worker 1 dies in a round; one worker trains alone.
SCRIPT = [
    Scripted(3, 1, [0, 1, 2]),
    Scripted(3, 1, [0, 1, 2], at_step=3),
    Scripted(2, 2, [0, 1, 2, 3], at_step=7),
    Scripted(3, 1, [0, 2, 3], after_loss=1),
    Scripted(2, 1, [0, 2], at_step=15, leavers=[3]),
]
FAULTS = {1: Faults(killed_at=(HookPoint.COMPUTED, 9))}


def run(spec: TrainerSpec, folder: Path) -> Ran:
    return run_job(spec, SCRIPT, folder, faults=FAULTS)


def weights(ran: Ran) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(ran.run_dir / "model" / "model.safetensors")


@pytest.mark.parametrize("cache", ["Never", "Always"])
def test_ahead_gives_the_bits_of_in_place(cache: str, tmp_path: Path) -> None:
    in_place, ahead = (make_spec(each, cache) for each in (FrozenForward.IN_PLACE, FrozenForward.AHEAD))
    expected = run(in_place, tmp_path / "in-place")

    found = run(ahead, tmp_path / "ahead")

    assert found.lost_at.keys() == FAULTS.keys()
    ran = [(each["frozen_forward"], each["why_frozen_forward"]) for each in found.summary["generations"]]
    assert ran == [("InPlace", "")] + [("Ahead", "")] * 4
    same = ("step", "loss", "gradientNorm", "frozenLayers")
    assert [[line[key] for key in same] for line in found.steps] == [
        [line[key] for key in same] for line in expected.steps
    ]
    theirs = weights(expected)
    assert all(torch.equal(weight, theirs[name]) for name, weight in weights(found).items())
    made_ahead = {line["step"] for line in found.steps if line["frozenAheadShare"] == 1}
    if cache == "Never":  # not the first round after a freeze, an unfreeze, a regroup or a death
        assert made_ahead == {5, 10, 12, 13, 17}
