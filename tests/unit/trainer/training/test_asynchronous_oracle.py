"""An asynchronous job of four workers, through the whole trainer, has the losses of a program in numpy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipetransformer_contract.spec import TrainerSpec
from tests.testkit.trainer.asynchronous_oracle import train
from tests.testkit.trainer.harness import Ran, Scripted, run_job
from tests.testkit.user_code import residual_model

LAYERS, STEPS, EPOCH, BATCH = 6, 24, 12, 8
#: A round ends after 5 steps, at the end of an epoch, and after the first step of all.
ROUNDS = [1, 5, 5, 1, 5, 5, 2]
OPTIMIZERS: list[dict[str, Any]] = [
    {"name": "SGD", "learningRate": 0.02, "momentum": 0.9, "weightDecay": 0.01},
    {"name": "SGD", "learningRate": 0.02, "momentum": 0.0, "weightDecay": 0.01},
    {"name": "Adam", "learningRate": 0.01, "weightDecay": 0.01},
    {"name": "AdamW", "learningRate": 0.01, "weightDecay": 0.1},
    {"name": "RMSprop", "learningRate": 0.002, "weightDecay": 0.01, "alpha": 0.9},
]


def make_spec(optimizer: dict[str, Any], micro_batch: int) -> TrainerSpec:
    module = residual_model.__name__
    return TrainerSpec.model_validate(
        {
            "model": {
                "name": f"{module}:make_model",
                "numLayers": LAYERS,
                "options": {"num_layers": LAYERS},
            },
            "data": {"name": f"{module}:make_data"},
            "training": {
                "steps": STEPS,
                "globalBatchSize": BATCH,
                "optimizer": optimizer,
                "learningRateSchedule": {"shape": "Linear"},
                "precision": "Float64",
            },
            "pipeline": {
                "stages": 4,
                "schedule": "PipeOptim",
                "stepsPerRound": 5,
                "microBatchSize": micro_batch,
            },
            "workers": 4,
        }
    )


def oracle(run: Ran, optimizer: dict[str, Any], micro_batch: int) -> list[float]:
    """What numpy makes of the samples in the run's ledger."""
    inputs, targets = residual_model.samples()
    lines = [json.loads(text) for path in run.run_dir.glob("ledger/*") for text in path.read_text().splitlines()]
    order = {line["step"]: line["samples"] for line in lines}
    steps = [
        [
            (inputs[order[step][start : start + micro_batch]], targets[order[step][start : start + micro_batch]])
            for start in range(0, BATCH, micro_batch)
        ]
        for step in range(STEPS)
    ]
    rounds = [steps[sum(ROUNDS[:number]) : sum(ROUNDS[: number + 1])] for number in range(len(ROUNDS))]
    rates = [optimizer["learningRate"] * (1 - step / STEPS) for step in range(STEPS)]
    committed = run.events("GenerationCommitted")[0]
    starts = [0, *(first + 1 for (first, _), *_ in sorted(role["layers"] for role in committed["roles"])[1:])]
    spans = [range(start, stop) for start, stop in zip(starts, [*starts[1:], LAYERS + 2], strict=True)]
    return train(residual_model.arrays(LAYERS), spans, rounds, rates, optimizer)


@pytest.mark.parametrize("micro_batch", [BATCH, 2], ids=["one micro-batch a step", "K micro-batches a step"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: f"{one['name']} {one.get('momentum', '')}")
def test_losses_are_those_of_a_program_in_numpy(optimizer: dict[str, Any], micro_batch: int, tmp_path: Path) -> None:
    run = run_job(make_spec(optimizer, micro_batch), [Scripted(4, 1, [0, 1, 2, 3])], tmp_path)
    losses = [line["loss"] for line in run.steps]
    wanted = oracle(run, optimizer, micro_batch)
    worst = max(abs(one - other) / other for one, other in zip(losses, wanted, strict=True))
    print(f"oracle_worst {worst:.1e}")
    assert np.isfinite(wanted).all() and losses[-1] < losses[0]
    assert worst <= 1e-12
    largest = [line["stalenessLargest"] for line in run.steps]
    assert max(largest) == (3 if micro_batch == BATCH else 1)
