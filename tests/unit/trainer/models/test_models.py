"""Models as lists of units, the same on every worker."""

import copy
import math
import random
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipetransformer.data import DataInfo
from pipetransformer.errors import SpecError
from pipetransformer.job.checks import check_model, check_spec
from pipetransformer.job.load import load_job
from pipetransformer.job.script_parts import Parts
from pipetransformer.models import (
    KeyedDropout,
    MicroBatchContext,
    PipelineModel,
    ScriptModel,
    build_model,
    build_units,
    current_micro_batch,
    run_unit,
    set_micro_batch,
    target_weights,
)
from pipetransformer.models.metrics import accuracy_of
from pipetransformer.models.randomness.dropout import _random_bits, derive_seed
from pipetransformer.models.randomness.keyed import key_dropout
from pipetransformer.models.randomness.seeded import one_at_a_time
from pipetransformer.state.worker_state import WorkerState
from pipetransformer_contract.spec import Data, Model, TrainerSpec, Training

INFO = DataInfo((1, 8, 8), 10)
SPEC = Model(name="vit", num_layers=3, hidden_size=16, num_heads=2, mlp_size=32)


def build(spec: Model = SPEC, seed: int = 0, units: list[int] | None = None) -> PipelineModel:
    return build_model(spec, INFO, seed=seed, dtype=torch.float64, units=units)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_unit_built_alone_has_the_weights_of_the_whole_model() -> None:
    model = build()
    for index, unit in enumerate(model.units):
        assert same(unit, build_units(SPEC, INFO, [index], seed=0, dtype=torch.float64)[index])


def test_building_takes_no_draw_from_the_global_generator() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    build()
    assert torch.equal(torch.rand(1), expected)


def test_seed_and_place_decide_the_weights() -> None:
    model = build()
    assert not same(model.blocks[0], model.blocks[1])
    assert not same(model.blocks[0], build(seed=1).blocks[0])


def test_units_that_were_not_asked_for_have_shapes_but_no_memory() -> None:
    whole, part = build(), build(units=[1, 2])
    assert [next(unit.parameters()).device.type for unit in part.units] == ["meta", "cpu", "cpu", "meta", "meta"]
    for one, other in zip(whole.units, part.units, strict=True):
        assert [(n, p.shape) for n, p in one.named_parameters()] == [(n, p.shape) for n, p in other.named_parameters()]


def test_activations_have_the_shape_that_the_model_says() -> None:
    model = build()
    x = torch.zeros(5, *INFO.input_shape, dtype=torch.float64)
    for unit in model.units[:-1]:
        x = unit(x)
        assert tuple(x.shape) == model.activation_shape(5)
    assert tuple(model.head(x).shape) == (5, 10)


def test_units_are_named_as_in_the_whole_model() -> None:
    model = build()
    assert [model.unit_name(i) for i in range(5)] == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    with pytest.raises(IndexError):
        model.unit_name(5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_classes_may_be_whole_numbers_of_any_size(dtype: torch.dtype) -> None:
    model, output = build(), torch.randn(4, 10, dtype=torch.float64)
    target, weight = torch.tensor([3, 0, 9, 1]), torch.ones(4, dtype=torch.float64)
    assert model.loss(output, target.to(dtype), weight) == model.loss(output, target, weight)
    assert model.correct(output, target.to(dtype), weight) == model.correct(output, target, weight)


def test_padding_counts_neither_in_loss_nor_in_accuracy() -> None:
    model = build()
    output = torch.randn(4, 10, dtype=torch.float64)
    target = output.argmax(dim=1)
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    loss, total = model.loss(output, target, weight)
    assert total == 3
    assert torch.isclose(loss, nn.functional.cross_entropy(output[[0, 1, 3]], target[[0, 1, 3]], reduction="sum"))
    assert model.correct(output, target, weight) == 3


def test_targets_of_positions_count_one_by_one_and_missing_ones_not_at_all() -> None:
    model = build()
    output = torch.randn(2, 3, 10, dtype=torch.float64)
    target = torch.tensor([[1, 2, -100], [3, -100, -100]])
    loss, total = model.loss(output, target, torch.tensor([1.0, 1.0], dtype=torch.float64))
    assert total == 3
    kept = target != -100
    assert torch.isclose(loss, nn.functional.cross_entropy(output[kept], target[kept], reduction="sum"))
    assert model.loss(output, target, torch.tensor([1.0, 0.0], dtype=torch.float64))[1] == 2
    assert model.correct(output, output.argmax(dim=-1), torch.tensor([1.0, 0.0])) == 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64])
