"""AutoFreeze's rule (Liu et al., 2021): freeze the front blocks whose gradients have stopped changing.

The paper takes the norm of the gradient accumulated over an interval; here it is the mean norm of the interval's
gradients, which the vote has anyway, global and reduced. PipeTransformer's released code has a branch for this rule
that never accumulates (it overwrites) and freezes one block too many: the first that still moves.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .policy import FreezeObservation, FreezePolicy, Instants


class NormChange(FreezePolicy):
    """Freezes all blocks before the first active one whose norm changed at least as much as `percentile` of them.

    The change of a block is |before - now| / before, of its mean gradient norm in this interval and in the one before.
    Some block always reaches the percentile, so the last active block never freezes. A block without a gradient in both
    intervals has nothing that trains: it counts for no percentile and freezes with those around it.
    """

    def __init__(self, percentile: float, instants: Instants) -> None:
        self.percentile = percentile
        self.instants = instants
        self._sums: list[float] = []
        self._count = 0
        self._before: list[float] = []

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
        if not before or boundary >= num_layers:
            return boundary
        active = [block for block in range(boundary, num_layers) if before[block] or now[block]]
        if not active:
            return boundary
        changes = [_change(before[block], now[block]) for block in active]
        threshold = np.percentile(changes, self.percentile)
        return next(block for block, change in zip(active, changes, strict=True) if change >= threshold)

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums, "count": self._count, "before": self._before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums, self._count, self._before = list(state["sums"]), int(state["count"]), list(state["before"])


def _change(before: float, now: float) -> float:
    return abs(before - now) / before if before else float(now > 0)
