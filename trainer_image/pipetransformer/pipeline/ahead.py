"""Runs frozen forwards one round ahead, and keeps their outputs on this worker until the next round.

The outputs may be dropped at any moment. The next round then computes its frozen forwards itself.
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
    """A round that also runs the frozen forwards of the next round.

    Attributes:
        batch: the samples that this round trains.
        chunks: the chunks of this round, followed by those chunks of the next round whose frozen forwards run now.
        shape: the shape of this round; its operations are planned for it.
        upcoming: the samples that the next round trains; None if this is the last round.
        numbers: of each chunk of the next round in `chunks`, its number in the next round.
    """

    batch: Batch
    chunks: list[Chunk]
    shape: RoundShape
    upcoming: Batch | None
    numbers: Sequence[int]


@dataclass(slots=True)
class FrozenAhead:
    """Prepares rounds that run ahead, and keeps this worker's outputs from one round to the next.

    Attributes:
        schedule: orders the computations of a round of training.
        num_units: number of frozen units.
        cached: whether the first span's worker has a cache, so that samples in it need no frozen forward.
        micro_batches_of: returns the micro-batches of a step; none after the last step.
        share: share of the current round's micro-batches whose frozen forwards already ran in the round before.
    """

    schedule: Ahead
    num_units: int
    cached: bool
    micro_batches_of: Callable[[int], Sequence[MicroBatch]]
    share: float = 0.0
    _next: Batch | None = field(default=None, init=False)
    _outputs: dict[int, Tensor] = field(default_factory=dict, init=False)
    _numbers: Sequence[int] = field(default=(), init=False)

    def begin(
        self, batch: Batch, upcoming: Batch | None, model: PipelineModel, prefix: FrozenPrefix | None
    ) -> AheadRound:
        """Prepare a round. Drops outputs that the round before computed, unless they are for the step of this round.

        Args:
            batch: the samples that this round trains.
            upcoming: the samples that the next round trains; None if there is no next round.
            model: gives the shapes of activations.
            prefix: on the first span's worker, the frozen units; None on other workers.
        """
        # Take what the round before prepared for this step.
        prepared = self._next if self._next is not None and self._next.step == batch.step else None
        batch = batch if prepared is None else prepared
        numbers, outputs = (self._numbers, self._outputs) if prepared is not None else ((), {})
        self._next, self._outputs = None, {}
        # Make the chunks of this round, and add those of the next one whose frozen forwards run now.
        count = len(batch.micro_batches)
        self.share = len(numbers) / count
        prefix_made = prepared is not None or self.cached
        chunks = batch.chunks(model, prefix, without_prefix=numbers if prefix_made else range(count))
        for number, output in outputs.items():
            assert prefix is not None
            prefix.keep(batch, batch.micro_batches[number].sample_ids, output)
            chunks[number].frozen_output = output
        missing = [] if upcoming is None else self._missing(upcoming, prefix)
        if upcoming is not None:
            following = upcoming.plain_chunks(model)
            chunks += [following[number] for number in missing]
        shape = replace(
            batch.spec.shape(count, training=True),
            prefix_units=self.num_units,
            prefix_made=prefix_made,
            next_chunks=len(missing),
        )
        return AheadRound(batch, chunks, shape, upcoming, missing)

    def read(self, round_: AheadRound, operations: Sequence[Operation]) -> None:
        """Read the samples that this worker's `PREFIX` actions need, of this round and of the next."""
        count = len(round_.batch.micro_batches)
        own = sorted({each.chunk for each in operations if isinstance(each, Action) and each.kind is ActionKind.PREFIX})
        now = {number: round_.batch.micro_batches[number] for number in own if number < count}
        for number, rows in inputs_of(round_.batch, now).items():
            round_.chunks[number].frozen_input = rows
        if (upcoming := round_.upcoming) is None:
            return
        places = {round_.numbers[number - count]: number for number in own if number >= count}
        if upcoming.spec.is_last:
            upcoming.labels()  # reads the inputs of the same samples too, so that each sample is read once
        else:
            # The round after the next will most likely give this worker the micro-batches of the same numbers.
            later = self.micro_batches_of((upcoming.step or 0) + 1)
            upcoming.expect({sample for number in places if number < len(later) for sample in later[number].sample_ids})
        micro_batches = {number: upcoming.micro_batches[number] for number in places}
        for number, rows in inputs_of(upcoming, micro_batches).items():
            round_.chunks[places[number]].frozen_input = rows

    def end(self, round_: AheadRound) -> None:
        """Keep the outputs that this round has computed for the next one."""
        self._next, self._numbers = round_.upcoming, round_.numbers
        later = round_.chunks[len(round_.batch.micro_batches) :]
        for number, chunk in zip(round_.numbers, later, strict=True):
            if chunk.frozen_output is not None:
                self._outputs[number] = chunk.frozen_output

    def _missing(self, upcoming: Batch, prefix: FrozenPrefix | None) -> list[int]:
        """Numbers of the micro-batches whose frozen forwards have to run, because the cache does not hold them.

        Only the first span's worker knows its cache, so it broadcasts the answer to the pipeline.
        """
        micro_batches, spec = upcoming.micro_batches, upcoming.spec
        if not self.cached:
            return list(range(len(micro_batches)))
        flags = torch.zeros(len(micro_batches), dtype=torch.uint8, device=spec.device)
        if prefix is not None:
            held = [prefix.holds(upcoming, each.sample_ids) for each in micro_batches]
            flags = torch.tensor(held, dtype=torch.uint8, device=spec.device)
        dist.broadcast(flags, group=spec.group, group_src=spec.owners[0])
        return [number for number, flag in enumerate(flags.tolist()) if not flag]
