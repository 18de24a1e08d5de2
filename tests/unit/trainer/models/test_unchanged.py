"""A forward that changes its unit is refused: how often it runs depends on the layout, and so would the weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

from pipetransformer import Freeze, Training
from pipetransformer.errors import SpecError
from pipetransformer.models import MicroBatchContext, run_unit
from pipetransformer.models.randomness.keyed import key_unit
from pipetransformer_contract.spec import FreezePoint, FreezePolicyName
from tests.testkit.trainer.script import NO_FREEZE, run, samples

pytestmark = pytest.mark.timeout(120)

WIDTH = 8


class Changing(nn.Module):
    """Does something to itself in each forward, and then what a linear layer does."""

    def __init__(self, change: Callable[["Changing"], object]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(WIDTH), persistent=False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.calls = 0
        self.change = change

    @property
    def weight(self) -> Tensor:
        return self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.change(self)
        return self.inner(x) * self.get_buffer("table")[: x.shape[-1]]  # type: ignore[no-any-return]


def without_grad(change: Callable[["Changing"], object]) -> Callable[["Changing"], object]:
    return torch.no_grad()(change)


def write_by_numpy(unit: Changing) -> None:
    np.negative(unit.weight.detach().numpy(), out=unit.weight.detach().numpy())


def replace_parameter(unit: Changing) -> None:
    unit.inner.weight = nn.Parameter(unit.weight.detach() * 0.9)


def replace_data(unit: Changing) -> None:
    unit.weight.data = unit.weight.data.clone()


def replace_mean(unit: Changing) -> None:
    unit.mean = unit.get_buffer("mean") + 1.0


def replace_table(unit: Changing) -> None:
    unit.table = torch.ones(2 * WIDTH)


def forward(unit: nn.Module, *, step: int = 0) -> Tensor:
    return run_unit(unit, torch.randn(2, WIDTH), MicroBatchContext(step, [1, 2]))


def keyed(unit: nn.Module) -> nn.Module:
    return key_unit(unit, 1, "blocks.0", seed=0)


CHANGES: dict[str, tuple[Callable[[Changing], object], str]] = {
    "clamped": (without_grad(lambda unit: unit.weight.clamp_(-9, 9)), "inner.weight"),
    "copied": (without_grad(lambda unit: unit.weight.copy_(unit.weight)), "inner.weight"),
    "renormed": (without_grad(lambda unit: torch.renorm(unit.weight, 2, 0, 1.0, out=unit.weight)), "inner.weight"),
    "through-data": (lambda unit: unit.weight.data.clamp_(-9, 9), "inner.weight"),
    "rows-through-data": (lambda unit: unit.weight.data[:2].mul_(0.9), "inner.weight"),
    "all-at-once": (lambda unit: torch._foreach_mul_([each.data for each in unit.parameters()], 0.9), "inner.weight"),
    "bias-through-data": (lambda unit: unit.inner.bias.data.zero_(), "inner.bias"),
    "by-numpy": (write_by_numpy, "inner.weight"),
    "replaced": (replace_parameter, "inner.weight"),
    "data-replaced": (replace_data, "inner.weight"),
    "mean": (lambda unit: unit.get_buffer("mean").add_(1.0), "mean"),
    "mean-through-data": (lambda unit: unit.get_buffer("mean").data.add_(1.0), "mean"),
    "mean-replaced": (replace_mean, "mean"),
    "table": (lambda unit: unit.get_buffer("table").mul_(1.0), "table"),
}


@pytest.mark.parametrize("training", [True, False], ids=["trains", "frozen"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_forward_that_changes_its_unit_is_refused_by_the_name_of_what_changes(change: str, training: bool) -> None:
    do, name = CHANGES[change]
    unit = keyed(Changing(do)).train(training)

    with torch.set_grad_enabled(training), pytest.raises(SpecError, match=rf"spec\.model: blocks\.0\.{name} changes"):
        forward(unit)


def test_of_parameters_that_lie_in_one_memory_the_one_that_changes_is_named() -> None:
    unit = keyed(Changing(CHANGES["bias-through-data"][0]))
    whole = torch.cat([parameter.detach().flatten() for parameter in unit.parameters()])
    start = 0
    for parameter in unit.parameters():
        parameter.data = whole[start : (start := start + parameter.numel())].view_as(parameter)

    with pytest.raises(SpecError, match=r"blocks\.0\.inner\.bias changes"):
        forward(unit)


@pytest.mark.parametrize("change", sorted(CHANGES.keys() - {"by-numpy"}))
def test_what_operations_of_torch_write_is_refused_at_any_step(change: str) -> None:
    with pytest.raises(SpecError, match=r"changes in each forward"):
        forward(keyed(Changing(CHANGES[change][0])), step=7)


class FirstColumn(nn.Linear):
    """Has a buffer with a stride."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("column", torch.ones(WIDTH, 2)[:, 0])


