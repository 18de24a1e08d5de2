"""Egeria's rule (Wang et al., EuroSys 2023): freeze the first layer that trains once its plasticity is stationary.

Plasticity compares a layer's outputs with those of the same layer in a reference model, for the same samples. It is the
similarity-preserving loss (Tung and Mori, ICCV 2019). Egeria's reference is a quantised copy that it sometimes renews.
Here it is the model at the previous decision. Only the similarities of its outputs are kept. They are enough, because
the samples are fixed and all units before the layer are frozen.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .policy import FreezeObservation, FreezePolicy, Instants


class Plasticity(FreezePolicy):
    """Freezes the front layer, the first that trains, when its plasticity is stationary.

    Plasticity is smoothed by a moving average over `window` decisions. It is stationary while the slope of a line
    through the last `window` averages is at most `tolerance` per decision, relative to the largest plasticity since the
    layer became the front. After `window` stationary decisions in a row the layer freezes, and the next layer becomes
    the front. If the learning rate has fallen by the factor `learning_rate_drop` since the first freeze, all layers
    train again (as in Egeria).
    """

    def __init__(self, tolerance: float, window: int, learning_rate_drop: float, instants: Instants) -> None:
        self.tolerance = tolerance
        self.window = window
        self.learning_rate_drop = learning_rate_drop
        self.instants = instants
        self._reference: list[float] = []
        self._history: list[float] = []
        self._largest = 0.0
        self._stationary = 0
        self._rate_at_first_freeze: float | None = None
        #: The boundary at which `_reference` and `_history` were seen.
        self._front = 0

    def needs_similarities(self, step: int) -> bool:
        return self.instants.number(step) is not None

    def next_decision(self, step: int) -> int:
        return self.instants.after(step)

    def decide(self, observation: FreezeObservation) -> int:
        boundary, similarities = observation.boundary, observation.similarities
        if self.instants.number(observation.step) is None:
            return boundary
        rate = observation.learning_rate
        if self._rate_at_first_freeze is not None and rate * self.learning_rate_drop <= self._rate_at_first_freeze:
            self._rate_at_first_freeze = None
            self._start_front()
            return 0
        if boundary >= observation.num_layers or not similarities or not np.isfinite(similarities).all():
            return boundary
        if boundary != self._front:  # these are outputs of another layer
            self._start_front()
            self._front = boundary
        before, self._reference = self._reference, list(similarities)
        if not before:
            return boundary
        plasticity = distance(before, similarities)
        self._history = [*self._history, plasticity][-(2 * self.window - 1) :]
        self._largest = max(self._largest, plasticity)
        self._stationary = self._stationary + 1 if self._is_stationary() else 0
        if self._stationary < self.window:
            return boundary
        if self._rate_at_first_freeze is None:
            self._rate_at_first_freeze = rate
        return boundary + 1

    def _start_front(self) -> None:
        self._reference, self._history, self._largest, self._stationary = [], [], 0.0, 0

    def _is_stationary(self) -> bool:
        if len(self._history) < 2 * self.window - 1:
            return False
        smooth = np.convolve(self._history, np.full(self.window, 1 / self.window), mode="valid")
        slope = np.polyfit(np.arange(self.window), smooth, 1)[0]
        return bool(abs(slope) <= self.tolerance * self._largest)

    def state_dict(self) -> dict[str, Any]:
        return {
            "reference": self._reference,
            "history": self._history,
            "largest": self._largest,
            "stationary": self._stationary,
            "rate_at_first_freeze": self._rate_at_first_freeze,
            "front": self._front,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reference = list(state["reference"])
        self._history = list(state["history"])
        self._largest = float(state["largest"])
        self._stationary = int(state["stationary"])
        self._rate_at_first_freeze = state["rate_at_first_freeze"]
        self._front = int(state["front"])


def distance(reference: Sequence[float], similarities: Sequence[float]) -> float:
    """The similarity-preserving loss ||a - b||^2 / n^2 of two flat (n, n) matrices of normalised similarities."""
    return float(np.mean(np.square(np.subtract(reference, similarities))))
