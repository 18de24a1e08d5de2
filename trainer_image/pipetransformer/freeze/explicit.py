"""Boundaries that the user wrote down, step by step; also how one run replays the freezes of another."""

from collections.abc import Sequence

from pipetransformer_contract.spec import FreezePoint

from .policy import FreezeObservation, FreezePolicy


class Explicit(FreezePolicy):
    """From each point's step on its boundary holds, higher or lower than the one before."""

    def __init__(self, points: Sequence[FreezePoint]) -> None:
        self.points = sorted(points, key=lambda point: point.step)

    def decide(self, observation: FreezeObservation) -> int:
        reached = [point.boundary for point in self.points if point.step <= observation.step]
        return min(reached[-1], observation.num_layers) if reached else observation.boundary
