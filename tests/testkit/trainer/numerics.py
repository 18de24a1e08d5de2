"""A small training job, and the comparison of its losses with an unchanged run's."""

from typing import Any

import pytest

from pipetransformer_contract.spec import TrainerSpec
from tests.testkit.trainer.harness import Ran, Scripted

TOLERANCE = 1e-9


TRAINING_SAMPLES = 1433  # digits without its held-out fifth


STEPS_PER_EPOCH = 15  # the last batch is short: 1433 = 14 * 100 + 33


EPOCHS = 2


ADAMW = {"name": "AdamW", "learningRate": 0.003, "weightDecay": 0.01}


SGD = {"name": "SGD", "learningRate": 0.05, "momentum": 0.9}


STAY = [Scripted(4, 1, [0, 1, 2, 3])]


STAY_ALONE = [Scripted(1, 1, [0])]


WIDEN = [
    Scripted(4, 1, [0, 1, 2, 3]),
    Scripted(2, 2, [0, 1, 2, 3], at_step=6),
    Scripted(1, 4, [0, 1, 2, 3], at_step=17),
]


def make_spec(optimizer: dict[str, Any], **changes: Any) -> TrainerSpec:
    """Two epochs of digits in float64; one block freezes inside the first epoch, three in the second."""
    spec: dict[str, Any] = {
        "model": {"name": "vit", "numLayers": 6, "hiddenSize": 16, "numHeads": 2, "mlpSize": 32, "patchSize": 4},
        "data": {"name": "digits"},
        "training": {
            "epochs": EPOCHS,
            "globalBatchSize": 100,
            "optimizer": optimizer,
            "learningRateSchedule": {"shape": "Cosine", "warmupSteps": 5},
            "maxGradientNorm": 2.0,
            "precision": "Float64",
            "seed": 1,
        },
        "freeze": {
            "policy": "Explicit",
            "boundaries": [{"step": 5, "boundary": 1}, {"step": 16, "boundary": 3}],
        },
        "pipeline": {"stages": 4, "microBatchSize": 22},
        "numShards": 4,
        "workers": 4,
    }
    return TrainerSpec.model_validate(spec | changes)


def compare(run: Ran, reference: Ran) -> None:
    """Every step once, with the reference's loss and gradient norm."""
    assert [step["step"] for step in run.steps] == list(range(EPOCHS * STEPS_PER_EPOCH))
    for ours, theirs in zip(run.steps, reference.steps, strict=True):
        assert ours["frozenLayers"] == theirs["frozenLayers"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE), ours["step"]
        assert ours["gradientNorm"] == pytest.approx(theirs["gradientNorm"], rel=TOLERANCE), ours["step"]
    assert run.summary["test_accuracy"] == reference.summary["test_accuracy"]


def layouts(run: Ran) -> list[tuple[int, int]]:
    return [(entry["stages"], entry["pipelines"]) for entry in run.summary["generations"]]
