"""The seams for schedules to come, each driven by a toy: several spans a worker, chunks of several lengths that share a
context, a round of two steps, forwards with weights of their own, and a backward in two halves. Each equals the same
computation in one place."""

import copy
import datetime
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.data import MicroBatch
from pipetransformer.elastic.transport.groups import TCPStore, Transport, drop_group, make_group
from pipetransformer.models import MicroBatchContext, set_micro_batch
from pipetransformer.models.context import current_micro_batch
from pipetransformer.pipeline import (
    Action,
    ActionKind,
    AllForwardAllBackward,
    Chunk,
    ChunkIO,
    Executor,
    InOrder,
    PlainHooks,
    Schedule,
    SpanModule,
)
from tests.testkit.trainer.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)

HIDDEN, TOKENS, SAMPLES = 6, 7, 2
NUM_CHUNKS = 4


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


class Sliced(AllForwardAllBackward):
    """Cuts every micro-batch into slices of 4 and 3 tokens."""

    def chunks(self, micro_batches: Sequence[MicroBatch]) -> list[Chunk]:
        slices = (range(4), range(4, TOKENS))
        return [Chunk(micro_batch, tokens) for micro_batch in micro_batches for tokens in slices]


class TwoSteps(InOrder):
    """Steps after each half of the chunks."""

    def actions(self, owners: Sequence[int], num_chunks: int) -> list[list[Action]]:
        half = AllForwardAllBackward().actions(owners, num_chunks // 2)
        return [
            [
                *mine,
                *(Action(ActionKind.STEP, span) for span, owner in enumerate(owners) if owner == worker),
                *(Action(a.kind, a.span, a.chunk + num_chunks // 2) for a in mine if a.kind is not ActionKind.REDUCE),
            ]
            for worker, mine in enumerate(half)
        ]


class Split(AllForwardAllBackward):
    """Backward in two halves: the span before gets its gradient before the weights' turn comes."""

    def actions(self, owners: Sequence[int], num_chunks: int) -> list[list[Action]]:
        return [[half for action in mine for half in halves(action)] for mine in super().actions(owners, num_chunks)]


def halves(action: Action) -> list[Action]:
    """A backward in two; anything else as it is."""
    if action.kind is not ActionKind.BACKWARD:
        return [action]
    kinds = (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
    return [Action(kind, action.span, action.chunk) for kind in kinds]


class Recorder(PlainHooks):
    """Steps the spans it is told to, and remembers what was reduced."""

    def __init__(self, modules: dict[int, nn.Module]) -> None:
        self.modules = modules
        self.reduced: list[int] = []

    def reduce(self, span: int) -> None:
        self.reduced.append(span)

    def step(self, span: int) -> None:
        descend(self.modules[span])


class Ahead(Recorder):
    """Forwards use predicted weights, as in PipeOptim (Guan et al., arXiv 2312.00839), whose prediction is another.
    Gradients are taken there, and go to the weights as they are."""

    @contextmanager
    def weights(self, span: int, chunk: int) -> Iterator[None]:
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


def run_spans(
    group: dist.ProcessGroup, owners: Sequence[int], schedule: Schedule, frozen: int, ahead: bool = False
) -> tuple[list[float], dict[int, list[Tensor]], dict[int, list[Tensor]], list[int]]:
    """One round on this rank's spans: losses, gradients and weights by span, and the spans reduced."""
    layers, inputs = make_layers(len(owners)), make_inputs()
    for layer in layers[:frozen]:
        layer.requires_grad_(False)
    spans = {
        span: SpanModule(layers[span], input_gradient=span > frozen, trains=span >= frozen)
        for span, owner in enumerate(owners)
        if owner == group.rank()
    }
    recorder = (Ahead if ahead else Recorder)({span: here.module for span, here in spans.items()})
    batches = [MicroBatch((number,) * SAMPLES, SAMPLES) for number in range(NUM_CHUNKS)]
    chunks = schedule.chunks(batches)

    def cut(chunk: Chunk) -> Tensor:
        samples = inputs[chunk.micro_batch.sample_ids[0]]
        return samples if chunk.tokens is None else samples[:, chunk.tokens.start : chunk.tokens.stop]

    contexts = {number: MicroBatchContext(0, (number,) * SAMPLES) for number in range(NUM_CHUNKS)}
    io = ChunkIO(
        source=lambda chunk: cut(chunks[chunk]).clone(),
        loss=lambda chunk, output: loss_of(output),
        activation=lambda chunk: torch.empty_like(cut(chunks[chunk])),
        context=lambda chunk: contexts[chunks[chunk].micro_batch.sample_ids[0]],
    )
    mine = schedule.actions(owners, len(chunks))[group.rank()]
    losses = Executor(spans, owners, group, recorder).run(mine, chunks, io)
    gradients = {span: [p.grad for p in layers[span].parameters() if p.grad is not None] for span in spans}
    weights = {span: [p.detach() for p in layers[span].parameters()] for span in spans}
    return [float(loss) for loss in losses], gradients, weights, recorder.reduced


def in_one_place(num_spans: int, frozen: int, steps: int = 1, ahead: bool = False) -> tuple[float, list[Mixer]]:
    """The same round without spans: summed loss, and the layers with their gradients."""
    layers, inputs = make_layers(num_spans), make_inputs()
    for layer in layers[:frozen]:
        layer.requires_grad_(False)
    total = 0.0
    for chunk, x in enumerate(inputs):
        if chunk and chunk % (NUM_CHUNKS // steps) == 0:
            for layer in layers:
                descend(layer)
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
    ("owners", "schedule", "frozen", "steps", "ahead"),
    [
        pytest.param((0, 1, 0, 1), AllForwardAllBackward(), 0, 1, False, id="two spans a worker"),
        pytest.param((0, 1, 0, 1), AllForwardAllBackward(), 2, 1, False, id="two spans a worker, two frozen"),
        pytest.param((0, 1), Sliced(), 0, 1, False, id="two lengths of chunks"),
        pytest.param((0, 1, 0, 1), Sliced(), 1, 1, False, id="two lengths, two spans a worker, one frozen"),
        pytest.param((0, 1), TwoSteps(), 0, 2, False, id="two steps a round"),
        pytest.param((0, 1), TwoSteps(), 0, 2, True, id="two steps a round, each forward with weights of its own"),
        pytest.param((0, 1), Split(), 1, 1, False, id="backward in two halves, one frozen"),
    ],
)
def test_a_schedule_computes_what_one_place_does(
    owners: tuple[int, ...], schedule: Schedule, frozen: int, steps: int, ahead: bool
) -> None:
    by_rank = run_ranks(2, run_spans, owners, schedule, frozen, ahead)
    loss, layers = in_one_place(len(owners), frozen, steps, ahead)
    assert sum(by_rank[owners[-1]][0]) == pytest.approx(loss, rel=1e-12)
    assert by_rank[1 - owners[-1]][0] == []
    for _, gradients, weights, reduced in by_rank:
        for span, layer in enumerate(layers):
            if span not in weights:
                continue
            expected = [p.grad for p in layer.parameters() if p.grad is not None]
            assert len(gradients[span]) == len(expected) == (0 if span < frozen else 2)
            for got, wanted in zip(gradients[span], expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
            for got, wanted in zip(weights[span], layer.parameters(), strict=True):
                torch.testing.assert_close(got, wanted.detach(), rtol=1e-9, atol=1e-12)
        assert sorted(reduced) == sorted(weights)


def test_a_schedule_in_an_impossible_order_is_refused() -> None:
    class Backwards(InOrder):
        def actions(self, owners: Sequence[int], num_chunks: int) -> list[list[Action]]:
            return [[Action(ActionKind.FORWARD, 1, 0), Action(ActionKind.FORWARD, 0, 0)]]

    with pytest.raises(RuntimeError, match="before it was computed"):
        one_rank((0, 0), Backwards())


def test_a_round_that_leaves_a_chunk_in_flight_is_refused() -> None:
    class Forgetful(InOrder):
        def actions(self, owners: Sequence[int], num_chunks: int) -> list[list[Action]]:
            return [[Action(ActionKind.FORWARD, 0, 2)]]

    with pytest.raises(RuntimeError, match=r"in flight \(span, chunk\): \[\(0, 2\)\]"):
        one_rank((0,), Forgetful())


def one_rank(owners: tuple[int, ...], schedule: Schedule) -> None:
    """A round on a group of one, in this process."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = make_group(store, "one", 0, 1, Transport("127.0.0.1", datetime.timedelta(seconds=20)))
    try:
        run_spans(group, owners, schedule, 0)
    finally:
        drop_group(group)
