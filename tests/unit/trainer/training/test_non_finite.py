"""A step whose loss or gradient is no number changes nothing, in every layout."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pipetransformer
from pipetransformer import Cache, Freeze, Pipeline, PipelineModel, Result, Training
from pipetransformer.data import DataInfo
from pipetransformer.errors import SpecError
from pipetransformer.training.vote import Vote
from pipetransformer_contract.spec import CachePolicy, FreezePoint, FreezePolicyName
from tests.testkit.trainer import poisoned
from tests.testkit.trainer.harness import Faults, Ran, Scripted, run_job
from tests.testkit.trainer.numerics import EPOCHS, STAY_ALONE, STEPS_PER_EPOCH, TOLERANCE, make_spec

pytestmark = pytest.mark.timeout(180)

MOMENTUM = {"name": "SGD", "learningRate": 0.05, "momentum": 0.9, "weightDecay": 0.1}


def train(script: list[Scripted], run_dir: Path, faults: dict[int, Faults] | None = None) -> Ran:
    return run_job(make_spec(MOMENTUM, data={"name": poisoned.NAME}), script, run_dir, faults=faults)


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


@pytest.mark.parametrize(
    ("square_norms", "expected"),
    [
        ([1.0, 1.0], None),
        ([math.nan, math.inf, 1.0], 1),
        ([math.nan, math.nan, math.nan], 2),
        ([1.0, math.inf, 1.0], 1),  # of the weights alone
        ([0.0, math.nan, 0.0, math.nan, 1.0], 3),  # the first is frozen, and a block has no parameters
        ([0.0, math.nan, 1.0, math.nan], 1),  # the embedding's only weight is the head's, too
    ],
)
def test_a_non_finite_gradient_began_in_the_highest_unit_that_has_it(
    square_norms: list[float], expected: int | None
) -> None:
    assert Vote(weight=1.0, square_norms=square_norms).non_finite_unit == expected


def places_of_skipped(run_dir: Path) -> list[str]:
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [event["place"] for event in events if event["kind"] == "StepSkipped"]


def test_a_cache_does_not_hide_where_a_step_began_to_be_no_number(tmp_path: Path) -> None:
    inputs = torch.ones(8, 4)
    inputs[3] = math.inf
    pipetransformer.train(
        model=lambda: [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)],
        data=TensorDataset(inputs, torch.arange(8) % 2),
        training=Training(epochs=2, global_batch_size=2),
        freeze=Freeze(policy=FreezePolicyName.EXPLICIT, boundaries=[FreezePoint(step=0, boundary=1)]),
        cache=Cache(policy=CachePolicy.ALWAYS),
        run_dir=tmp_path,
    )

    assert places_of_skipped(tmp_path) == ["embedding"] * 2


class Bad(nn.Linear):
    """Divides by nothing, forward or, beside what it gives, only backward."""

    def __init__(self, *, backward: bool) -> None:
        super().__init__(4, 4)
        self.backward = backward

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + (y * 0.0).sqrt() if self.backward else y / torch.zeros(())


def bad_model(info: DataInfo, num_layers: int = 4, *, backward: bool) -> PipelineModel:
    """The third block fails."""
    blocks: list[nn.Module] = [nn.Linear(4, 4) for _ in range(num_layers)]
    blocks[2] = Bad(backward=backward)
    return PipelineModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), blocks, nn.Linear(4, 10), (4,))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("backward", "what"), [(False, "output"), (True, "gradient")])
def test_the_place_where_a_step_began_to_be_no_number_is_named(
    backward: bool, what: str, stages: int, tmp_path: Path
) -> None:
    model = {
        "name": "tests.unit.trainer.training.test_non_finite:bad_model",
        "numLayers": 4,
        "options": {"backward": backward},
    }
    spec = make_spec(
        MOMENTUM,
        model=model,
        training={"steps": 9, "globalBatchSize": 8, "maxSkippedSteps": 1},
        pipeline={"stages": stages},
    )
    run = run_job(spec, [Scripted(stages, 1, range(stages))], tmp_path)

    assert len(run.endings) == stages
    for ending in run.endings.values():
        assert f"2 steps in a row were not finite, 1 may be skipped; at step 1 it was the {what} of blocks.2" in ending
    assert places_of_skipped(tmp_path) == ["blocks.2"] * 2


class BothWays(PipelineModel):
    """Its loss is infinite, by turns in one direction and in the other."""

    def loss(self, output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total, of = super().loss(output, target, weight)
        return total + (math.inf if target[0] else -math.inf), of


def test_a_step_whose_micro_batches_are_infinite_in_both_directions_is_skipped(tmp_path: Path) -> None:
    result = pipetransformer.train(
        model=lambda: BothWays(nn.Linear(4, 4), [nn.Linear(4, 4)], nn.Linear(4, 2), (4,)),
        data=TensorDataset(torch.ones(8, 4), torch.arange(8) % 2),
        training=Training(steps=2, global_batch_size=8),
        pipeline=Pipeline(micro_batch_size=1),
        run_dir=tmp_path,
    )

    assert (result.steps, places_of_skipped(tmp_path)) == (2, ["loss"] * 2)
