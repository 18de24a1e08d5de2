"""The micro-batches that run through a pipeline together."""

from collections.abc import Callable, Collection, Iterable, Sequence

from torch import Tensor

from pipetransformer.cache import Source
from pipetransformer.data import MicroBatch, Readers, Split, Wanted, augmentation_key, lengths_of, read_batch
from pipetransformer.models import MicroBatchContext, set_micro_batch

from .stage import StageSpec


class Batch:
    """Micro-batches of one length and size, because stages are static.

    Attributes:
        step: the step that trains them; None for an evaluation.
        micro_batches: at least one micro-batch.
        sample_ids: sample ids of all micro-batches, including padding.
        length: length that all samples are cut to; None for the length of the input.
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
            split: the split of the samples.
            name: the split's name, `train` or `test`, which is part of cache keys.
            step: see above.
            micro_batches: see above.
            following: returns the samples that come next, to read them ahead.
            readers: readers of the split; None to read in this thread.
            forward_only: run no backward, and do not use the cache.
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
        """Labels of all samples, on the CPU. Keeps their inputs, which are read at the same time."""
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
        """The context of some of the samples, for a stage's units."""
        lengths = lengths_of(self._split, sample_ids, spec.device)
        return MicroBatchContext(self.step or 0, tuple(sample_ids), lengths, spec.autocast, spec.recompute)

    def source(self, spec: StageSpec) -> Source:
        """The source of samples for a first stage's frozen prefix."""
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
    """Sample ids of all micro-batches, including padding."""
    return [sample_id for micro_batch in micro_batches for sample_id in micro_batch.sample_ids]
