"""AutoFreeze's rule (Liu et al., 2021): freeze the first layers, whose gradients have stopped changing.

The paper takes the norm of the gradient accumulated over an interval of steps. Here it is the mean over the interval of
the gradient's norm, which is in each vote anyway. PipeTransformer's released code also has this rule. But it keeps only
the last gradient of an interval, and also freezes the first layer that still changes.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .policy import FreezeObservation, FreezePolicy, Instants


class NormChange(FreezePolicy):
    """Finds the first layer that still changes, and freezes all layers before it.

    A layer's change is |before - now| / before, where before and now are its mean gradient norms in the previous and in
    this interval. A layer still changes if its change is at least the `percentile` of the changes of all layers that
    train. Some layer always does, so the last layer never freezes. A layer with no gradient in both intervals has
    nothing to train: it is left out of the percentile, and freezes with its neighbours.
    """

    def __init__(self, percentile: float, instants: Instants) -> None:
        self.percentile = percentile
        self.instants = instants
        self._sums: list[float] = []
        self._count = 0
        self._before: list[float] = []

    def next_decision(self, step: int) -> int:
        return self.instants.after(step)

    def decide(self, observation: FreezeObservation) -> int:
        boundary, num_layers = observation.boundary, observation.num_layers
        norms = observation.unit_gradient_norms[1 : num_layers + 1]
        if norms and observation.step > self.instants.start:
            self._sums = [total + norm for total, norm in zip(self._sums or [0.0] * num_layers, norms, strict=True)]
            self._count += 1
        if not self._count or self.instants.number(observation.step) is None:
            return boundary
        before, now = self._before, [total / self._count for total in self._sums]
        self._before, self._sums, self._count = now, [], 0
        if not before:
            return boundary
        active = [layer for layer in range(boundary, num_layers) if before[layer] or now[layer]]
        if not active:
            return boundary
        changes = [_change(before[layer], now[layer]) for layer in active]
        threshold = np.percentile(changes, self.percentile)
        return next(layer for layer, change in zip(active, changes, strict=True) if change >= threshold)

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums, "count": self._count, "before": self._before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums, self._count, self._before = list(state["sums"]), int(state["count"]), list(state["before"])


def _change(before: float, now: float) -> float:
    return abs(before - now) / before if before else 1.0
