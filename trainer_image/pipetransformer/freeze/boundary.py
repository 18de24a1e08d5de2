"""What the frozen boundary means for units (0 is the embedding, 1..L the blocks, L+1 the head).

The embedding freezes with block 0; the head never does. Frozen means: no gradient, out of the optimizer, in `eval()`.
The one exception is a parameter that a frozen unit shares with one that trains: it follows the other's gradient, while
its own unit computes none.
The boundary may fall: a unit that trains again goes on from its weights with fresh optimizer state.
"""

from collections.abc import Mapping

from torch import nn

from pipetransformer.models import Ties


def first_trainable(boundary: int) -> int:
    """Index of the first unit that still trains when `boundary` blocks are frozen."""
    return 0 if boundary == 0 else boundary + 1


def trains(unit: int, name: str, boundary: int, ties: Ties) -> bool:
    """Whether parameter `name` of a unit changes when `boundary` blocks are frozen."""
    return ties.last_unit(unit, name) >= first_trainable(boundary)


def apply_boundary(units: Mapping[int, nn.Module], boundary: int, ties: Ties) -> None:
    """Freeze the units below the boundary and let the others train."""
    for index, unit in units.items():
        unit.train(index >= first_trainable(boundary))
        for name, parameter in unit.named_parameters():
            parameter.requires_grad_(trains(index, name, boundary, ties))
            if not parameter.requires_grad:
                parameter.grad = None
