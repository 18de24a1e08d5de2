"""The seams for schedules to come, each driven by a toy: several spans a worker, chunks of several lengths that share a
context, a round of two steps, forwards with weights of their own, and a backward in two halves. Each equals the same
computation in one place."""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.models import MicroBatchContext, run_unit, set_micro_batch
from pipetransformer.models.context import current_micro_batch
from pipetransformer.pipeline import Chunk, Executor, RoundHooks, Span
from pipetransformer.schedules import (
    Action,
    ActionKind,
    GPipe,
    OneForwardOneBackward,
    RoundShape,
    Schedule,
    planned,
)
from tests.testkit.trainer.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)

HIDDEN, TOKENS, SAMPLES = 6, 7, 2
NUM_CHUNKS = 4
#: Slices of a micro-batch's tokens, by their number.
SLICES = {1: [range(TOKENS)], 2: [range(4), range(4, TOKENS)]}


class Mixer(nn.Module):
    """Adds to each token the mean of all tokens up to it, over slices: earlier ones are in the context's memory.

    A slice uses copies of what earlier slices left, and gives the copies' gradients back in the earlier slices' own
    backward (TeraPipe, Li et al., 2021, section 3.2), so no gradient of the memory travels between stages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        values = self.linear(x)
        memory = current_micro_batch().memory.setdefault(id(self), [])
        kept = values.detach().requires_grad_()
        values = _Return.apply(values, kept)  # type: ignore[no-untyped-call]
        before = list(memory)
        memory.append(kept)
        everything = torch.cat([*before, values], dim=1)
        start = everything.shape[1] - x.shape[1]
        count = torch.arange(1, everything.shape[1] + 1, dtype=x.dtype).view(-1, 1)
        return x + torch.tanh((everything.cumsum(1) / count)[:, start:])


class _Return(torch.autograd.Function):
    """The identity, whose gradient is increased by what the copy's users left in `copy.grad`."""

    @staticmethod
    def forward(ctx, value, copy):  # type: ignore[no-untyped-def]
        ctx.copy = copy
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        late = ctx.copy.grad
        return (gradient if late is None else gradient + late), None


class TwoSteps:
    """Steps after each half of the chunks."""

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        half = shape.chunks // 2
        return [
            [
                *mine,
                *(Action(ActionKind.STEP, span, 0) for span in reversed(shape.spans_of(worker))),
                *(Action(action.kind, action.span, action.chunk + half) for action in mine),
                *(Action(ActionKind.STEP, span, 1) for span in reversed(shape.spans_of(worker))),
            ]
            for worker, mine in enumerate(GPipe().actions(replace(shape, chunks=half)))
        ]


class Split:
    """Backward in two halves: the span before gets its gradient before the weights' turn comes."""

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        return [[half for action in mine for half in halves(action)] for mine in GPipe().actions(shape)]


