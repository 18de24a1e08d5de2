"""A runner that cuts micro-batches into slices of tokens trains as one that runs them whole, and times slices without
leaving a trace. Layers that would compute something else in slices are refused."""

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn import functional

from pipetransformer.data import DataInfo, MicroBatch
from pipetransformer.elastic.transport.groups import Transport, drop_groups, make_group
from pipetransformer.errors import SpecError
from pipetransformer.models import PipelineModel, build_model, off_device, with_earlier
from pipetransformer.models.off_device import move_off
from pipetransformer.models.randomness.keyed import with_keyed_dropout
from pipetransformer.pipeline import SpanProbes, StageRunner
from pipetransformer.schedules import TeraPipe
from pipetransformer_contract.spec import Model
from tests.testkit.trainer.stages import make_runner
from tests.testkit.user_code import causal_model

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 2}
LENGTH, VOCABULARY = 16, 11


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    group = make_group(HashStore(), "one", 0, 1, Transport("127.0.0.1", datetime.timedelta(seconds=20)))
    yield group
    drop_groups([group])


def make_gpt2(frozen: int) -> PipelineModel:
    info = DataInfo((LENGTH,), VOCABULARY, VOCABULARY)
    model = build_model(Model(name="huggingface", num_layers=3, options=GPT2), info, seed=0, dtype=torch.float64)
    return freeze(model, frozen)


def make_own(frozen: int) -> PipelineModel:
    torch.manual_seed(0)
    info = DataInfo((LENGTH,), VOCABULARY, VOCABULARY)
    model = causal_model.make_model(info, 3)
    for unit in model.units:
        unit.double()
    return freeze(with_keyed_dropout(model, seed=0), frozen)


def freeze(model: PipelineModel, frozen: int) -> PipelineModel:
    for index, unit in enumerate(model.units):
        trains = index > frozen or not frozen
        unit.requires_grad_(trains).train(trains)
    return model


def run(
    group: dist.ProcessGroup, model: PipelineModel, frozen: int, slices: tuple[int, ...]
) -> tuple[tuple[float, float], list[Tensor | None], StageRunner]:
    """One round over micro-batches of two lengths: loss and weight, gradients, and the runner."""
    runner = make_runner(group, model, TeraPipe(), boundary=frozen, dtype=torch.float64)
    runner.spec = replace(runner.spec, token_slices=slices)
    micro_batches = [MicroBatch((0, 1, 2), 3, 16), MicroBatch((3, 4, 3), 2, 16), MicroBatch((5, 6, 7), 3, 7)]
    sums = runner.train(3, micro_batches, causal_model.Rows(0, 8))
    assert runner.num_chunks(micro_batches) == 3 * max(1, len(slices))
    return (sums.loss, sums.weight), [p.grad for unit in model.units for p in unit.parameters()], runner


