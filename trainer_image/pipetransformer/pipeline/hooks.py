"""What a system does around the computations of a round."""

from contextlib import AbstractContextManager, nullcontext

_PLAIN = nullcontext()


class RoundHooks:
    """Does nothing. A system overrides what it needs."""

    def weights(self, span: int, chunk: int) -> AbstractContextManager[None]:
        """Entered around a forward, which shall use other weights of the span (PipeOptim)."""
        return _PLAIN

    def step(self, span: int) -> None:
        """The schedule changes the span's weights now."""

    def passed(self, unit: int) -> None:
        """The backward of a chunk has passed this unit: the gradients of its weights are complete for that chunk."""