def test_a_target_is_missing_by_its_number_in_any_type(dtype: torch.dtype) -> None:
    """In uint8, 156 has the bits of -100."""
    numbers = [100, 101] if dtype is torch.int8 else [155, 156]
    assert target_weights(torch.tensor(numbers, dtype=dtype), torch.ones(2)).tolist() == [1, 1]
    if dtype is not torch.uint8:
        assert target_weights(torch.tensor([-100], dtype=dtype), torch.ones(1)).tolist() == [0]


@pytest.mark.parametrize("shape", [(4,), (4, 3)], ids=str)
def test_targets_may_be_the_probabilities_of_classes(shape: tuple[int, ...]) -> None:
    model, output = build(), torch.randn(*shape, 10, dtype=torch.float64)
    target = torch.rand(*shape, 10, dtype=torch.float64).softmax(-1)
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    loss, total = model.loss(output, target, weight)
    assert total == 3 * (1 if len(shape) == 1 else 3)
    kept = [0, 2, 3]
    assert torch.isclose(loss, -(target[kept] * output[kept].log_softmax(-1)).sum())


def test_a_shell_tells_models_apart_by_all_weights_and_buffers() -> None:
    """Workers compare these sums before they start from different weights."""

    def shell(change: str = "") -> PipelineModel:
        torch.manual_seed(0)
        block = nn.Linear(8, 8)
        block.register_buffer("table", torch.ones(3), persistent=False)
        block.register_buffer("turns", torch.ones(3, dtype=torch.complex64) * 1j)
        model = PipelineModel(nn.Linear(4, 8), [block], nn.Linear(8, 2), (8,))
        if change:
            with torch.no_grad():
                model.blocks[0].get_parameter("weight")[0, 0] += change == "weight"
                model.blocks[0].get_buffer("table")[1] += change == "buffer"
        return model.shell()

    same, again = shell().first_sums(), shell().first_sums()
    assert same == again and len(same) == 3
    for change in ("weight", "buffer"):
        other = shell(change).first_sums()
        assert [one == two for one, two in zip(same, other, strict=True)] == [True, False, True]
    with pytest.raises(ValueError, match=r"blocks\.0\.table has other values each time"):
        shell().check_built({1: changed_table()})


def changed_table() -> nn.Module:
    torch.manual_seed(0)
    block = nn.Linear(8, 8)
    block.register_buffer("table", torch.zeros(3), persistent=False)
    return block


class Balanced(PipelineModel):
    """With weights of classes, as `nn.CrossEntropyLoss(weight=...)` has."""

    def loss(self, output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        of_classes = torch.tensor([0.1, 0.1, 0.4])
        weights = of_classes[target] * weight
        losses = nn.functional.cross_entropy(output, target, reduction="none")
        return torch.dot(losses, weights), weights.sum()


class Tolerant(Balanced):
    def correct(self, output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return super().loss(output, target, weight)[1]


def test_accuracy_is_the_share_of_targets_whatever_weights_the_loss_gives_them() -> None:
    output, target = torch.eye(3)[[0, 1, 2, 2]], torch.tensor([0, 1, 0, 2])
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0])

    balanced = Balanced(nn.Linear(2, 2), [nn.Linear(2, 2)], nn.Linear(2, 3), (2,))
    correct, of = accuracy_of(balanced)(output, target, weight)
    assert correct == 2 and of == 3

    tolerant = Tolerant(nn.Linear(2, 2), [nn.Linear(2, 2)], nn.Linear(2, 3), (2,))
    correct, of = accuracy_of(tolerant)(output, target, weight)
    assert correct == of == pytest.approx(0.3), "who replaces `correct` counts as the loss does"


