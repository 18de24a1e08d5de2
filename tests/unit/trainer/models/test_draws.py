"""What blocks draw by functions of torch's, and not by modules: keyed by sample, or refused."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipetransformer.errors import SpecError
from pipetransformer.models import MicroBatchContext, run_unit
from pipetransformer.models.randomness.draws import _Draws, drawing, key_draws
from pipetransformer.models.randomness.keyed import key_unit
from pipetransformer_contract.spec import TrainerSpec
from tests.testkit.trainer.harness import Scripted, run_job

pytestmark = pytest.mark.timeout(180)

LAYOUTS = [
    [Scripted(1, 1, [0])],
    [Scripted(3, 1, [0, 1, 2]), Scripted(1, 3, [0, 1, 2], at_step=3), Scripted(2, 1, [2, 0], at_step=7, leavers=[1])],
]


class Drawing(nn.Module):
    def __init__(self, function: Callable[[Tensor, bool], Tensor], name: str = "blocks.3") -> None:
        super().__init__()
        self.function = function
        key_draws(self, name, seed=1, place=7)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.training)


def forward(unit: nn.Module, samples: list[int], *, recompute: bool = False) -> Tensor:
    return run_unit(unit, torch.ones(len(samples), 4, 8), MicroBatchContext(5, samples, recompute=recompute))


def make_spec(**training: Any) -> TrainerSpec:
    return TrainerSpec.model_validate(
        {
            "model": {"name": "tests.testkit.user_code.drawing_model:make_model", "numLayers": 6},
            "data": {"name": "tests.testkit.user_code.tied_model:make_data"},
            "training": {"steps": 10, "globalBatchSize": 16, "precision": "Float64"} | training,
            "freeze": {"policy": "Explicit", "boundaries": [{"step": 5, "boundary": 2}]},
            "pipeline": {"stages": 3, "microBatchSize": 3},
            "numShards": 3,
            "workers": 3,
        }
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_what_blocks_draw_by_functions_does_not_depend_on_the_layout(recompute: bool, tmp_path: Path) -> None:
    stayed, moved = (
        run_job(make_spec(activationCheckpointing=recompute), script, tmp_path / str(number))
        for number, script in enumerate(LAYOUTS)
    )

    assert len(moved.steps) == 10
    for ours, theirs in zip(moved.steps, stayed.steps, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9), ours["step"]


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, training: functional.dropout(x, 0.5, training),
        lambda x, training: functional.dropout(x.clone(), 0.5, training, inplace=True),
        lambda x, training: torch.dropout(x, 0.5, training),
        lambda x, training: x * torch.rand(len(x), 1, 1) if training else x,
        lambda x, training: x * torch.rand(size=(len(x), 1, 1)) if training else x,
        lambda x, training: x * torch.rand_like(x) if training else x,
        lambda x, training: x * torch.bernoulli(0.5 * x) if training else x,
        lambda x, training: x * torch.bernoulli(x, 0.5) if training else x,
        lambda x, training: x * x.new_empty(len(x), 1, 1).bernoulli_(0.5) if training else x,
    ],
)
def test_a_draw_belongs_to_its_sample_and_leaves_the_process_random_state_alone(
    draw: Callable[[Tensor, bool], Tensor],
) -> None:
    unit, before = Drawing(draw), torch.get_rng_state()

    whole = forward(unit, [4, 2, 9])
    parts = torch.cat([forward(unit, [4]), forward(unit, [2, 9])])

    assert torch.equal(whole, parts)
    assert not torch.equal(whole[0], whole[1]) or not torch.equal(whole[1], whole[2])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(forward(unit.eval(), [4, 2]), torch.ones(2, 4, 8))


def test_a_generator_of_the_units_own_draws_as_in_torch() -> None:
    own, same = (torch.Generator().manual_seed(3) for _ in range(2))
    unit = Drawing(lambda x, _: x * torch.rand(len(x), 1, 1, generator=own))
    assert torch.equal(forward(unit, [4, 2]), torch.ones(2, 4, 8) * torch.rand(2, 1, 1, generator=same))


def test_two_draws_of_a_unit_differ() -> None:
    both = forward(Drawing(lambda x, _: torch.stack([torch.rand_like(x), torch.rand_like(x)], dim=1)), [4, 2])
    assert not torch.equal(both[:, 0], both[:, 1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uniform_numbers_are_spread_over_the_interval_and_below_its_end(dtype: torch.dtype) -> None:
    drawn = forward(Drawing(lambda x, _: torch.rand(len(x), 1 << 14, dtype=dtype)), [4, 2])
    assert drawn.dtype == dtype and drawn.min() >= 0 and drawn.max() < 1
    assert drawn.double().mean() == pytest.approx(0.5, abs=0.01)
    assert drawn.double().std() == pytest.approx(1 / math.sqrt(12), abs=0.01)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril(1)},
        {"attn_mask": torch.linspace(-1, 1, 36).view(6, 6)},
        {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril(-1)},
        {"attn_mask": torch.full((6, 6), -math.inf, dtype=torch.float64).triu()},
        {"enable_gqa": True},
    ],
)
def test_attention_that_drops_next_to_nothing_is_torchs(how: dict[str, Any]) -> None:
    heads = 2 if "enable_gqa" in how else 4
    q, k, v = (torch.randn(3, number, 6, 8, dtype=torch.float64, requires_grad=True) for number in (4, heads, heads))
    expected = functional.scaled_dot_product_attention(q, k, v, **how)

    unit = Drawing(lambda *_: functional.scaled_dot_product_attention(q, k, v, dropout_p=1e-12, **how))
    found = forward(unit, [4, 2, 9])
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        *(torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (found, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda x, _: x + torch.randn_like(x), r"^spec\.model: blocks\.3 draws random numbers by aten\.randn_like"),
        (lambda x, _: functional.dropout2d(x[None], 0.5)[0], r"blocks\.3 draws random numbers by aten\..* nn\.Dropout"),
        (lambda x, _: x[:, torch.randperm(4)], r"blocks\.3 draws random numbers by aten\.randperm"),
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_drawn_otherwise_is_refused(
    draw: Callable[[Tensor, bool], Tensor], message: str, recompute: bool
) -> None:
    with pytest.raises(SpecError, match=message):
        forward(Drawing(draw), [4, 2], recompute=recompute)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dropout", [nn.Dropout(0.5), functional.dropout, torch.rand_like])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_drawn_in_a_checkpoint_of_the_units_own_is_refused(
    use_reentrant: bool, dropout: Callable[[Tensor], Tensor], recompute: bool
) -> None:
    """It is computed again in the backward, when another micro-batch may be current."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.dropout = dropout

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = checkpoint(lambda y: self.dropout(y * self.weight), x, use_reentrant=use_reentrant)
            return output

    what = "uses a reentrant" if use_reentrant else "draws .* within"
    with pytest.raises(SpecError, match=rf"blocks\.3 {what} torch\.utils\.checkpoint.*activationCheckpointing"):
        forward(key_unit(Block(), 3, "blocks.3", seed=1), [4, 2], recompute=recompute)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_reentrant_checkpoint_in_a_unit_that_trains_is_refused(recompute: bool) -> None:
    """After a freeze its input needs no gradient, and then none of its parameters would train."""

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = checkpoint(super().forward, x, use_reentrant=True)
            return output

    unit = key_unit(Block(8, 8), 3, "blocks.3", seed=1)
    with pytest.raises(SpecError, match=r"blocks\.3 uses a reentrant torch\.utils\.checkpoint.*use_reentrant=False"):
        forward(unit, [4, 2], recompute=recompute)
    with torch.no_grad():  # frozen
        forward(unit, [4, 2])


