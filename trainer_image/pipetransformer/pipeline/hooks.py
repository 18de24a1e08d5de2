"""Hooks around the computations of a round, for code that sums gradients or changes weights within the round."""

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

_PLAIN = nullcontext()


class RoundHooks:
    """Called by the executor around computations. The methods do nothing; a subclass overrides those that it needs."""

    def weights(self, span: int, chunk: int) -> AbstractContextManager[None]:
        """A context for the forward of a chunk on a span. It may put other weights in place for the forward."""
        return _PLAIN

    def weights_back(self, span: int, chunk: int) -> AbstractContextManager[None]:
        """A context for the backward of a chunk on a span. It may put other weights in place for the backward.
        Gradients still add up in the `grad` of the parameters."""
        return _PLAIN

    def step(self, span: int, step: int, weight: Tensor) -> None:
        """Step the optimizer on the span's weights: the schedule has a `STEP` action here.

        Args:
            span: index of the span.
            step: number of the step in the round.
            weight: summed weight of the losses of the step's chunks in this pipeline, float64.
        """

    def passed(self, unit: int) -> None:
        """Called when a chunk's backward has passed this unit. The chunk's gradients of the unit's weights are then
        complete."""