def test_classes_in_a_column_are_counted_as_classes() -> None:
    model = build()
    output, weight = torch.randn(4, 10, dtype=torch.float64), torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    target = output.argmax(dim=1, keepdim=True)
    assert model.correct(output, target, weight) == 3
    assert model.loss(output, target, weight)[0] == model.loss(output, target.flatten(), weight)[0]
    with pytest.raises(
        ValueError, match=r"targets of shape \(4, 3\) are not classes for outputs of shape \(4, 10\): replace `correct`"
    ):
        model.correct(output, torch.zeros(4, 3), weight)


@pytest.mark.parametrize("step", [0, 1])
def test_recomputing_a_forward_changes_no_gradient_and_keeps_only_the_input(step: int) -> None:
    """Dropout, too, though other micro-batches have run before the backward comes."""
    unit = build(Model(name="vit", num_layers=1, hidden_size=16, num_heads=2, mlp_size=32, dropout=0.3)).blocks[0]
    x = torch.randn(3, 16, 16, dtype=torch.float64, requires_grad=True)
    saved: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    gradients, kept = [], []
    for recompute in (False, True):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = run_unit(unit, x, MicroBatchContext(step, [5, 6, 7], recompute=recompute))
        kept.append(sum(saved))
        run_unit(unit, x, MicroBatchContext(step + 9, [1, 2, 3]))
        gradients.append(torch.autograd.grad(y.square().sum(), [x, *unit.parameters()]))
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)
    assert kept[1] == x.numel() < kept[0] / 10


def test_autocast_computes_products_in_bfloat16_and_passes_on_float32() -> None:
    unit = build_units(SPEC, INFO, [1], seed=0, dtype=torch.float32)[1]
    x = torch.randn(3, 16, 16)
    exact = run_unit(unit, x, MicroBatchContext(0, [5, 6, 7]))
    rounded = run_unit(unit, x, MicroBatchContext(0, [5, 6, 7], autocast=torch.bfloat16))
    assert rounded.dtype == torch.float32
    assert 1e-5 < (rounded - exact).norm() / exact.norm() < 1e-2
    rounded.sum().backward()  # type: ignore[no-untyped-call]
    assert {parameter.grad.dtype for parameter in unit.parameters() if parameter.grad is not None} == {torch.float32}


class Polar(nn.Linear):
    """Turns its output by angles that it keeps as complex numbers, as Llama does."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        angles = torch.arange(4.0)
        self.register_buffer("turns", torch.polar(torch.ones(4), angles))
        self.register_buffer("again", torch.polar(torch.ones(4), angles), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(super().forward(x).view(*x.shape[:-1], 4, 2))
        return torch.view_as_real(pairs * self.get_buffer("turns") * self.get_buffer("again")).flatten(-2)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, torch.complex64), (torch.float64, torch.complex128)])
def test_complex_buffers_stay_complex_in_every_precision(dtype: torch.dtype, width: torch.dtype) -> None:
    def units() -> list[nn.Module]:
        return [Polar(), Polar(), nn.Linear(8, 2)]

    model = ScriptModel(units, torch.zeros(1, 8, dtype=dtype), seed=0, dtype=dtype)
    for index, unit in model.build_units(range(2)).items():
        for name in ("turns", "again"):
            assert torch.equal(unit.get_buffer(name), Polar().get_buffer(name).to(width)), index
        assert unit.get_parameter("weight").dtype is dtype
    assert model.shell().blocks[0].get_buffer("turns").dtype is width


def test_a_state_without_imaginary_parts_of_an_older_trainer_is_refused() -> None:
    old = Polar().state_dict()
    state = WorkerState(1)
    with pytest.raises(SpecError, match=r"blocks\.0\.turns has lost its imaginary part"):
        state.put_unit(1, Polar(), {f"blocks.0.{name}": tensor.real for name, tensor in old.items()})


class Counted(nn.Linear):
    """Keeps a number that is in no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}


