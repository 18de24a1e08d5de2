"""What a system does around the computations of a round."""

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

_PLAIN = nullcontext()


class RoundHooks:
    """Does nothing. A system overrides what it needs."""

    def weights(self, span: int, chunk: int) -> AbstractContextManager[None]:
        """Entered around a forward, which may use other weights of the span."""
        return _PLAIN

    def weights_back(self, span: int, chunk: int) -> AbstractContextManager[None]:
        """Entered around a backward, which may use other weights of the span. Gradients add up as always."""
        return _PLAIN

    def step(self, span: int, step: int, weight: Tensor) -> None:
        """The schedule changes the span's weights now.

        Args:
            span: index of the span.
            step: number of the step in the round.
            weight: summed weight of the losses of the step's chunks in this pipeline, float64.
        """

    def passed(self, unit: int) -> None:
        """The backward of a chunk has passed this unit: the gradients of its weights are complete for that chunk."""
