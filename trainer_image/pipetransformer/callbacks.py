"""What a program may do while it trains: it is told on the leader, between rounds, and decides nothing."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import CallbackError


class Callback:
    """Methods to override. A new leader goes on where the last one was; a step that is redone is told again.

    Values are those of the run's record: `step` counts from 0 in `on_step`, and committed steps elsewhere.
    """

    def on_step(self, line: Mapping[str, Any]) -> None:
        """A step is committed: step, epoch, samples, loss, gradient_norm, learning_rate, samples_per_second,
        generation, frozen_layers."""

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """The held-out samples were evaluated."""

    def on_freeze(self, step: int, frozen_layers: int) -> None:
        """The frozen boundary moved."""

    def on_generation(self, step: int, generation: int, stages: int, pipelines: int) -> None:
        """The workers trained the first step of a generation (the first of all, too)."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """The model is durable; `summary` is what `summary.json` says."""


def tell(callbacks: Sequence[Callback], method: Callable[..., None], *values: Any) -> None:
    """Call a method of each callback, in order.

    Args:
        callbacks: of the program.
        method: of `Callback`.
        values: its arguments.

    Raises:
        CallbackError: one failed.
    """
    for callback in callbacks:
        try:
            getattr(callback, method.__name__)(*values)
        except Exception as error:
            name = f"{type(callback).__name__}.{method.__name__}"
            raise CallbackError(f"{name} failed: {type(error).__name__}: {error}") from error