def test_state_beside_tensors_is_refused_with_the_layers_name() -> None:
    model = PipelineModel(nn.Linear(2, 2), [nn.Sequential(Counted(2, 2))], nn.Linear(2, 2), (2,))
    with pytest.raises(SpecError, match=r"blocks\.0\.0 is a Counted with state beside its tensors"):
        check_model(model)


def test_running_statistics_are_refused_with_the_layers_name() -> None:
    model = PipelineModel(nn.Linear(2, 2), [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))], nn.Linear(2, 2), (2,))
    with pytest.raises(SpecError, match=r"blocks\.0\.1 is a BatchNorm1d"):
        check_model(model)
    model.blocks = [nn.BatchNorm1d(2)]
    with pytest.raises(SpecError, match=r"blocks\.0 is a BatchNorm1d"):
        check_model(model)
    model.blocks = [nn.LayerNorm(2)]
    check_model(model)


@pytest.fixture
def dropout() -> Iterator[KeyedDropout]:
    yield KeyedDropout(0.5, seed=3, place=1)


def test_a_dropout_mask_belongs_to_the_sample_whatever_its_micro_batch(dropout: KeyedDropout) -> None:
    x = torch.ones(4, 6, 8)
    set_micro_batch(MicroBatchContext(7, [10, 11, 12, 13]))
    together = dropout(x)
    set_micro_batch(MicroBatchContext(7, [12, 10]))
    assert torch.equal(dropout(x[:2]), together[[2, 0]])
    set_micro_batch(MicroBatchContext(8, [12, 10]))
    assert not torch.equal(dropout(x[:2]), together[[2, 0]])


@pytest.mark.parametrize(
    ("attention", "masks"),
    [
        ({"batch_first": True}, {}),
        ({"batch_first": True}, {"attn_mask": torch.ones(5, 5).triu(1).bool()}),
        ({"kdim": 6, "vdim": 6, "bias": False}, {"key_padding_mask": torch.arange(5).expand(3, 5) > 3}),
        ({"batch_first": True}, {"attn_mask": torch.ones(5, 5).triu().bool(), "need_weights": False}),
        ({}, {"attn_mask": torch.full((5, 5), -math.inf).triu(), "need_weights": False}),
        ({}, {"attn_mask": torch.linspace(-1, 1, 150).view(6, 5, 5), "average_attn_weights": False}),
    ],
)
def test_attention_with_keyed_dropout_is_torchs_and_what_it_drops_belongs_to_samples(
    attention: dict[str, Any], masks: dict[str, Any]
) -> None:
    torchs = nn.MultiheadAttention(8, 2, **attention)
    keyed = copy.deepcopy(torchs)
    keyed.dropout = 1e-12
    keyed = key_dropout(nn.Sequential(keyed), 1, seed=3)[0]  # type: ignore[index]
    first = attention.get("batch_first", False)
    x = torch.randn((3, 5, 8) if first else (5, 3, 8))
    other = x if "kdim" not in attention else x[..., :6]
    set_micro_batch(MicroBatchContext(7, [10, 11, 12]))
    for ours, theirs in zip(keyed(x, other, other, **masks), torchs(x, other, other, **masks), strict=True):
        assert ours is theirs is None or torch.allclose(ours, theirs, atol=1e-6)

    keyed.dropout = 0.5
    set_micro_batch(MicroBatchContext(7, [10, 11, 12]))
    together = keyed(x, other, other)[0]
    set_micro_batch(MicroBatchContext(7, [12]))
    alone = keyed(*((x[2:] if first else x[:, 2:]) for x in (x, other, other)))[0]
    assert torch.allclose(alone, together[2:] if first else together[:, 2:], atol=1e-6)
    assert not torch.allclose(together, torchs(x, other, other)[0], atol=1e-2)


def test_a_place_that_draws_twice_in_a_forward_gets_two_masks(dropout: KeyedDropout) -> None:
    x = torch.ones(2, 6, 8)
    set_micro_batch(MicroBatchContext(7, [10, 11]))
    first, second = dropout(x), dropout(x)
    assert not torch.equal(first, second)
    set_micro_batch(MicroBatchContext(7, [10, 11]))
    assert torch.equal(dropout(x), first)


