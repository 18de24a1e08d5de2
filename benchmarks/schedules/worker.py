"""One worker's part of rounds on virtual devices: the product's executor over units of declared times."""

from collections.abc import Sequence
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.virtual import Timed
from benchmarks.virtual.model import Block
from pipetransformer.models import MicroBatchContext, run_unit
from pipetransformer.models.context import TokenSlice
from pipetransformer.pipeline import Chunk, Executor, RoundHooks, Span
from pipetransformer.schedules import Action, ActionKind, Operation

from .ways import Way

WIDTH = 8
_CPU = torch.device("cpu")


class Squares:
    """Each chunk's loss is the mean square of its output."""

    def take(self, output: Tensor, chunk: Chunk) -> Tensor:
        """Where the backward starts."""
        chunk.weight = torch.ones(())
        return output.square().mean()


class Prefix:
    """The frozen units that the first span starts with, run when a chunk is asked for."""

    def __init__(
        self, units: Sequence[nn.Module], inputs: Sequence[Tensor], contexts: Sequence[MicroBatchContext]
    ) -> None:
        self._units, self._inputs, self._contexts = units, inputs, contexts

    def take(self, number: int, context: MicroBatchContext) -> Tensor:
        """The first span's input for a chunk."""
        x = self._inputs[number]
        with torch.no_grad():
            for unit in self._units:
                x = run_unit(unit, x, context)
        return x


class Runner:
    """Runs rounds of one way on this worker. What a round has made ahead is the next round's.

    Attributes:
        units: this worker's, by number.
    """

    def __init__(self, way: Way, group: dist.ProcessGroup, width: int = WIDTH) -> None:
        self._way, self._width = way, width
        self._operations = way.lists[group.rank()]
        units = {
            index: Timed(Block(width), way.units[index])
            for span in way.shape.spans_of(group.rank())
            for index in way.cut[span]
        }
        last = len(way.cut) - 1
        spans = {
            span: Span(
                way.cut[span],
                {f"unit {index}": units[index] for index in way.cut[span]},
                min(max(0, way.frozen - way.cut[span].start), len(way.cut[span])),
                first=span == 0,
                last=span == last,
                dtype=torch.float32,
            )
            for span in way.shape.spans_of(group.rank())
        }
        copies = [Timed(Block(width), unit) for unit in way.prefix]
        self._executor = Executor(spans, group, _CPU, torch.float32, copies)
        self.units = units
        contexts = [self._context(chunk) for chunk in range(way.shape.chunks)]
        inputs = [torch.ones(self._activation(chunk)) for chunk in range(way.shape.chunks)]
        frozen = [units[index] for index in way.cut[0] if index < way.frozen] if 0 in spans else []
        prefix = Prefix(frozen, inputs, contexts) if 0 in spans else None
        self._chunks = [
            Chunk(chunk, contexts[chunk], self._activation(chunk), prefix=prefix) for chunk in range(way.shape.chunks)
        ]
        self._upcoming = [
            Chunk(chunk, contexts[chunk], self._activation(chunk)) for chunk in range(way.shape.next_chunks)
        ]
        self._ahead = {each.chunk for each in self._operations if _is_ahead(each)}
        if way.prefix:  # as if a round before had made the first round's
            for chunk in self._chunks:
                chunk.frozen_output = torch.ones(chunk.shape)

    def run(self, hooks: RoundHooks | None = None) -> None:
        """One round."""
        chunks = [*self._chunks, *self._upcoming]
        for number in self._ahead:
            chunks[number].frozen_input = torch.ones(chunks[number].shape)
        self._executor.run(self._operations, self._way.shape, chunks, Squares(), hooks)
        for chunk, upcoming in zip(self._chunks, self._upcoming, strict=False):
            chunk.frozen_output, upcoming.frozen_output = upcoming.frozen_output, None
        if hooks is None:
            for unit in self.units.values():
                for parameter in unit.parameters():
                    parameter.grad = None

    def _activation(self, chunk: int) -> tuple[int, ...]:
        _, length = self._way.tokens(chunk)
        return (self._way.samples, length, self._width) if length else (self._way.samples, self._width)

    def _context(self, chunk: int) -> MicroBatchContext:
        start, length = self._way.tokens(chunk)
        tokens = TokenSlice(start, start + length, sum(self._way.slices)) if length else None
        return MicroBatchContext(0, range(self._way.samples), tokens=tokens)


def _is_ahead(operation: Operation) -> TypeGuard[Action]:
    return isinstance(operation, Action) and operation.kind is ActionKind.PREFIX
