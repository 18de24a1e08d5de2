"""No freezing: plain pipeline training."""

from .policy import FreezeObservation, FreezePolicy


class NoFreeze(FreezePolicy):
    """Keeps the boundary where it is."""

    def next_decision(self, step: int) -> None:
        return None

    def decide(self, observation: FreezeObservation) -> int:
        return observation.boundary