def halves(action: Action) -> list[Action]:
    """A backward in two; anything else as it is."""
    if action.kind is not ActionKind.BACKWARD:
        return [action]
    kinds = (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
    return [Action(kind, action.span, action.chunk) for kind in kinds]


class Recorder(RoundHooks):
    """Steps the spans it is told to, and remembers which units backwards have passed."""

    def __init__(self, modules: dict[int, nn.Module]) -> None:
        self.modules = modules
        self.units: list[int] = []

    def passed(self, unit: int) -> None:
        self.units.append(unit)

    def step(self, span: int, step: int, weight: Tensor) -> None:
        assert float(weight) == NUM_CHUNKS // 2 * SAMPLES * (1 + step)
        descend(self.modules[span])


class Ahead(Recorder):
    """Forwards use predicted weights, as in PipeOptim (Guan et al., arXiv 2312.00839), whose prediction is another.
    Gradients are taken there, and go to the weights as they are."""

    @contextmanager
    def forward_weights(self, span: int, chunk: int) -> Iterator[None]:
        linear = self.modules[span].get_submodule("linear")
        kept = dict(linear.named_parameters())
        for name, parameter in kept.items():
            delattr(linear, name)
            setattr(linear, name, parameter + (predicted(parameter, chunk) - parameter).detach())
        yield
        for name, parameter in kept.items():
            delattr(linear, name)
            linear.register_parameter(name, parameter)


def predicted(parameter: Tensor, chunk: int) -> Tensor:
    """Any other weights will do, as long as each chunk has its own."""
    return parameter * 0.9 ** (chunk + 1)


def descend(module: nn.Module) -> None:
    """Plain gradient descent, and away with the gradients."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None


def make_layers(num_spans: int) -> list[Mixer]:
    torch.manual_seed(0)
    return [Mixer().double() for _ in range(num_spans)]


def make_inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(NUM_CHUNKS, SAMPLES, TOKENS, HIDDEN, dtype=torch.float64)


def loss_of(output: Tensor) -> Tensor:
    return output.square().sum()


class Inputs:
    """What the first span starts from; runs it if it is frozen."""

    def __init__(self, rows: Sequence[Tensor], contexts: Sequence[MicroBatchContext], frozen: Sequence[Mixer]) -> None:
        self.rows, self.contexts, self.frozen = rows, contexts, frozen

    def take(self, number: int, context: MicroBatchContext) -> Tensor:
        x = self.rows[number].clone()
        with torch.no_grad():
            for unit in self.frozen:
                x = run_unit(unit, x, self.contexts[number])
        return x


class SquareLoss:
    def take(self, output: Tensor, chunk: Chunk) -> Tensor:
        loss = loss_of(output)
        chunk.loss = loss.detach()
        chunk.weight = torch.tensor(float(SAMPLES) * (1 + (chunk.micro_batch >= NUM_CHUNKS // 2)))
        return loss


def make_chunks(slices: Sequence[range], frozen: Sequence[Mixer]) -> list[Chunk]:
    """Slices of every micro-batch, which share its memory."""
    inputs = make_inputs()
    rows = [samples[:, tokens.start : tokens.stop] for samples in inputs for tokens in slices]
    contexts = [MicroBatchContext(0, (number,) * SAMPLES) for number in range(NUM_CHUNKS) for _ in slices]
    for number, context in enumerate(contexts):
        contexts[number] = replace(context, memory=contexts[number - number % len(slices)].memory)
    prefix = Inputs(rows, contexts, frozen)
    return [
        Chunk(number, context, tuple(row.shape), prefix)
        for number, (context, row) in enumerate(zip(contexts, rows, strict=True))
    ]


def run_spans(
    group: dist.ProcessGroup, owners: tuple[int, ...], schedule: Schedule, frozen: int, slices: int, ahead: bool = False
) -> tuple[list[float], dict[int, list[Tensor]], dict[int, list[Tensor]], list[int]]:
    """One round on this rank's spans: losses, gradients and weights by span, and the units that backwards passed."""
    layers = make_layers(len(owners))
    for layer in layers[:frozen]:
        layer.requires_grad_(False)
    mine = [span for span, owner in enumerate(owners) if owner == group.rank()]
    spans = {
        span: Span(
            range(span, span + 1), {f"mixer {span}": layers[span]}, int(span < frozen),
            first=span == 0, last=span == len(owners) - 1, dtype=torch.float64,
        )
        for span in mine
    }  # fmt: skip
    recorder = (Ahead if ahead else Recorder)({span: layers[span] for span in mine})
    chunks = make_chunks(SLICES[slices], layers[: min(frozen, 1)])
    steps = (len(chunks) // 2,) * 2 if isinstance(schedule, TwoSteps) else ()
    shape = RoundShape(owners, len(chunks), frozen, slices, steps=steps)
    operations = planned(schedule, shape)[group.rank()]
    executor = Executor(spans, group, torch.device("cpu"), torch.float64)
    executor.run(operations, shape, chunks, SquareLoss(), recorder)
    losses = [float(chunk.loss) for chunk in chunks if chunk.loss is not None]
    gradients = {span: [p.grad for p in layers[span].parameters() if p.grad is not None] for span in mine}
    weights = {span: [p.detach() for p in layers[span].parameters()] for span in mine}
    return losses, gradients, weights, recorder.units


def in_one_place(num_spans: int, frozen: int, steps: int = 1, ahead: bool = False) -> tuple[float, list[Mixer]]:
    """The same round without spans: summed loss, and the layers with their gradients."""
    layers, inputs = make_layers(num_spans), make_inputs()
    for layer in layers[:frozen]:
        layer.requires_grad_(False)
    total = 0.0
    for chunk, x in enumerate(inputs):
        with_context(x)
        used = [at_predicted(layer, chunk) for layer in layers] if ahead else layers
        y = x
        for layer in used:
            y = layer(y)
        loss = loss_of(y)
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
        for layer, there in zip(layers, used, strict=True):
            for parameter, its in zip(layer.parameters(), there.parameters(), strict=True):
                parameter.grad = its.grad
        if steps > 1 and (chunk + 1) % (NUM_CHUNKS // steps) == 0:
            for layer in layers:
                descend(layer)
    return total, layers


def at_predicted(layer: Mixer, chunk: int) -> Mixer:
    """A copy with predicted weights, which adds to the gradients that there are."""
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for its, parameter in zip(other.parameters(), layer.parameters(), strict=True):
            its.copy_(predicted(parameter, chunk))
            its.grad = parameter.grad
    return other


def with_context(x: Tensor) -> None:
    set_micro_batch(MicroBatchContext(0, (0,) * len(x)))


@pytest.mark.parametrize(
    ("owners", "schedule", "frozen", "slices", "steps", "ahead"),
    [
        pytest.param((0, 1), OneForwardOneBackward(), 0, 1, 1, False, id="1F1B"),
        pytest.param((0, 1, 0, 1), GPipe(), 0, 1, 1, False, id="two spans a worker"),
        pytest.param((0, 1, 0, 1), GPipe(), 2, 1, 1, False, id="two spans a worker, two frozen"),
        pytest.param((0, 1, 1, 0), GPipe(), 1, 1, 1, False, id="a worker with neighbouring spans, one frozen"),
        pytest.param((0, 1), GPipe(), 0, 2, 1, False, id="two lengths of chunks"),
        pytest.param((0, 1, 0, 1), GPipe(), 1, 2, 1, False, id="two lengths, two spans a worker, one frozen"),
        pytest.param((0, 1), TwoSteps(), 0, 1, 2, False, id="two steps a round"),
        pytest.param((0, 1), TwoSteps(), 0, 1, 2, True, id="two steps a round, each forward with weights of its own"),
        pytest.param((0, 1), Split(), 0, 1, 1, False, id="backward in two halves"),
        pytest.param((0, 1, 0, 1), Split(), 1, 1, 1, False, id="backward in two halves, one frozen"),
    ],
)
def test_a_schedule_computes_what_one_place_does(
    owners: tuple[int, ...], schedule: Schedule, frozen: int, slices: int, steps: int, ahead: bool
) -> None:
    by_rank = run_ranks(2, run_spans, owners, schedule, frozen, slices, ahead)
    loss, layers = in_one_place(len(owners), frozen, steps, ahead)
    assert sum(by_rank[owners[-1]][0]) == pytest.approx(loss, rel=1e-12)
    assert by_rank[1 - owners[-1]][0] == []
    for _, gradients, weights, passed in by_rank:
        for span, layer in enumerate(layers):
            if span not in weights:
                continue
            expected = [p.grad for p in layer.parameters() if p.grad is not None]
            assert len(gradients[span]) == len(expected) == (0 if span < frozen or steps > 1 else 2)
            for got, wanted in zip(gradients[span], expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
            for got, wanted in zip(weights[span], layer.parameters(), strict=True):
                torch.testing.assert_close(got, wanted.detach(), rtol=1e-9, atol=1e-12)
        assert Counter(passed) == {span: NUM_CHUNKS * slices for span in weights if span >= frozen}
