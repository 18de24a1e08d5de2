"""Slices of tokens: a forward from the first slice to the last and a backward from the last to the first give the
outputs and gradients of whole samples, in one process and with spans that hand over detached activations."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetransformer.data import DataInfo
from pipetransformer.models import (
    MicroBatchContext,
    PipelineModel,
    TokenSlice,
    build_model,
    current_micro_batch,
    run_unit,
    set_micro_batch,
    with_earlier,
)
from pipetransformer.models.randomness.dropout import keyed_dropout
from pipetransformer.models.randomness.keyed import with_keyed_dropout
from pipetransformer_contract.spec import Model

LENGTH, VOCABULARY, SAMPLES, LAYERS = 16, 40, 3, 4
TOKENS = DataInfo((LENGTH,), VOCABULARY, VOCABULARY)
SMALL = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [2.0, 3.0], "short_factor": [1.0, 1.5]}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2-tied": {"model_type": "gpt2", "n_embd": 16, "n_head": 2},
    "llama-grouped": {"model_type": "llama", **SMALL},
    "llama-longrope": {
        "model_type": "llama",
        **SMALL,
        "rope_parameters": {**LONGROPE, "original_max_position_embeddings": LENGTH - 4},
    },
    "mistral-window": {"model_type": "mistral", **SMALL, "sliding_window": 6},
    "qwen2": {"model_type": "qwen2", **SMALL},
    "qwen3": {"model_type": "qwen3", **SMALL, "head_dim": 8},
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
DROPOUT = {
    "gpt2-tied": {"resid_pdrop": 0.3, "embd_pdrop": 0.2, "attn_pdrop": 0.4},
    "llama-grouped": {"attention_dropout": 0.4},
}
SLICES = [(16,), (8, 8), (5, 3, 8), (9, 4, 2, 1)]


def build(family: str, **options: Any) -> PipelineModel:
    fitted = {**FAMILIES[family], **(NO_DROPOUT if "gpt2" in family else {}), **options}
    spec = Model(name="huggingface", num_layers=LAYERS, options=fitted)
    return build_model(spec, TOKENS, seed=3, dtype=torch.float64)


def samples(length: int = LENGTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (SAMPLES, length + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def trained_from(model: PipelineModel, frozen: int) -> PipelineModel:
    """The model with its first `frozen` blocks frozen, and the embedding with them unless the head trains it."""
    for index, unit in enumerate(model.units):
        unit.requires_grad_(index > frozen or not frozen).train(index > frozen or not frozen)
    return model


def context_of(tokens: TokenSlice | None, memory: dict[object, object], *, recompute: bool) -> MicroBatchContext:
    return MicroBatchContext(4, (7, 5, 9)[:SAMPLES], recompute=recompute, tokens=tokens, memory=memory)


def run(
    model: PipelineModel,
    lengths: Sequence[int] | None,
    *,
    spans: Sequence[range] = (range(LAYERS + 2),),
    recompute: bool = False,
    frozen: int = 0,
    given: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run one micro-batch in slices of these lengths; None for whole samples. Returns the summed loss and gradients.

    Spans hand over detached activations, as workers do. Two spans run with a context and a memory each.
    """
    inputs, labels = given or samples()
    total = inputs.shape[1]
    bounds = [0, *accumulate(lengths or (total,))]
    slices = [TokenSlice(start, stop, total) for start, stop in pairwise(bounds)]
    memories: list[dict[object, object]] = [{} for _ in spans]
    first_trained = frozen + 1 if frozen else 0
    flights: list[list[tuple[Tensor, Tensor]]] = []
    loss = torch.zeros((), dtype=torch.float64)

    for tokens in slices:
        x = inputs[:, tokens.start : tokens.stop]
        flights.append([])
        for number, span in enumerate(spans):
            context = context_of(tokens if lengths else None, memories[number], recompute=recompute)
            entry = x = x.detach().requires_grad_(span.start > first_trained)
            for index in span:
                with torch.set_grad_enabled(index >= first_trained):
                    x = run_unit(model.units[index], x, context)
            flights[-1].append((entry, x))
        target = labels[:, tokens.start : tokens.stop]
        part, _ = model.loss(x, target, torch.ones(SAMPLES, dtype=torch.float64))
        loss, flights[-1][-1] = loss + part.detach(), (flights[-1][-1][0], part)

    for flight in reversed(flights):
        gradient: Tensor | None = None
        for entry, output in reversed(flight):
            if output.requires_grad:
                torch.autograd.backward(output, gradient)
            gradient = entry.grad
    return loss, {
        f"{model.unit_name(index)}.{name}": parameter.grad
        for index, unit in enumerate(model.units)
        for name, parameter in unit.named_parameters()
        if parameter.grad is not None
    }


