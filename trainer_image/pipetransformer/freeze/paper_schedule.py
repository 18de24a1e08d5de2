"""The geometric schedule of PipeTransformer's released code. It uses only the upper bound of the paper's Eq. 1."""

from .policy import FreezeObservation, FreezePolicy, Instants, ceil_share


class PaperSchedule(FreezePolicy):
    """Freezes ceil(L * (1 - (1 - alpha)^T)) layers at the T-th decision (PipeTransformer, section 3.1, Eq. 1)."""

    known_ahead = True

    def __init__(self, alpha: float, instants: Instants) -> None:
        self.alpha = alpha
        self.instants = instants

    def next_decision(self, step: int) -> int:
        return self.instants.after(step)

    def decide(self, observation: FreezeObservation) -> int:
        number = self.instants.number(observation.step)
        if number is None:
            return observation.boundary
        frozen = ceil_share(observation.num_layers * (1 - (1 - self.alpha) ** number))
        return max(observation.boundary, frozen)