@pytest.mark.parametrize("make", [make_gpt2, make_own])
@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("slices", [(5, 3, 8), (1,) * 7], ids=str)
def test_a_runner_that_slices_tokens_trains_as_one_that_does_not(
    group: dist.ProcessGroup, make: Callable[[int], PipelineModel], frozen: int, slices: Sequence[int]
) -> None:
    sums, gradients, _ = run(group, make(frozen), frozen, tuple(slices))
    whole, expected, _ = run(group, make(frozen), frozen, ())
    assert sums == pytest.approx(whole, rel=1e-12)
    for got, wanted in zip(gradients, expected, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None and wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_timing_slices_leaves_no_trace(group: dist.ProcessGroup) -> None:
    model = make_own(1)
    runner = make_runner(group, model, TeraPipe(), boundary=1, dtype=torch.float64)
    state = torch.get_rng_state()
    seconds = SpanProbes(runner, causal_model.Rows(0, 8)).measure_slices(2, [(4, 0), (4, 12), (16, 0)])
    assert torch.equal(state, torch.get_rng_state())
    assert [[len(row) for row in unit] for unit in seconds] == [[3, 3]] * 5
    forward = [unit[0] for unit in seconds]
    backward = [unit[1] for unit in seconds]
    assert all(each > 0 for unit in forward for each in unit)
    assert [[each > 0 for each in unit] for unit in backward] == [[unit > 1] * 3 for unit in range(5)]
    assert all(parameter.grad is None for unit in model.units for parameter in unit.parameters())


def test_a_unit_that_is_off_the_device_comes_once_to_time_its_slices(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_own(1)
    runner = make_runner(group, model, TeraPipe(), boundary=1, dtype=torch.float64)
    for unit in model.units[:2]:
        move_off(unit, torch.device("cpu"))
    tensors = [tensor for unit in model.units[:2] for tensor in (*unit.parameters(), *unit.buffers())]
    copied: list[int] = []
    copy = off_device._on

    def note(device: torch.device, tensor: Tensor) -> Tensor:
        copied.append(tensor.data_ptr())
        return copy(device, tensor)

    monkeypatch.setattr(off_device, "_on", note)
    SpanProbes(runner, causal_model.Rows(0, 8)).measure_slices(2, [(4, 0), (4, 12)])

    assert copied == [tensor.data_ptr() for tensor in tensors]


class BreaksItsPromise(nn.Module):
    """A layer of tokens that says it runs slices, and does not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.qkv = nn.Linear(8, 24)
        self.window = nn.Conv1d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "window":
            windows: Tensor = self.window(functional.pad(x.transpose(1, 2), (2, 0)))
            return x + windows.transpose(1, 2)
        if self.how == "positions":
            return x + torch.arange(x.shape[1], device=x.device)[:, None]
        if self.how == "pooled":
            return x.mean(1, keepdim=True)
        query, key, value = self.qkv(x).unsqueeze(1).chunk(3, dim=3)
        if self.how != "alone":
            key, value = with_earlier(self, key, value, dim=2)
        causal = self.how in ("alone", "lined up at the start")
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        return x + mixed.squeeze(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("how", ["window", "positions", "pooled", "alone", "lined up at the start", "sees later ones"])
def test_a_layer_that_is_another_in_slices_is_refused(group: dist.ProcessGroup, how: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = causal_model.make_model(DataInfo((LENGTH,), VOCABULARY, VOCABULARY), 3)
    model.blocks[1] = BreaksItsPromise(how)
    for unit in model.units:
        unit.to(dtype)
    model = with_keyed_dropout(model, seed=0)
    runner = make_runner(group, model, TeraPipe(), boundary=0, dtype=dtype)
    with pytest.raises(SpecError, match=r"blocks\.1 computes something else in slices") as refused:
        SpanProbes(runner, causal_model.Rows(3, 8)).check_slices()
    assert refused.value.field == "spec.pipeline.schedule"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama", "own"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_model_that_is_the_same_in_slices_is_taken(
    group: dist.ProcessGroup, name: str, dtype: torch.dtype, recompute: bool
) -> None:
    torch.manual_seed(0)
    info = DataInfo((LENGTH,), VOCABULARY, VOCABULARY)
    if name == "own":
        model = with_keyed_dropout(causal_model.make_model(info, 3), seed=0)
    else:
        options = GPT2 if name == "gpt2" else {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2}
        model = build_model(Model(name="huggingface", num_layers=3, options=options), info, seed=0, dtype=dtype)
    for unit in model.units:
        unit.to(dtype)
    runner = make_runner(group, model, TeraPipe(), boundary=0, dtype=dtype)
    autocast = torch.bfloat16 if dtype is torch.float32 else None
    runner.spec = replace(runner.spec, token_slices=(5, 3, 8), recompute=recompute, autocast=autocast)
    state = torch.get_rng_state()
    SpanProbes(runner, causal_model.Rows(0, 8)).check_slices()
    assert torch.equal(state, torch.get_rng_state())


def test_a_layer_without_numbers_is_the_same_in_slices(group: dist.ProcessGroup) -> None:
    """Steps that are not finite are refused elsewhere, in words that fit."""
    model = make_own(0)
    with torch.no_grad():
        next(model.blocks[1].parameters()).fill_(float("nan"))
    runner = make_runner(group, model, TeraPipe(), boundary=0, dtype=torch.float64)
    SpanProbes(runner, causal_model.Rows(3, 8)).check_slices()