def assert_same(make: Callable[[], PipelineModel], lengths: Sequence[int], **options: Any) -> None:
    loss, gradients = run(make(), lengths, **options)
    whole = {name: value for name, value in options.items() if name in ("frozen", "given")}
    expected_loss, expected = run(make(), None, **whole)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    assert gradients.keys() == expected.keys() and expected
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


TWO_SPANS = (range(3), range(3, LAYERS + 2))


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("lengths", SLICES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_slices_give_the_gradients_of_whole_samples(family: str, lengths: Sequence[int], frozen: int) -> None:
    assert_same(lambda: trained_from(build(family), frozen), lengths, spans=TWO_SPANS, frozen=frozen)


@pytest.mark.parametrize("lengths", SLICES[1:], ids=str)
@pytest.mark.parametrize("family", DROPOUT)
def test_a_slice_drops_what_the_whole_sample_drops_at_its_positions(family: str, lengths: Sequence[int]) -> None:
    def make() -> PipelineModel:
        return trained_from(build(family, **DROPOUT[family]), 0)

    assert_same(make, lengths, spans=TWO_SPANS)
    assert run(make(), lengths)[0] != run(trained_from(build(family), 0), lengths)[0]  # something was dropped


def test_masks_of_samples_with_an_odd_number_of_positions_are_the_same_in_slices() -> None:
    """There, rows of the attention's weights begin in the middle of a drawn number."""
    assert_same(lambda: trained_from(build("gpt2-tied", **DROPOUT["gpt2-tied"]), 0), (4, 3, 6), given=samples(13))


@pytest.mark.parametrize("family", DROPOUT)
def test_slices_that_repeat_their_forward_give_the_same_gradients(family: str) -> None:
    def make() -> PipelineModel:
        return trained_from(build(family, **DROPOUT[family]), 1)

    assert_same(make, (9, 4, 2, 1), spans=TWO_SPANS, recompute=True, frozen=1)


def test_slices_repeat_their_forward_where_keys_need_no_gradient() -> None:
    """As with adapters on the queries alone, behind a frozen layer."""

    def make() -> PipelineModel:
        keys = {(unit, f"layer.self_attn.{name}_proj.weight") for unit in range(1, LAYERS + 1) for name in "kv"}
        return trained_from(build("llama-grouped").with_constants(keys), 1)

    assert_same(make, (9, 4, 2, 1), recompute=True, frozen=1)


@pytest.mark.parametrize("frozen", [0, LAYERS])
def test_the_memory_of_a_micro_batch_goes_with_its_first_slice(frozen: int) -> None:
    model = trained_from(build("gpt2-tied"), frozen)
    memory: dict[object, object] = {}
    held: list[int] = []
    losses = []
    inputs, labels = samples()
    for tokens in (TokenSlice(0, 9, LENGTH), TokenSlice(9, LENGTH, LENGTH)):
        context = context_of(tokens, memory, recompute=False)
        x = inputs[:, tokens.start : tokens.stop]
        for index, unit in enumerate(model.units):
            with torch.set_grad_enabled(index > frozen or not frozen):
                x = run_unit(unit, x, context)
        losses.append(model.loss(x, labels[:, tokens.start : tokens.stop], torch.ones(SAMPLES).double())[0])
        held.append(bytes_kept(memory))
    one = SAMPLES * LENGTH * 16 * 8
    assert held == [2 * LAYERS * one, 0 if frozen else 2 * LAYERS * one]
    for loss in reversed(losses):
        loss.backward()  # type: ignore[no-untyped-call]
    assert bytes_kept(memory) == 0


def bytes_kept(memory: dict[object, object]) -> int:
    values = [kept._values for kept in memory.values()]  # type: ignore[attr-defined]
    return sum(value.numel() * value.element_size() for value in values)


class Mixing(nn.Module):
    """An own layer: the mean over the values of all positions so far, asked for twice in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for linear in (self.first, self.second):
            (values,) = with_earlier(self, linear(x), dim=1)
            count = current_micro_batch().places(x.shape[1], x.device) + 1
            x = x + torch.tanh(values.cumsum(1)[:, -x.shape[1] :] / count[:, None])
            x = functional.dropout(x, 0.3, self.training)
        return x


class Frames(PipelineModel):
    """Predicts frames, which are no tokens."""

    def loss(self, output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return (output - target).square().sum(), weight.sum()


def own_model() -> PipelineModel:
    torch.manual_seed(0)
    units = [nn.Linear(6, 6), *(Mixing() for _ in range(LAYERS)), nn.Linear(6, 6)]
    model = Frames(units[0], units[1:-1], units[-1], (LENGTH, 6), slices_tokens=True)
    for unit in model.units:
        unit.double()
    return with_keyed_dropout(model, seed=0)


@pytest.mark.parametrize("recompute", [False, True])
def test_an_own_model_that_keeps_its_promise_runs_in_slices(recompute: bool) -> None:
    torch.manual_seed(2)
    given = (torch.randn(SAMPLES, LENGTH, 6).double(), torch.randn(SAMPLES, LENGTH, 6).double())
    assert_same(own_model, (5, 3, 8), given=given, recompute=recompute)


def test_only_causal_models_say_that_they_can_run_slices() -> None:
    assert all(build(family).slices_tokens for family in FAMILIES)
    options = {"model_type": "bert", "hidden_size": 16, "num_attention_heads": 4}
    bert = Model(name="huggingface", num_layers=1, options=options, architecture="BertForMaskedLM")
    assert not build_model(bert, TOKENS, seed=0, dtype=torch.float64).slices_tokens
    assert own_model().shell().slices_tokens
    assert not PipelineModel(nn.Identity(), [nn.Identity()], nn.Identity(), (1,)).slices_tokens


def test_slices_in_a_wrong_order_are_refused() -> None:
    memory: dict[object, object] = {}
    module, value = nn.Identity(), torch.ones(1, 2, requires_grad=True)

    def at(start: int) -> Tensor:
        set_micro_batch(MicroBatchContext(0, (0,), tokens=TokenSlice(start, start + 2, 4), memory=memory))
        return with_earlier(module, value, dim=1)[0]

    first = at(0).sum()
    memory_of_later, memory = memory, {}
    with pytest.raises(RuntimeError, match="tokens 2 to 4 ran forward, but the tokens from 0 on did not yet"):
        at(2)
    memory = memory_of_later
    at(2)
    with pytest.raises(RuntimeError, match="tokens 0 to 2 ran backward, but the tokens up to 4 did not yet"):
        first.backward()  # type: ignore[no-untyped-call]


def test_a_mask_of_another_shape_than_the_slice_is_refused() -> None:
    set_micro_batch(MicroBatchContext(0, (0, 1), tokens=TokenSlice(0, 2, 4)))
    with pytest.raises(ValueError, match=r"dropout of shape \(2, 3, 6\) in a slice of 2 tokens must have the shape"):
        keyed_dropout(torch.ones(2, 3, 6), 0.5, seed=0, place=0)
    with pytest.raises(ValueError, match=r"must have the shape \(2, heads, 2, 2\)"):
        keyed_dropout(torch.ones(2, 1, 2, 4), 0.5, seed=0, place=0, attention=True)
