"""A model that grows in width alone, without a share of earlier weights, computes what the small one did."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from pipetransformer.errors import SpecError, StorageError
from pipetransformer.job.levels import level_map
from pipetransformer.models import PipelineModel
from pipetransformer.multilevel import Family, Groups, Heads, LevelMap, Levels
from pipetransformer.state.control import Control
from pipetransformer_contract.spec import Grouping
from tests.testkit.trainer.levels import CASES, level_job, logits, random_state


def in_float64(norm: LlamaRMSNorm, x: Tensor) -> Tensor:
    """What the norm computes; transformers computes it in float32, whatever the type of the weights."""
    scaled: Tensor = norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return scaled


@pytest.mark.parametrize("grouping", ["Halves", "Adjacent"])
@pytest.mark.parametrize("family", CASES)
def test_the_widened_models_logits_equal_the_small_ones(
    family: str, grouping: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaRMSNorm, "forward", in_float64)
    levels = {"depthFactor": 1, "alpha": 1.0, "grouping": grouping}
    job = level_job(family, tmp_path, levels=levels)
    small, up = job.at(1), level_map(job, 1, None)
    state = random_state(small)

    wide = {name: tensor for unit in range(job.num_layers + 2) for name, tensor in up.make(unit, state).items()}

    ours, theirs = logits(job, wide), logits(small, state)
    assert theirs.std() > 0.01, "they depend on the sample and the class"
    assert float((ours - theirs).abs().max() / theirs.abs().max()) <= 1e-10


class Kept:
    """Weights that are all equal."""

    def __init__(self, value: float, state: dict[str, Tensor]) -> None:
        self._tensors = {name: torch.full_like(tensor, value) for name, tensor in state.items()}
        self.asked: list[tuple[int, int]] = []

    def read(self, level: int, unit: int) -> dict[str, Tensor]:
        self.asked.append((level, unit))
        return self._tensors


def test_interpolation_takes_its_share_of_the_levels_own_earlier_weights(tmp_path: Path) -> None:
    job = level_job("own-vit", tmp_path, levels={"alpha": 0.25})
    kept = Kept(8.0, random_state(job))
    grown, plain = level_map(job, 1, kept), level_map(job, 1, Kept(0.0, {}))
    plain.alpha = 1.0
    small = random_state(job.at(1))

    grown.prepare([2])
    plain.prepare([2])

    assert kept.asked == [(0, 2)], "only what this worker needs"
    for name, tensor in grown.make(2, small).items():
        torch.testing.assert_close(tensor, 0.75 * 8.0 + 0.25 * plain.make(2, small)[name], rtol=1e-12, atol=0)


class Scaled(nn.Linear):
    """Has a constant of its own, which is no parameter."""

    def __init__(self, scale: float) -> None:
        super().__init__(2, 2)
        self.register_buffer("scale", torch.tensor(scale))


def test_a_level_that_grows_back_has_its_own_constants() -> None:
    large = PipelineModel(nn.Linear(2, 2), [Scaled(0.0) for _ in range(4)], nn.Linear(2, 2), (2,))
    small, halves = large.with_layers(2), Groups(2, Grouping.HALVES)
    state = {f"blocks.0.{name}": tensor for name, tensor in Scaled(1.0).state_dict().items()}
    earlier = Mock()
    earlier.read.return_value = {f"blocks.2.{name}": tensor for name, tensor in Scaled(3.0).state_dict().items()}
    levels = Levels(large, small, halves, Groups(1, Grouping.HALVES))
    up = LevelMap(levels, down=False, level=0, alpha=0.5, earlier=earlier)

    up.prepare([3])

    assert up.make(3, state)["blocks.2.scale"] == 3.0


@pytest.mark.parametrize("other", [nn.Linear(2, 2, bias=False), nn.Linear(2, 3)], ids=["lacks", "shape"])
def test_layers_that_differ_cannot_become_one(other: nn.Module) -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2), other, nn.Linear(2, 2)]
    large, halves = PipelineModel(nn.Linear(2, 2), layers, nn.Linear(2, 2), (2,)), Groups(2, Grouping.HALVES)
    down = LevelMap(Levels(large, large.with_layers(2), halves, Groups(1, Grouping.HALVES)), down=True, level=1)
    state = {f"blocks.{i}.{name}": value for i in (0, 2) for name, value in layers[i].state_dict().items()}

    with pytest.raises(SpecError, match=r"depthFactor: must be 1, because layers differ: some lack blocks\.0\."):
        down.make(1, state)


def test_a_parameter_that_the_family_does_not_know_cannot_become_narrower() -> None:
    model = PipelineModel(nn.Linear(2, 2), [nn.Linear(2, 2)], nn.Linear(2, 2), (2,))
    same, halves = Groups(1, Grouping.HALVES), Groups(2, Grouping.HALVES)
    levels = Levels(model, model, same, halves, Family({"weight": "wr"}), Heads(2, 2, shared_table=False))

    assert len(levels.axes("weight")) == 2
    with pytest.raises(SpecError, match=r"widthFactor: must be 1, .* the parameter bias"):
        levels.axes("bias")


def test_the_next_visit_keeps_nothing_that_was_measured_or_decided_for_the_model_before(tmp_path: Path) -> None:
    old = Control(
        step=6, visit=1, visit_done=True, evaluations_since_best=3, costs={"boundary": 0}, slice_costs={"boundary": 0},
        last_vote=[1.0], last_similarities=[1.0], policy={"policy": "NoFreeze"},
    )  # fmt: skip

    new = level_map(level_job("own-vit", tmp_path), 1, Kept(0.0, {})).control(old)

    assert new == Control(step=6, visit=2, boundary_step=6, decided_step=6, policy={"policy": "NoFreeze"})


def test_going_down_reads_nothing(tmp_path: Path) -> None:
    class Never:
        def read(self, level: int, unit: int) -> dict[str, Tensor]:
            raise StorageError

    level_map(level_job("own-vit", tmp_path), 0, Never()).prepare(range(3))