def test_samples_are_hashed_once_a_micro_batch_and_draws_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each hash of a sample would keep the device waiting."""
    hashed = []

    def hashing(*parts: int) -> int:
        hashed.append(parts)
        return derive_seed(*parts)

    monkeypatch.setattr("pipetransformer.models.randomness.dropout.derive_seed", hashing)
    context = MicroBatchContext(7, [10, 11, 12])
    for place in (1, 2):
        set_micro_batch(context.before_unit())
        KeyedDropout(0.5, seed=3, place=place)(torch.ones(3, 4))
    assert sorted(hashed) == [(1, 0), (2, 0), (3, 7, 10), (3, 7, 11), (3, 7, 12)]


@pytest.mark.parametrize(
    "other", [(4, 1, 7, 10, 0), (3, 2, 7, 10, 0), (3, 1, 8, 10, 0), (3, 1, 7, 11, 0), (3, 1, 7, 10, 1)]
)
def test_another_seed_place_step_sample_or_draw_drops_other_elements(other: tuple[int, ...]) -> None:
    def dropped(seed: int, place: int, step: int, sample: int, draw: int) -> Tensor:
        set_micro_batch(MicroBatchContext(step, [sample]))
        module = KeyedDropout(0.5, seed=seed, place=place)
        masks: list[Tensor] = [module(torch.ones(1, 4096)) == 0 for _ in range(draw + 1)]
        return masks[draw]

    same = (dropped(3, 1, 7, 10, 0) == dropped(*other)).double().mean()
    assert abs(float(same) - 0.5) < 0.05  # six standard errors


def test_random_bits_are_those_of_splitmix64() -> None:
    def reference(seed: int, count: int) -> bytes:
        """In Python's integers, as the paper has it."""
        drawn, mask = [], (1 << 64) - 1
        for number in range(1, count + 1):
            z = (seed + number * 0x9E3779B97F4A7C15) & mask
            z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
            drawn.append(z ^ (z >> 31))
        return b"".join(z.to_bytes(8, "little") for z in drawn)

    keys = [0, 1234567, (1 << 63) - 1]
    for row, seed in zip(_random_bits(torch.tensor(keys), 99), keys, strict=True):
        assert row.numpy().tobytes() == reference(seed, 50)[:-4]


def test_a_dropout_mask_belongs_to_the_sample_in_all_of_its_windows(dropout: KeyedDropout) -> None:
    x = torch.ones(6, 3, 8)
    set_micro_batch(MicroBatchContext(7, [10, 11]))
    together = dropout(x)
    set_micro_batch(MicroBatchContext(7, [11]))
    assert torch.equal(dropout(x[3:]), together[3:])
    assert not torch.equal(together[3], together[4])


@pytest.mark.parametrize("shape", [(6, 2, 4, 4), (6, 2, 8), (6, 2)])
def test_dropout_takes_rows_of_samples_that_are_as_long_as_the_micro_batch(
    shape: tuple[int, ...], dropout: KeyedDropout
) -> None:
    """Such as heads of windows, or windows of as many positions."""
    set_micro_batch(MicroBatchContext(7, [10, 11]))
    assert dropout(torch.ones(shape)).shape == shape


def test_dropout_keeps_the_mean_and_is_off_in_evaluation(dropout: KeyedDropout) -> None:
    x = torch.ones(8, 100, 100)
    set_micro_batch(MicroBatchContext(0, range(8)))
    assert dropout(x).mean().item() == pytest.approx(1, abs=0.02)
    assert torch.equal(dropout.eval()(x), x)


def test_dropout_of_all_gives_zeros() -> None:
    x = torch.ones(2, 8, requires_grad=True)
    set_micro_batch(MicroBatchContext(0, [0, 1]))
    dropped = KeyedDropout(1.0, seed=3, place=1)(x)
    dropped.sum().backward()
    assert torch.equal(dropped, torch.zeros(2, 8))
    assert x.grad is not None and torch.equal(x.grad, torch.zeros(2, 8))


