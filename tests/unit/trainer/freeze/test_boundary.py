"""The boundary says which units train: embedding, three layers, head."""

import pytest
import torch
from torch import nn

from pipetransformer.freeze.boundary import apply_boundary
from pipetransformer.models import Ties


@pytest.mark.parametrize(
    ("boundary", "training"),
    [
        (0, [True, True, True, True, True]),
        (1, [False, False, True, True, True]),
        (2, [False, False, False, True, True]),
        (3, [False, False, False, False, True]),
    ],
)
def test_the_embedding_freezes_with_the_first_layer_and_the_head_never(boundary: int, training: list[bool]) -> None:
    units = {index: nn.Linear(2, 2) for index in range(5)}
    for unit in units.values():
        unit(torch.ones(2)).sum().backward()

    apply_boundary(units, boundary, Ties())

    assert [unit.training for unit in units.values()] == training
    for unit, trains in zip(units.values(), training, strict=True):
        assert [parameter.requires_grad for parameter in unit.parameters()] == [trains] * 2
        assert [parameter.grad is not None for parameter in unit.parameters()] == [trains] * 2

    apply_boundary(units, 0, Ties())
    assert all(parameter.requires_grad for unit in units.values() for parameter in unit.parameters())