class Clamped(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.clamp(-1, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Changing(lambda unit: unit.weight.clamp(-1, 1).add_(1.0)),
        lambda: Changing(lambda unit: torch.zeros_like(unit.weight).copy_(unit.weight)),
        lambda: Changing(replace_table),
        FirstColumn,
        lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
        lambda: register_parametrization(nn.Linear(WIDTH, WIDTH), "weight", Clamped()),
        lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)).eval(),
        lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.ReLU(inplace=True), nn.GRU(WIDTH, WIDTH, batch_first=True))[:2],
    ],
)
def test_a_forward_that_computes_with_a_changed_copy_is_not_refused(make: Callable[[], nn.Module]) -> None:
    unit = keyed(make())
    nan = next(unit.parameters())
    with torch.no_grad():
        nan.view(-1)[0] = float("nan")  # which equals itself here

    for step in range(2):
        assert forward(unit, step=step).shape == (2, WIDTH)


def around(*blocks: nn.Module) -> dict[str, Any]:
    return {"model": lambda: [nn.Linear(4, WIDTH), *blocks, nn.Linear(WIDTH, 2)]}


def late(unit: Changing) -> None:
    if unit.calls > 12:
        unit.weight.detach().mul_(0.9)


def in_evaluation(unit: Changing) -> None:
    if not unit.training:
        unit.weight.data.mul_(0.9)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (nn.Sequential(nn.Identity(), Changing(CHANGES["clamped"][0])), r"blocks\.0\.1\.inner\.weight changes in each"),
        (Changing(late), r"blocks\.0\.inner\.weight changes"),
        (Changing(in_evaluation), r"blocks\.0\.inner\.weight changes"),
        (nn.Embedding(9, WIDTH, max_norm=1.0), r"blocks\.0 is a Embedding with max_norm, which changes the weight in"),
        (nn.EmbeddingBag(9, WIDTH, max_norm=1.0), r"blocks\.0 is a EmbeddingBag with max_norm"),
    ],
    ids=["clamped", "late", "in-evaluation", "embedding", "embedding-bag"],
)
def test_a_job_whose_model_changes_itself_is_refused(block: nn.Module, message: str, tmp_path: Path) -> None:
    training = Training(steps=12, global_batch_size=32)

    with pytest.raises(SpecError, match=message):
        run(tmp_path, training=training, freeze=NO_FREEZE, **around(block))


def test_a_layer_that_changes_itself_only_once_it_is_frozen_is_refused(tmp_path: Path) -> None:
    """No sample is held out, so nothing was run as if it were frozen before it is."""
    freeze = Freeze(policy=FreezePolicyName.EXPLICIT, boundaries=[FreezePoint(step=2, boundary=1)])
    with pytest.raises(SpecError, match=r"blocks\.0\.inner\.weight changes"):
        run(
            tmp_path,
            training=Training(steps=4, global_batch_size=32),
            freeze=freeze,
            data=samples(64, 0),
            **around(Changing(in_evaluation), nn.Linear(WIDTH, WIDTH)),
        )