def test_dropout_refuses_a_micro_batch_that_it_was_not_told_of(dropout: KeyedDropout) -> None:
    set_micro_batch(MicroBatchContext(0, [1, 2]))
    with pytest.raises(ValueError, match=r"\(3, 4\) in a micro-batch of 2 samples, but samples must come first"):
        dropout(torch.ones(3, 4))


def test_a_module_in_several_blocks_drops_other_elements_in_each() -> None:
    def shared() -> list[nn.Module]:
        block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        attention = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.5, batch_first=True)
        return [nn.Identity(), block, block, attention, attention, nn.Linear(8, 2)]

    made = ScriptModel(shared, torch.ones(1, 8), seed=0, dtype=torch.float64)
    assert {(tie.places[0][0], tie.places[1][0]) for tie in made.shell().ties.all} == {(1, 2), (3, 4)}
    units, x = made.build_units(range(6)), torch.ones(2, 3, 8, dtype=torch.float64)
    for one, other in ((1, 2), (3, 4)):
        assert same(units[one], units[other])
        outputs = [run_unit(units[unit].train(), x, MicroBatchContext(0, (0, 1))) for unit in (one, other)]
        assert not torch.equal(*outputs)


def test_a_function_that_gives_the_same_modules_again_gets_the_same_places() -> None:
    modules = [nn.Identity(), *[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))] * 2, nn.Linear(8, 2)]
    made = ScriptModel(lambda: modules, torch.ones(1, 8), seed=0, dtype=torch.float64)
    set_micro_batch(MicroBatchContext(0, (0, 1)))

    def places(units: Iterable[nn.Module]) -> list[int]:
        return [m.place for unit in units for m in unit.modules() if isinstance(m, KeyedDropout)]

    first, *again = (places(made.build_units(range(4)).values()) for _ in range(3))
    assert len(set(first)) == 2 and again == [first, first]
    assert places(made.shell().units) == first


def two_linears(info: DataInfo, width: int = 4) -> PipelineModel:
    blocks: list[nn.Module] = [nn.Linear(width, width) for _ in range(3)]
    embedding = nn.Sequential(nn.Flatten(), nn.Linear(64, width))
    return PipelineModel(embedding, blocks, nn.Linear(width, info.num_classes), (width,))


def test_a_model_can_be_imported_and_is_seeded() -> None:
    spec = Model(name=f"{__name__}:two_linears", num_layers=3, options={"width": 6})
    model = build(spec)
    assert model.activation_shape(2) == (2, 6)
    assert same(model.blocks[1], build(spec).blocks[1])
    assert same(model.blocks[1], build_units(spec, INFO, [2], seed=0, dtype=torch.float64)[2])
    assert next(model.head.parameters()).dtype == torch.float64


def test_a_model_is_the_same_on_every_worker_whatever_draws_its_weights() -> None:
    def build() -> list[nn.Module]:
        model = [nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)]
        model[0].weight.data.fill_(random.random())
        model[1].weight.data.copy_(torch.from_numpy(np.random.rand(8, 8)))
        return [*model]

    made = ScriptModel(build, torch.zeros(1, 4), seed=3, dtype=torch.float32)
    drawn = []
    for worker in range(2):
        random.seed(worker)
        np.random.seed(worker)
        units = made.build_units(range(3))
        drawn.append((units, random.random(), np.random.rand()))
        random.seed(worker)
        np.random.seed(worker)
        assert drawn[-1][1:] == (random.random(), np.random.rand()), "building took a draw of the process's"
    (one, *_), (other, *_) = drawn
    assert all(same(one[index], other[index]) for index in range(3))


def test_one_thread_at_a_time_makes_a_model_for_the_generators_are_the_processs() -> None:
    entered = []

    def build() -> list[nn.Module]:
        other = threading.Thread(target=lambda: entered.append(one_at_a_time.acquire(blocking=False)))
        other.start()
        other.join(30)
        return [nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)]

    ScriptModel(build, torch.zeros(1, 4), seed=3, dtype=torch.float32).build_units(range(3))
    assert entered == [False]


