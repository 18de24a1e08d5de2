"""What the frozen boundary means for units (0 is the embedding, 1..L the blocks, L+1 the head).

The embedding freezes with block 0; the head never does. Frozen means: no gradient, out of the optimizer, in `eval()`.
"""

from collections.abc import Mapping

from torch import nn


def first_trainable(boundary: int) -> int:
    """Index of the first unit that still trains when `boundary` blocks are frozen."""
    return 0 if boundary == 0 else boundary + 1


def apply_boundary(units: Mapping[int, nn.Module], boundary: int) -> None:
    """Freeze the units below the boundary and let the others train."""
    for index, unit in units.items():
        trains = index >= first_trainable(boundary)
        unit.train(trains)
        unit.requires_grad_(trains)
        if not trains:
            for parameter in unit.parameters():
                parameter.grad = None
