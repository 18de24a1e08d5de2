"""PipeTransformer's Eq. 1 as published: freeze up to the layer with the smallest gradient, within a geometric bound.

The paper's released code uses only the bound and no gradient. Here the layer with the smallest gradient freezes too.
Layers with a gradient of 0 have nothing to train, and are not considered.
"""

from .policy import FreezeObservation, FreezePolicy, Instants, ceil_share


class GradientNorm(FreezePolicy):
    """Freezes min(L_frozen + alpha * (L - L_frozen), l) layers, where l is the number (from 1) of the layer with the
    smallest gradient norm among those that train (section 3.1, Eq. 1)."""

    def __init__(self, alpha: float, instants: Instants) -> None:
        self.alpha = alpha
        self.instants = instants

    def next_decision(self, step: int) -> int:
        return self.instants.after(step)

    def decide(self, observation: FreezeObservation) -> int:
        boundary, num_layers = observation.boundary, observation.num_layers
        norms = observation.unit_gradient_norms[1 : num_layers + 1]
        if not norms or self.instants.number(observation.step) is None:
            return boundary
        bound = boundary + ceil_share(self.alpha * (num_layers - boundary))
        moving = [layer for layer in range(boundary, num_layers) if norms[layer] > 0]
        if not moving:
            return boundary
        return min(bound, min(moving, key=lambda layer: norms[layer]) + 1)
