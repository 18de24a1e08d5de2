"""A backward in halves gives the gradients of a whole one, for every kind of module, and asks nothing twice."""

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from pipetransformer.models import MicroBatchContext, run_unit
from pipetransformer.models.randomness.dropout import KeyedDropout
from pipetransformer.pipeline import backward_halves

SAMPLES, TOKENS, WIDTH = 3, 4, 8


class Block(nn.Module):
    """A transformer block, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = KeyedDropout(0.3, seed=1, place=2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        change = self.dropout(self.narrow(functional.gelu(self.wide(self.other_norm(x)))))
        return torch.add(x, change)


class Tied(nn.Module):
    """Uses its first weight again behind the second one, and a norm twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(self.norm(self.first(x))))
        again = self.norm(functional.linear(x, self.first.weight.t()))
        return torch.add(again, self.first(x))


class Square(nn.Linear):
    """Keeps the width."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class Unused(Square):
    """Has a weight that no output depends on, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        return super().forward(self.frozen(x).relu())


class Hooked(nn.LayerNorm):
    """Scales the gradient of a result, as code that clips gradients does."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
        return y.sin()


class View(Square):
    """Returns a view of a computation with weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(0, 1).transpose(0, 1)


class InPlace(Square):
    """Changes its input and its result in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1.0).relu_()).mul_(2.0)


class WeightsOfWeights(nn.Module):
    """Computes a weight from others, one of them used directly too."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.normed(x @ (self.left @ self.right))
        return torch.add(normed, (x @ self.left) @ self.right)


class Recurrent(nn.LSTM):
    """Has several results, of which one is used."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class _Product(torch.autograd.Function):
    """A product in a single node, as a fused kernel makes one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.t(), (x.transpose(-1, -2) @ gradients[0]).sum(0)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return output


