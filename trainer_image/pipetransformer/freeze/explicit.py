"""Boundaries that the user lists by step, for example to replay another run's freezes."""

from collections.abc import Sequence

from pipetransformer_contract.spec import FreezePoint

from .policy import FreezeObservation, FreezePolicy


class Explicit(FreezePolicy):
    """Sets the boundary of each point in `points` from its step on. The boundary may rise or fall."""

    known_ahead = True

    def __init__(self, points: Sequence[FreezePoint]) -> None:
        self.points = sorted(points, key=lambda point: point.step)

    def next_decision(self, step: int) -> int | None:
        return next((point.step for point in self.points if point.step > step), None)

    def decide(self, observation: FreezeObservation) -> int:
        reached = [point.boundary for point in self.points if point.step <= observation.step]
        return min(reached[-1], observation.num_layers) if reached else observation.boundary
