"""A metric that specs of tests import."""

from torch import Tensor


def sevens(output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Share of the sevens that are found."""
    are = (target == 7) * weight
    return (are * (output.argmax(dim=-1) == 7)).sum(), are.sum()