def test_a_unit_may_compute_without_gradients() -> None:
    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = x.abs().amax(-1, keepdim=True)
            return super().forward(x) / scale

    forward(key_unit(Block(8, 8), 3, "blocks.3", seed=1), [4, 2])


def test_a_checkpoint_of_the_units_own_without_draws_is_left_alone() -> None:
    linear = nn.Linear(8, 8)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.dropout(checkpoint(self.linear, x, use_reentrant=False))  # type: ignore[no-any-return]

    output = forward(key_unit(Block(), 3, "blocks.3", seed=1), [4, 2])
    assert torch.autograd.grad(output.sum(), linear.weight)[0].any()


def test_what_is_drawn_as_well_where_nothing_is_trained_is_refused() -> None:
    """It would be cached, and be another in every evaluation."""
    unit = Drawing(lambda x, _: functional.dropout(x, 0.5))
    forward(unit, [4, 2])
    with pytest.raises(
        SpecError, match=r"also while it is frozen or evaluated: .* functional\.dropout\(x, p, self\.training"
    ):
        forward(unit.eval(), [4, 2])


def test_a_unit_that_draws_nothing_runs_by_itself_from_its_second_forward() -> None:
    quiet = Drawing(lambda x, _: functional.scaled_dot_product_attention(x, x, x))
    loud = Drawing(lambda x, training: functional.dropout(x, 0.5, training))
    for unit in (quiet, loud):
        forward(unit, [4, 2])
        forward(unit.eval(), [4, 2])
        forward(unit.train(), [4, 2])
    draws: list[_Draws] = [unit.__dict__["_pipetransformer_draws"] for unit in (quiet, loud)]
    assert [each.known for each in draws] == [{True: False, False: False}, {True: True, False: False}]
    with drawing(quiet, torch.device("cpu")) as mode:
        assert mode is None