class WithMemory(Square):
    """Reads a leaf that is no weight, as a slice of tokens reads the keys of an earlier one."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * super().forward(self.memory)


KINDS: list[Callable[[], nn.Module]] = [
    Block, Tied, Unused, Hooked, View, InPlace, WeightsOfWeights, Recurrent, Fused, WithMemory, nn.ReLU,
]  # fmt: skip


def make_span(*kinds: Callable[[], nn.Module]) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(kind() for kind in kinds).double()


def run(span: nn.ModuleList, context: MicroBatchContext) -> tuple[Tensor, Tensor]:
    """The span's output and its input."""
    generator = torch.Generator().manual_seed(1)
    span_input = torch.randn(SAMPLES, TOKENS, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    x = span_input
    for unit in span:
        x = run_unit(unit, x, context)
    return x, span_input


def gradients_of(
    span: nn.ModuleList, context: MicroBatchContext, backward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
) -> list[Tensor | None]:
    """The gradients of input, memories and weights after two chunks of one round."""
    found: list[Tensor | None] = []
    for number in range(2):
        output, span_input = run(span, context)
        weights = torch.linspace(-1, 1 + number, output.numel(), dtype=output.dtype).view_as(output)
        found.append(backward(output, span_input, weights))
    found += [unit.memory.grad for unit in span if isinstance(unit, WithMemory)]
    return [*found, *(parameter.grad for parameter in span.parameters())]


def whole(output: Tensor, span_input: Tensor, output_gradient: Tensor | None) -> Tensor:
    torch.autograd.backward([output], [output_gradient] if output_gradient is not None else None)
    assert span_input.grad is not None
    return span_input.grad


def in_halves(output: Tensor, span_input: Tensor, output_gradient: Tensor | None) -> Tensor:
    gradient, rest = backward_halves.begin(output, span_input, output_gradient)
    backward_halves.finish(rest)
    assert gradient is not None
    return gradient


def context_of(**options: Any) -> MicroBatchContext:
    return MicroBatchContext(0, range(SAMPLES), **options)


def assert_equal_gradients(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert [gradient is None for gradient in found] == [gradient is None for gradient in expected]
    for ours, theirs in zip(found, expected, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [(kind, recompute) for kind in KINDS for recompute in (False, True) if not (recompute and kind is InPlace)],
)
def test_halves_give_the_gradients_of_a_whole_backward(kind: Callable[[], nn.Module], recompute: bool) -> None:
    span, context = make_span(Square, kind, Block, kind), context_of(recompute=recompute)
    expected = gradients_of(copy.deepcopy(span), context, whole)
    assert_equal_gradients(gradients_of(span, context, in_halves), expected)


def test_halves_in_another_order_than_the_chunks_give_the_same() -> None:
    span = make_span(Block, Tied)
    expected = gradients_of(copy.deepcopy(span), context_of(), whole)
    left: list[backward_halves.WeightGradients] = []

    def begin(output: Tensor, span_input: Tensor, output_gradient: Tensor | None) -> Tensor:
        gradient, rest = backward_halves.begin(output, span_input, output_gradient)
        assert gradient is not None
        left.append(rest)
        return gradient

    found = gradients_of(span, context_of(), begin)[:2]
    assert all(parameter.grad is None for parameter in span.parameters())
    for rest in reversed(left):
        backward_halves.finish(rest)
    assert_equal_gradients([*found, *(parameter.grad for parameter in span.parameters())], expected)


def test_halves_compute_in_the_precision_of_the_job() -> None:
    spans = [make_span(Block, Block).float() for _ in range(2)]
    inputs = []
    for span, backward in zip(spans, (whole, in_halves), strict=True):
        leaf = x = torch.ones(SAMPLES, TOKENS, WIDTH).requires_grad_()
        context = context_of(autocast=torch.bfloat16)
        for unit in span:
            x = run_unit(unit, x, context)
        inputs.append(backward(x, leaf, torch.ones_like(x)))
    assert torch.equal(*inputs)
    for ours, theirs in zip(*(span.parameters() for span in spans), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_a_loss_needs_no_gradient() -> None:
    spans = make_span(Block), make_span(Block)
    for span, backward in zip(spans, (whole, in_halves), strict=True):
        output, span_input = run(span, context_of())
        backward(output.square().sum(), span_input, None)
    first, second = ([parameter.grad for parameter in span.parameters()] for span in spans)
    assert_equal_gradients(first, second)


def test_all_at_once_leaves_nothing_and_repeats_a_forward_once() -> None:
    span, forwards = make_span(Block), []
    span[0].register_forward_pre_hook(lambda *_: forwards.append(1))
    expected = gradients_of(copy.deepcopy(span), context_of(), whole)

    def at_once(output: Tensor, span_input: Tensor, output_gradient: Tensor | None) -> Tensor:
        forwards.clear()
        gradient, rest = backward_halves.begin(output, span_input, output_gradient, at_once=True)
        assert gradient is not None and rest.groups == []
        backward_halves.finish(rest)
        return gradient

    assert_equal_gradients(gradients_of(span, context_of(recompute=True), at_once), expected)
    assert len(forwards) == 1


class Token:
    """Lives as long as a graph."""


class Told(torch.autograd.Function):
    """The identity, which counts its backwards and holds a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ran: list[str], token: Token) -> Tensor:
        ctx.ran, ctx.token = ran, token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.ran.append("backward")
        return gradients[0], None, None


def test_the_second_half_repeats_nothing_and_frees_the_graph() -> None:
    span, ran, token = make_span(Square, Block), list[str](), Token()
    alive = weakref.ref(token)
    output, span_input = run(span[:1], context_of())
    output = span[1](Told.apply(output, ran, token))  # type: ignore[no-untyped-call]
    _, rest = backward_halves.begin(output, span_input, torch.ones_like(output))
    del output, token
    gc.disable()
    try:
        assert alive() is not None
        backward_halves.finish(rest)
        assert alive() is None, "the graph waits for the garbage collector"
    finally:
        gc.enable()
    assert ran == ["backward"]


def test_an_input_without_a_gradient_is_refused() -> None:
    span = make_span(Block)
    output, span_input = run(span, context_of())
    with pytest.raises(ValueError, match="must be a leaf that requires a gradient"):
        backward_halves.begin(output, span_input.detach(), torch.ones_like(output))


def test_a_span_that_does_not_use_its_input_trains_all_the_same() -> None:
    weight = nn.Parameter(torch.ones(WIDTH))
    output = weight * 2
    gradient, rest = backward_halves.begin(output, torch.ones(1, requires_grad=True), torch.ones_like(output))
    backward_halves.finish(rest)
    assert gradient is None and weight.grad is not None
    assert torch.equal(weight.grad, torch.full((WIDTH,), 2.0))
