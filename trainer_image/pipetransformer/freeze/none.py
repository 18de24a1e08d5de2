"""The policy of a job without freezing."""

from .policy import FreezeObservation, FreezePolicy


class NoFreeze(FreezePolicy):
    """Never moves the boundary."""

    known_ahead = True

    def next_decision(self, step: int) -> None:
        return None

    def decide(self, observation: FreezeObservation) -> int:
        return observation.boundary