class Rotated(nn.Module):
    """Turns pairs by a table that is no part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("turn", torch.linspace(0, 1, 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.get_buffer("turn").cos()) @ self.weight


def test_an_embedding_of_a_function_may_change_its_input_in_place() -> None:
    class Shifting(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids.add_(1))  # 0 is padding

    def build() -> list[nn.Module]:
        return [Shifting(11, 8), nn.Linear(8, 8), nn.Linear(8, 2)]

    made = ScriptModel(build, torch.full((1, 3), 9), seed=0, dtype=torch.float32)

    assert made.shell().activation == (3, 8)
    assert len(made.build_units(range(3))) == 3


class Masking(nn.Embedding):
    """Asks for the length of samples."""

    def forward(self, ids: Tensor) -> Tensor:
        lengths = current_micro_batch().lengths
        assert lengths is not None
        return super().forward(ids) * (torch.arange(ids.shape[1]) < lengths[:, None])[..., None]


def test_an_embedding_of_a_function_may_ask_for_the_micro_batch() -> None:
    made = ScriptModel(
        lambda: [Masking(11, 8), nn.Linear(8, 8), nn.Linear(8, 2)], torch.ones(1, 3).long(), seed=0, dtype=torch.float32
    )
    set_micro_batch(MicroBatchContext(0, range(4), torch.ones(4)))  # of an earlier run

    assert made.shell().activation == (3, 8)


def test_the_micro_batch_of_a_thread_is_no_other_threads() -> None:
    """A program's callback may run a finished model while its process trains."""
    context = MicroBatchContext(7, (3,))
    set_micro_batch(context)
    other = threading.Thread(target=set_micro_batch, args=(MicroBatchContext(0, (0, 1)),))
    other.start()
    other.join(30)
    assert current_micro_batch() is context


def test_a_unit_that_moves_brings_its_state_and_finds_its_constants_without_building_the_model_again() -> None:
    builds = []

    def build() -> list[nn.Module]:
        builds.append(1)
        return [nn.Linear(4, 8), Rotated(), Rotated(), nn.Linear(8, 2)]

    data = TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
    spec = TrainerSpec(model=Model(name="script"), data=Data(name="script"), training=Training(steps=1))
    job = load_job(spec, Parts(model=build, data=data))
    trained, state, x = job.build_units([1])[1], WorkerState(2), torch.randn(3, 8)
    builds.clear()

    blank = job.blank_unit(1)
    assert blank.get_parameter("weight").is_meta
    state.put_unit(1, blank, {f"blocks.0.{name}": tensor for name, tensor in trained.state_dict().items()})

    assert torch.equal(blank(x), trained(x))
    assert not builds


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (Model(name="resnet"), "spec.model.name"),
        (Model(name="no_such_module:f"), "spec.model.name"),
        (Model(name=f"{__name__}:same"), "spec.model.options"),
        (Model(name=f"{__name__}:two_linears", num_layers=4), "spec.model.numLayers"),
        (Model(name="builtins:repr"), "spec.model.name"),
        (Model(name="vit", patch_size=3), "spec.model.patchSize"),
    ],
)
def test_a_model_that_cannot_be_built_names_the_field(spec: Model, field: str) -> None:
    with pytest.raises(SpecError) as caught:
        build(spec)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pipeline": {"stages": 13}}, "spec.pipeline.stages"),
        ({"numShards": 65}, "spec.training.globalBatchSize"),
        ({"training": {"epochs": 1, "steps": 1}}, "spec.training"),
        ({"evaluation": {"keepBest": True}}, "spec.evaluation.keepBest"),
    ],
)
def test_a_spec_that_could_never_train_names_the_field(changes: dict[str, object], field: str) -> None:
    spec = {"model": {"name": "vit"}, "data": {"name": "digits"}, "training": {"epochs": 1}}
    check_spec(TrainerSpec.model_validate(spec))
    with pytest.raises(SpecError) as caught:
        check_spec(TrainerSpec.model_validate({**spec, **changes}))
    assert caught.value.field == field
