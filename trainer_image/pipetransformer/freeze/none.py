"""No freezing: plain pipeline training."""

from .policy import FreezeObservation, Stateless


class NoFreeze(Stateless):
    """Keeps the boundary where it is."""

    def decide(self, observation: FreezeObservation) -> int:
        return observation.boundary
