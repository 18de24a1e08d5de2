"""Samples that run through a pipeline together, one micro-batch after another."""

from collections.abc import Callable, Sequence

from torch import Tensor

from ..cache import Source
from ..data import MicroBatch, Split, augmentation_key, lengths_of, read_batch
from ..models import MicroBatchContext, set_micro_batch
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
        forward_only: bool = False,
    ) -> None:
        """
        Args:
            split: that the samples are of.
            name: of the split, `train` or `test`: cached activations belong to it.
            step: see above.
            micro_batches: see above.
            forward_only: of a step, too.
        """
        self._split, self._name = split, name
        self.step = step
        self.training = step is not None and not forward_only
        self.micro_batches = micro_batches
        self.sample_ids = sample_ids_of(micro_batches)
        self.length = micro_batches[0].length
        self._inputs: Tensor | None = None

    @property
    def micro_batch_size(self) -> int:
        return len(self.micro_batches[0].sample_ids)

    def labels(self) -> Tensor:
        """Of all samples, on the CPU. Their inputs, which are read with them, are kept."""
        inputs, labels = read_batch(self._split, self.sample_ids, self.step)
        self._inputs = self._cut(inputs)
        return labels

    def inputs(self, wanted: Sequence[int]) -> Tensor:
        """(len(wanted), *input shape) of some of the samples, on the CPU."""
        if self._inputs is None:
            return self._cut(read_batch(self._split, wanted, self.step)[0])
        if wanted == self.sample_ids:
            return self._inputs
        row = {sample_id: number for number, sample_id in enumerate(self.sample_ids)}
        return self._inputs[[row[sample_id] for sample_id in wanted]]

    def context(self, spec: StageSpec, sample_ids: Sequence[int]) -> MicroBatchContext:
        """What a unit of the stage may know of some of the samples."""
        lengths = lengths_of(self._split, sample_ids, spec.device)
        return MicroBatchContext(self.step or 0, tuple(sample_ids), lengths, spec.autocast, spec.recompute)

    def source(self, spec: StageSpec, following: Callable[[], Sequence[int]]) -> Source:
        """For the frozen prefix of a first stage; `following` says which samples come next, to read ahead."""
        next_step = None if self.step is None else self.step + 1
        return Source(
            split=self._name,
            inputs=self.inputs,
            augmentation=lambda sample_id: augmentation_key(self._split, sample_id, self.step),
            enter=lambda sample_ids: set_micro_batch(self.context(spec, sample_ids)),
            upcoming=lambda: [
                (sample_id, augmentation_key(self._split, sample_id, next_step)) for sample_id in following()
            ],
        )

    def _cut(self, inputs: Tensor) -> Tensor:
        return inputs if self.length is None else inputs[:, : self.length]


def sample_ids_of(micro_batches: Sequence[MicroBatch]) -> list[int]:
    """Of all of them, padding included."""
    return [sample_id for micro_batch in micro_batches for sample_id in micro_batch.sample_ids]
