"""A step whose loss or gradient is no number changes nothing, in every layout."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import pipetransformer
from pipetransformer import Result, Training
from pipetransformer.data import Dataset, TensorSplit, load_dataset
from pipetransformer.errors import SpecError
from pipetransformer.vote import Vote
from pipetransformer_contract.spec import Data
from tests.trainer_harness import Faults, Ran, Scripted, run_job
from tests.unit.trainer.test_engine_numerics import EPOCHS, STAY_ALONE, STEPS_PER_EPOCH, TOLERANCE, make_spec

pytestmark = pytest.mark.timeout(180)

MOMENTUM = {"name": "SGD", "learningRate": 0.05, "momentum": 0.9, "weightDecay": 0.1}


def poisoned_digits(path: str, dtype: torch.dtype) -> Dataset:
    """Digits with one image that is no number."""
    digits = load_dataset(Data(name="digits"), dtype=dtype)
    inputs, targets = digits.train.batch(range(len(digits.train)))
    inputs[7] = float("nan")
    return replace(digits, train=TensorSplit(inputs, targets))


def train(script: list[Scripted], run_dir: Path, faults: dict[int, Faults] | None = None) -> Ran:
    data = {"name": "tests.unit.trainer.test_non_finite:poisoned_digits"}
    return run_job(make_spec(MOMENTUM, data=data), script, run_dir, faults=faults)


def numbers(run: Ran, key: str) -> list[float]:
    """`key` of every step, nan where the step was skipped."""
    return [float("nan") if step[key] is None else step[key] for step in run.steps]


def test_a_step_that_is_not_finite_is_skipped_alike_in_every_layout(tmp_path: Path) -> None:
    stayed = train(STAY_ALONE, tmp_path / "stay")
    poisoned = [step["step"] for step in stayed.steps if step["loss"] is None]
    assert [step // STEPS_PER_EPOCH for step in poisoned] == list(range(EPOCHS))
    script = [Scripted(2, 1, [0, 1]), Scripted(1, 2, [0, 1], at_step=poisoned[0])]

    # The second worker misses the commit of the very step that is skipped.
    run = train(script, tmp_path / "run", {1: Faults(loses_vote_of=poisoned[0])})

    for key in ("loss", "gradientNorm"):
        assert numbers(run, key) == pytest.approx(numbers(stayed, key), rel=TOLERANCE, nan_ok=True)


def train_on(targets: list[int], run_dir: Path, **changes: Any) -> Result:
    """Two epochs of batches of one sample."""
    inputs = torch.randn(len(targets), 4, generator=torch.Generator().manual_seed(0))
    return pipetransformer.train(
        model=lambda: [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)],
        data=TensorDataset(inputs, torch.tensor(targets)),
        training=Training(epochs=2, global_batch_size=1, max_gradient_norm=1.0, **changes),
        run_dir=run_dir,
    )


def test_a_step_without_any_target_is_skipped(tmp_path: Path) -> None:
    result = train_on([0, 1, -100, 1, 0, -100, 1], tmp_path)

    losses = [json.loads(line)["loss"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert result.steps == len(losses) == 14
    assert [losses[:7].count(None), losses[7:].count(None)] == [2, 2]


def test_data_without_any_target_are_found_out(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="at step 1 it was the mean loss of no targets"):
        train_on([-100, -100], tmp_path, max_skipped_steps=1)


def test_a_vote_names_the_first_unit_that_is_not_finite() -> None:
    assert Vote(weight=1.0, square_norms=[1.0, float("inf"), float("nan")]).first_non_finite_unit == 1
    assert Vote(loss_sum=float("nan"), weight=1.0, square_norms=[1.0]).first_non_finite_unit is None
