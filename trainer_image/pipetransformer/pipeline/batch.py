"""Samples that run through a pipeline together, one micro-batch after another."""

from collections.abc import Callable, Collection, Iterable, Sequence

from torch import Tensor

from pipetransformer.cache import Source
from pipetransformer.data import MicroBatch, Readers, Split, Wanted, augmentation_key, lengths_of, read_batch
from pipetransformer.models import MicroBatchContext, set_micro_batch

from .stage import StageSpec


class Batch:
    """Micro-batches of one length and size: stages are static.

    Attributes:
        step: at which they train; None where they are evaluated.
        micro_batches: at least one.
        sample_ids: of all of them, padding included.
        length: what all samples are cut to, None for the length of the input.
        training: whether a backward follows.
    """

    def __init__(
        self,
        split: Split,
        name: str,
        step: int | None,
        micro_batches: Sequence[MicroBatch],
        *,
        following: Callable[[], Iterable[Wanted]] = lambda: (),
        readers: Readers | None = None,
        forward_only: bool = False,
    ) -> None:
        """
        Args:
            split: that the samples are of.
            name: of the split, `train` or `test`: cached activations belong to it.
            step: see above.
            micro_batches: see above.
            following: which samples come next, to read ahead.
            readers: of the split; None to read where this is called.
            forward_only: of a step, too; what frozen units make of it is neither read nor kept.
        """
        self._split, self._name = split, name
        self.step = step
        self.training = step is not None and not forward_only
        self._cached = not forward_only
        self.micro_batches = micro_batches
        self.sample_ids = sample_ids_of(micro_batches)
        self.length = micro_batches[0].length
        self._following, self._readers = following, readers
        self._uncached: Collection[int] | None = None
        self._inputs: Tensor | None = None

    @property
    def micro_batch_size(self) -> int:
        return len(self.micro_batches[0].sample_ids)

    def labels(self) -> Tensor:
        """Of all samples, on the CPU. Their inputs, which are read with them, are kept."""
        inputs, labels = self._read(self.sample_ids)
        self._inputs = self._cut(inputs)
        return labels

    def inputs(self, wanted: Sequence[int]) -> Tensor:
        """(len(wanted), *input shape) of some of the samples, on the CPU."""
        if self._inputs is None:
            return self._cut(self._read(wanted)[0])
        if wanted == self.sample_ids:
            return self._inputs
        row = {sample_id: number for number, sample_id in enumerate(self.sample_ids)}
        return self._inputs[[row[sample_id] for sample_id in wanted]]

    def context(self, spec: StageSpec, sample_ids: Sequence[int]) -> MicroBatchContext:
        """What a unit of the stage may know of some of the samples."""
        lengths = lengths_of(self._split, sample_ids, spec.device)
        return MicroBatchContext(self.step or 0, tuple(sample_ids), lengths, spec.autocast, spec.recompute)

    def source(self, spec: StageSpec) -> Source:
        """For the frozen prefix of a first stage."""
        return Source(
            split=self._name,
            inputs=self.inputs,
            augmentation=lambda sample_id: (
                augmentation_key(self._split, sample_id, self.step) if self._cached else None
            ),
            enter=lambda sample_ids: set_micro_batch(self.context(spec, sample_ids)),
            upcoming=lambda: [
                (sample_id, augmentation_key(self._split, sample_id, step)) for step, sample_id in self._following()
            ],
            expect=self._expect,
        )

    def _expect(self, sample_ids: Collection[int]) -> None:
        self._uncached = sample_ids

    def _read(self, sample_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        if self._readers is None:
            return read_batch(self._split, sample_ids, self.step)
        uncached = self._uncached
        following = (wanted for wanted in self._following() if uncached is None or wanted[1] in uncached)
        return self._readers.read(self._name, sample_ids, self.step, following)

    def _cut(self, inputs: Tensor) -> Tensor:
        return inputs if self.length is None else inputs[:, : self.length]


def sample_ids_of(micro_batches: Sequence[MicroBatch]) -> list[int]:
    """Of all of them, padding included."""
    return [sample_id for micro_batch in micro_batches for sample_id in micro_batch.sample_ids]
