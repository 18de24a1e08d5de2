"""Runs the actions of any schedule on the spans of one worker, peer to peer with the workers of the spans around them.

The stock runtime (`runner.py`) knows one span a worker, one shape for all chunks and one weight version a round. This
one knows none of that: shapes come with the chunk, a span's neighbours are found by its owner, and what happens around
a forward or at a step is the caller's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.models import MicroBatchContext, set_micro_batch

from .actions import Action, ActionKind, Chunk

#: Receives that are posted before their turn comes, so that bytes travel while the worker computes.
_POSTED_AHEAD = 2


@dataclass(frozen=True, slots=True)
class SpanModule:
    """A span on the worker that owns it.

    Attributes:
        module: from a chunk's input to its output.
        input_gradient: whether the span before it wants the gradient of this span's input.
        trains: whether it has anything to compute a gradient for.
    """

    module: nn.Module
    input_gradient: bool
    trains: bool


class RoundHooks(Protocol):
    """What a system does around the actions of a round."""

    def weights(self, span: int, chunk: int) -> AbstractContextManager[None]:
        """Entered around a forward: the weights that it shall use."""
        ...

    def reduce(self, span: int) -> None:
        """The span's gradients are complete."""
        ...

    def step(self, span: int) -> None:
        """The span's weights change now."""
        ...


