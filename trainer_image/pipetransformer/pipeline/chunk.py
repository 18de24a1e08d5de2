"""What flows through the spans of one worker: one object for each micro-batch of a round, or for each slice of it."""

from dataclasses import dataclass

from torch import Tensor

from pipetransformer.cache import PrefixOutputs
from pipetransformer.models import MicroBatchContext


@dataclass(slots=True)
class Chunk:
    """A micro-batch of a round, or a slice of its tokens, on one worker.

    Attributes:
        micro_batch: place of the micro-batch in the round.
        context: what units may know of it.
        shape: shape of its activations between units.
        prefix: computes or reads the input of the first span's first unit that trains; only on that span's worker.
        made: that input, if a `PREFIX` action has computed it.
        piece: input of the next frozen unit that a `PREFIX` action of this worker computes.
        labels: (samples, ...) labels; only on the last span's worker.
        weights: (samples,) weights of the samples; only on the last span's worker.
        loss: summed loss, once the last span has trained it.
        weight: summed weight of that loss.
    """

    micro_batch: int
    context: MicroBatchContext
    shape: tuple[int, ...]
    prefix: PrefixOutputs | None = None
    made: Tensor | None = None
    piece: Tensor | None = None
    labels: Tensor | None = None
    weights: Tensor | None = None
    loss: Tensor | None = None
    weight: Tensor | None = None

    def first_input(self) -> Tensor:
        """The first span's input, behind the frozen units that it starts with."""
        if self.made is not None:
            made, self.made = self.made, None
            return made
        assert self.prefix is not None
        return self.prefix.take(self.micro_batch, self.context)
