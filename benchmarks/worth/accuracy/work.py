"""The work of a run in block forwards, so that no machine is in the figure.

A layer's forward is one unit, the gradient of its input another, and that of its weights a third. The lowest layer that
trains needs no gradient of its input if the embedding is frozen. The cache saves the forward of frozen layers for a
sample whose output of the frozen boundary it holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipetransformer.data.order import EpochOrder

#: Forward, gradient of the input and gradient of the weights.
_WHOLE_LAYER = 3


@dataclass(frozen=True)
class Work:
    """Work as a share of the work of the whole run with nothing frozen, without and with the cache."""

    plain: float
    cached: float


def work(
    boundaries: Sequence[int], order: EpochOrder, *, num_layers: int, whole_steps: int, weights: bool = True
) -> Work:
    """The work of a run.

    Args:
        boundaries: frozen layers in each step that was trained; may fall.
        order: tells the samples of each step. Samples do not change when they are read again.
        num_layers: layers of the model (L).
        whole_steps: steps of the run that counts as 1.
        weights: whether layers that train have gradients of their weights. Adapters do not need them; then the
            gradient passes through all layers, and nothing can be cached.
    """
    depth = np.zeros(order.num_samples, dtype=np.int64)  #: frozen layers whose output the cache holds, by sample
    plain = cached = 0
    for step, boundary in enumerate(boundaries):
        samples = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in order.batch(step)])
        once = _one_sample(boundary, num_layers) if weights else 2 * num_layers
        held = np.where(depth[samples] > boundary, 0, depth[samples])
        plain += once * len(samples)
        cached += once * len(samples) - int(held.sum())
        depth[samples] = boundary
    whole = _WHOLE_LAYER * num_layers * sum(order.batch_size(step) for step in range(whole_steps))
    return Work(plain / whole, cached / whole)


def _one_sample(boundary: int, num_layers: int) -> int:
    """Block forwards of one sample without the cache."""
    training = num_layers - boundary
    saved = 1 if boundary and training else 0
    return boundary + _WHOLE_LAYER * training - saved
