"""Applies the frozen boundary to units (0 is the embedding, 1..L the layers, L + 1 the head).

The embedding freezes with the first layer; the head never freezes. A frozen unit is in `eval()` mode, and has no
gradients and no optimizer state. Only a parameter that it shares with a unit that trains still trains with that unit.
The boundary may fall. A unit that trains again keeps its weights and gets new optimizer state.
"""

from collections.abc import Mapping

from torch import nn

from pipetransformer.models import Ties


def first_trainable(boundary: int) -> int:
    """Index of the first unit that trains when `boundary` layers are frozen."""
    return 0 if boundary == 0 else boundary + 1


def trains(unit: int, name: str, boundary: int, ties: Ties) -> bool:
    """Whether a unit's parameter `name` changes when `boundary` layers are frozen."""
    return ties.last_unit(unit, name) >= first_trainable(boundary)


def apply_boundary(units: Mapping[int, nn.Module], boundary: int, ties: Ties) -> None:
    """Freeze the units below the boundary and let the others train."""
    for index, unit in units.items():
        unit.train(index >= first_trainable(boundary))
        for name, parameter in unit.named_parameters():
            parameter.requires_grad_(trains(index, name, boundary, ties))
            if not parameter.requires_grad:
                parameter.grad = None
