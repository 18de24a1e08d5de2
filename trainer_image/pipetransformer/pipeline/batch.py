"""Reads the samples of the micro-batches that run through a pipeline together."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipetransformer.cache import FrozenPrefix
from pipetransformer.data import (
    MicroBatch,
    Readers,
    Split,
    Wanted,
    augmentation_key,
    lengths_of,
    read_batch,
    weights_of,
)
from pipetransformer.device_copies import to_device
from pipetransformer.models import MicroBatchContext, PipelineModel
from pipetransformer.partition.slices import round_slices

from .chunk import Chunk
from .stage import StageSpec


@dataclass(slots=True)
class Batch:
    """Reads the samples of some micro-batches, and makes chunks of them. The cache uses it as a `Source` of samples.

    Attributes:
        spec: the stage of this worker.
        split: the split that the samples belong to.
        name: the split's name, `train` or `test`, which is part of cache keys.
        step: the step that trains the micro-batches; None for an evaluation.
        micro_batches: at least one micro-batch.
        following: returns the samples that are needed after these, so that the readers can read them ahead.
        readers: processes that read the split's samples; None to read them in this thread.
        cached: whether the cache may be used.
    """

    spec: StageSpec
    split: Split
    name: str
    step: int | None
    micro_batches: Sequence[MicroBatch]
    following: Callable[[], Iterable[Wanted]] = lambda: ()
    readers: Readers | None = None
    cached: bool = True
    _sample_ids: list[int] = field(init=False)
    _uncached: Collection[int] | None = field(default=None, init=False)
    _inputs: Tensor | None = field(default=None, init=False)
    _labels: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._sample_ids = sample_ids_of(self.micro_batches)

    def chunks(
        self,
        model: PipelineModel,
        prefix: FrozenPrefix | None,
        token_slices: Sequence[int] = (),
        without_prefix: Collection[int] = (),
    ) -> list[Chunk]:
        """The chunks of a round, with the tensors that this worker's spans need for each.

        Args:
            model: gives the shapes of activations.
            prefix: on the first span's worker, the frozen units that the span starts with; None on other workers.
            token_slices: tokens in each slice that the longest samples are cut into; empty for whole samples.
            without_prefix: numbers of the micro-batches for which `prefix` need not run, because `PREFIX` actions of
                this round or of the round before do its work.
        """
        shapes = [model.activation_shape(len(each.sample_ids), each.length) for each in self.micro_batches]
        slices = round_slices(token_slices, [shape[1] for shape in shapes]) if token_slices else [()] * len(shapes)
        chunks = [
            Chunk(number, context, (len(each.sample_ids), len(context.tokens), *shape[2:]) if context.tokens else shape)
            for number, (each, shape, lengths) in enumerate(zip(self.micro_batches, shapes, slices, strict=True))
            for context in self.context(each.sample_ids).in_slices(lengths)
        ]
        if self.spec.is_last:
            sizes = [len(micro_batch.sample_ids) for micro_batch in self.micro_batches]
            weights = weights_of(self.micro_batches, self.spec.dtype)
            parts = [torch.split(to_device(each, self.spec.device), sizes) for each in (self.labels(), weights)]
            positions = model.activation[:1]
            for chunk in chunks:
                labels, chunk.weights = (part[chunk.micro_batch] for part in parts)
                if positions and labels.shape[1:2] == positions:  # one label for each position
                    tokens, length = chunk.context.tokens, self.micro_batches[chunk.micro_batch].length
                    labels = labels[:, :length] if tokens is None else labels[:, tokens.start : tokens.stop]
                chunk.labels = labels
        if prefix is not None:
            outputs = prefix.begin(self, self.micro_batches, without_prefix)
            for chunk in chunks:
                chunk.prefix = outputs
        return chunks

    def plain_chunks(self, model: PipelineModel) -> list[Chunk]:
        """The chunks of whole micro-batches, with only their contexts and shapes."""
        return [
            Chunk(
                number,
                self.context(micro_batch.sample_ids),
                model.activation_shape(len(micro_batch.sample_ids), micro_batch.length),
            )
            for number, micro_batch in enumerate(self.micro_batches)
        ]

    def labels(self) -> Tensor:
        """Labels of all samples, on the CPU. Inputs are read at the same time, and both are kept."""
        if self._labels is None:
            self._inputs, self._labels = self._read(self._sample_ids)
        return self._labels

    def inputs(self, sample_ids: Sequence[int]) -> Tensor:
        """(len(sample_ids), *input shape) of some of the samples, on the CPU."""
        if self._inputs is None:
            return self._read(sample_ids)[0]
        if sample_ids == self._sample_ids:
            return self._inputs
        row = {sample_id: number for number, sample_id in enumerate(self._sample_ids)}
        return self._inputs[[row[sample_id] for sample_id in sample_ids]]

    def context(self, sample_ids: Sequence[int]) -> MicroBatchContext:
        """The context that units get with these samples."""
        spec = self.spec
        lengths = lengths_of(self.split, sample_ids, spec.device)
        return MicroBatchContext(self.step or 0, tuple(sample_ids), lengths, spec.autocast, spec.recompute)

    def variant(self, sample_id: int) -> int | None:
        """Number of the variant (the augmentation) of a sample at this step, for its cache key; None if the variant
        never comes again."""
        return augmentation_key(self.split, sample_id, self.step)

    def upcoming(self) -> Iterable[tuple[int, int | None]]:
        """The samples that are needed after these, each with the number of its variant (see `variant`)."""
        return [(sample_id, augmentation_key(self.split, sample_id, step)) for step, sample_id in self.following()]

    def expect(self, sample_ids: Collection[int]) -> None:
        """Limit what is read ahead: of the samples of `following`, only these will be needed by this worker."""
        self._uncached = sample_ids

    def _read(self, sample_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        if self.readers is None:
            return read_batch(self.split, sample_ids, self.step)
        uncached = self._uncached
        following = (wanted for wanted in self.following() if uncached is None or wanted[1] in uncached)
        return self.readers.read(self.name, sample_ids, self.step, following)


def sample_ids_of(micro_batches: Sequence[MicroBatch]) -> list[int]:
    """Sample ids of all micro-batches, in order, including samples that only pad a micro-batch."""
    return [sample_id for micro_batch in micro_batches for sample_id in micro_batch.sample_ids]
