"""Frozen forwards that run one round ahead: what a worker keeps of them between two rounds.

All of it may be dropped at any moment. The next round then computes its frozen forwards first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from pipetransformer.cache import FrozenPrefix, inputs_of
from pipetransformer.data import MicroBatch
from pipetransformer.models import PipelineModel
from pipetransformer.schedules import Action, ActionKind, Ahead, Operation, RoundShape

from .batch import Batch
from .chunk import Chunk


@dataclass(slots=True)
class AheadRound:
    """A round that also computes frozen forwards of the next one.

    Attributes:
        batch: of this round.
        chunks: of this round, and behind them those of the next round whose prefix is computed.
        shape: of this round.
        upcoming: the next round; None after the last one.
        numbers: in the next round, of its chunks whose prefix is computed.
    """

    batch: Batch
    chunks: list[Chunk]
    shape: RoundShape
    upcoming: Batch | None
    numbers: Sequence[int]


@dataclass(slots=True)
class FrozenAhead:
    """One worker's part.

    Attributes:
        schedule: orders the rounds of training.
        num_units: number of frozen units.
        cached: whether the first span's worker may read outputs from a cache instead.
        micro_batches_of: returns the micro-batches of a step; none after the last step.
        share: of the frozen forwards that the last round used, the share that the round before had computed.
    """

    schedule: Ahead
    num_units: int
    cached: bool
    micro_batches_of: Callable[[int], Sequence[MicroBatch]]
    share: float = 0.0
    _next: Batch | None = field(default=None, init=False)
    _made: dict[int, Tensor] = field(default_factory=dict, init=False)
    _numbers: Sequence[int] = field(default=(), init=False)

    def begin(
        self, batch: Batch, upcoming: Batch | None, model: PipelineModel, prefix: FrozenPrefix | None
    ) -> AheadRound:
        """Prepare a round. What the round before has computed for another step is dropped.

        Args:
            batch: the round.
            upcoming: the next round; None if there is none.
            model: for the shapes.
            prefix: the frozen units on the first span's worker; None on others.
        """
        made = self._next is not None and self._next.step == batch.step
        if made:
            assert self._next is not None
            batch = self._next
        numbers, outputs = (self._numbers, self._made) if made else ((), {})
        self._next, self._made = None, {}
        count = len(batch.micro_batches)
        self.share = len(numbers) / count
        in_place = made or self.cached
        chunks = batch.chunks(model, prefix, made=numbers if in_place else range(count))
        for number, output in outputs.items():
            assert prefix is not None
            prefix.keep(batch, batch.micro_batches[number].sample_ids, output)
            chunks[number].made = output
        missing = [] if upcoming is None else self._missing(upcoming, prefix)
        if upcoming is not None:
            following = upcoming.plain_chunks(model)
            chunks += [following[number] for number in missing]
        shape = replace(
            batch.spec.shape(count, training=True),
            prefix_units=self.num_units,
            prefix_made=in_place,
            next_chunks=len(missing),
        )
        return AheadRound(batch, chunks, shape, upcoming, missing)

    def read(self, round_: AheadRound, operations: Sequence[Operation]) -> None:
        """Read the inputs of the prefixes that this worker computes."""
        count = len(round_.batch.micro_batches)
        own = sorted({each.chunk for each in operations if isinstance(each, Action) and each.kind is ActionKind.PREFIX})
        now = {number: round_.batch.micro_batches[number] for number in own if number < count}
        for number, rows in inputs_of(round_.batch, now).items():
            round_.chunks[number].piece = rows
        if (upcoming := round_.upcoming) is None:
            return
        places = {round_.numbers[number - count]: number for number in own if number >= count}
        if upcoming.spec.is_last:
            upcoming.labels()  # of the same samples, so that they are read once
        else:
            # The round after the next will most likely give this worker the same numbers.
            later = self.micro_batches_of((upcoming.step or 0) + 1)
            upcoming.expect({sample for number in places if number < len(later) for sample in later[number].sample_ids})
        micro_batches = {number: upcoming.micro_batches[number] for number in places}
        for number, rows in inputs_of(upcoming, micro_batches).items():
            round_.chunks[places[number]].piece = rows

    def end(self, round_: AheadRound) -> None:
        """Keep for the next round what this one has computed for it."""
        self._next, self._numbers = round_.upcoming, round_.numbers
        later = round_.chunks[len(round_.batch.micro_batches) :]
        for number, chunk in zip(round_.numbers, later, strict=True):
            if chunk.made is not None:
                self._made[number] = chunk.made

    def _missing(self, upcoming: Batch, prefix: FrozenPrefix | None) -> list[int]:
        """Numbers of the micro-batches that no cache holds. The first span's worker tells the others."""
        micro_batches, spec = upcoming.micro_batches, upcoming.spec
        if not self.cached:
            return list(range(len(micro_batches)))
        flags = torch.zeros(len(micro_batches), dtype=torch.uint8, device=spec.device)
        if prefix is not None:
            held = [prefix.holds(upcoming, each.sample_ids) for each in micro_batches]
            flags = torch.tensor(held, dtype=torch.uint8, device=spec.device)
        dist.broadcast(flags, group=spec.group, group_src=spec.owners[0])
        return [number for number, flag in enumerate(flags.tolist()) if not flag]
