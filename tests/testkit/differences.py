"""How far two runs are apart that should compute the same."""

import math
from collections.abc import Iterable

from torch import Tensor


def relative_difference(value: float, reference: float) -> float:
    """|value - reference| / |reference|; infinite where that is not a number.

    `max()` passes over a NaN that is not its first value. So a run whose loss became NaN would seem to agree.

    Raises:
        ZeroDivisionError: the reference is 0.
    """
    difference = abs(value - reference) / abs(reference)
    return math.inf if math.isnan(difference) else difference


def relative_distance(tensor: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference; infinite where that is not a number."""
    distance = float((tensor - reference).norm() / reference.norm())
    return math.inf if math.isnan(distance) else distance


def worst_relative_difference(values: Iterable[float], references: Iterable[float]) -> float:
    """The largest `relative_difference` of two series of one length; 0 if they are empty.

    Raises:
        ValueError: one is longer.
    """
    pairs = zip(values, references, strict=True)
    return max((relative_difference(*pair) for pair in pairs), default=0.0)