class PlainHooks:
    """Nothing special: the weights as they are, and neither reduction nor step within the round."""

    def weights(self, span: int, chunk: int) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce(self, span: int) -> None:
        pass

    def step(self, span: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class ChunkIO:
    """What the ends of the pipeline, and every receiver, need to know of a chunk.

    Attributes:
        source: the chunk's input; asked by the owner of the first span only.
        loss: from the last span's output to the summed loss; asked by the owner of the last span only.
        activation: an empty tensor like what the chunk's activation is between spans.
        context: of the chunk's forward; the executor asks once a chunk, so that all spans of a worker share it.
    """

    source: Callable[[int], Tensor]
    loss: Callable[[int, Tensor], Tensor]
    activation: Callable[[int], Tensor]
    context: Callable[[int], MicroBatchContext]


@dataclass(slots=True)
class _Flight:
    """A chunk between its forward and its backward on one span."""

    input: Tensor
    output: Tensor
    gradient: Tensor | None = None


_Key = tuple[bool, int, int]  # forward or backward, receiving span, chunk


@dataclass
class Executor:
    """One worker of one pipeline.

    Attributes:
        spans: this worker's, by index.
        owners: rank of each span's worker in `group`, spans in the order of the model.
        group: the workers of the pipeline.
        hooks: see there.
    """

    spans: Mapping[int, SpanModule]
    owners: Sequence[int]
    group: dist.ProcessGroup
    hooks: RoundHooks = field(default_factory=PlainHooks)

    def run(self, actions: Sequence[Action], chunks: Sequence[Chunk], io: ChunkIO) -> list[Tensor]:
        """One round: what `actions` say. Gradients accumulate in the parameters.

        Returns:
            The losses of all chunks in the order in which they were computed, on the last span's worker; else nothing.

        Raises:
            RuntimeError: a connection broke, or an action came before what it needs.
        """
        return _Round(self, actions, chunks, io).run()


class _Round:
    def __init__(self, executor: Executor, actions: Sequence[Action], chunks: Sequence[Chunk], io: ChunkIO) -> None:
        self._spans = executor.spans
        self._owners = executor.owners
        self._group = executor.group
        self._rank = executor.group.rank()
        self._hooks = executor.hooks
        self._actions = actions
        self._io = io
        self._contexts = [io.context(chunk) for chunk in range(len(chunks))]
        self._num_chunks = len(chunks)
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._handed: dict[_Key, Tensor] = {}  # between two spans of this worker
        self._posted: dict[_Key, tuple[Tensor, dist.Work]] = {}
        self._sent: list[tuple[Tensor, dist.Work]] = []
        self._to_post = self._receives()
        self._losses: list[Tensor] = []

    def run(self) -> list[Tensor]:
        for action in self._actions:
            self._act(action)
        for _, work in self._sent:
            work.wait()
        if self._flights:
            unfinished = sorted(self._flights)
            raise RuntimeError(f"the schedule ends with chunks in flight (span, chunk): {unfinished}")
        return self._losses

    def _act(self, action: Action) -> None:
        match action.kind:
            case ActionKind.FORWARD:
                self._forward(action.span, action.chunk)
            case ActionKind.BACKWARD:
                self._input_gradient(action.span, action.chunk, weights_too=True)
                del self._flights[action.span, action.chunk]
            case ActionKind.INPUT_GRADIENT:
                self._input_gradient(action.span, action.chunk, weights_too=False)
            case ActionKind.WEIGHT_GRADIENT:
                self._weight_gradient(action.span, self._flights.pop((action.span, action.chunk)))
            case ActionKind.REDUCE:
                self._hooks.reduce(action.span)
            case ActionKind.STEP:
                self._hooks.step(action.span)

    def _forward(self, span: int, chunk: int) -> None:
        here = self._spans[span]
        x = self._io.source(chunk) if span == 0 else self._take((True, span, chunk))
        if here.input_gradient:
            x.requires_grad_()
        with self._context(span, chunk):
            output = here.module(x)
            if span == len(self._owners) - 1:
                output = self._io.loss(chunk, output)
                self._losses.append(output.detach())
        if span < len(self._owners) - 1:
            self._give((True, span + 1, chunk), output.detach())
        self._flights[span, chunk] = _Flight(x, output)

    def _input_gradient(self, span: int, chunk: int, *, weights_too: bool) -> None:
        here, flight = self._spans[span], self._flights[span, chunk]
        if not here.trains:
            return
        if span < len(self._owners) - 1:
            flight.gradient = self._take((False, span, chunk))
        if weights_too:
            torch.autograd.backward(flight.output, flight.gradient)
            gradient = flight.input.grad
        elif here.input_gradient:
            (gradient,) = torch.autograd.grad(flight.output, flight.input, flight.gradient, retain_graph=True)
        if here.input_gradient:
            assert gradient is not None
            self._give((False, span - 1, chunk), gradient)

    def _weight_gradient(self, span: int, flight: _Flight) -> None:
        here = self._spans[span]
        if here.trains:
            trained = [parameter for parameter in here.module.parameters() if parameter.requires_grad]
            torch.autograd.backward(flight.output, flight.gradient, inputs=trained)

    @contextmanager
    def _context(self, span: int, chunk: int) -> Iterator[None]:
        set_micro_batch(self._contexts[chunk])
        with self._hooks.weights(span, chunk):
            yield

    # -- between spans

    def _peer(self, key: _Key) -> int:
        """Rank of the worker that gives what `key` names."""
        forward, span, _ = key
        return self._owners[span - 1 if forward else span + 1]

    def _receives(self) -> list[_Key]:
        """What other workers will send, in the order in which it is needed."""
        keys: list[_Key] = []
        for action in self._actions:
            if action.kind is ActionKind.FORWARD and action.span > 0:
                keys.append((True, action.span, action.chunk))
            takes_gradient = action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
            if takes_gradient and action.span < len(self._owners) - 1 and self._spans[action.span].trains:
                keys.append((False, action.span, action.chunk))
        return [key for key in keys if self._peer(key) != self._rank]

    def _tag(self, key: _Key) -> int:
        forward, span, chunk = key
        return (2 * span + forward) * self._num_chunks + chunk

    def _take(self, key: _Key) -> Tensor:
        if self._peer(key) == self._rank:
            if key not in self._handed:
                raise RuntimeError(f"the schedule needs {key} before it was computed")
            return self._handed.pop(key)
        while self._to_post and len(self._posted) <= _POSTED_AHEAD:
            posted = self._to_post.pop(0)
            buffer = self._io.activation(posted[2])
            work = dist.irecv(buffer, group=self._group, group_src=self._peer(posted), tag=self._tag(posted))
            assert work is not None
            self._posted[posted] = (buffer, work)
        buffer, work = self._posted.pop(key)
        work.wait()
        return buffer

    def _give(self, key: _Key, tensor: Tensor) -> None:
        owner = self._owners[key[1]]
        if owner == self._rank:
            self._handed[key] = tensor
            return
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=self._group, group_dst=owner, tag=self._tag(key))
        assert work is not None
        self._sent = [sending for sending in self._sent if not sending[1].is_completed()]
        self._sent.append((tensor, work))
