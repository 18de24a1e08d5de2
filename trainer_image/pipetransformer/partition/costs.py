"""What one micro-batch costs in each unit, given how many blocks are frozen."""

from collections.abc import Sequence
from dataclasses import dataclass

#: An embedding or head of a transformer against one of its blocks, until something has been measured.
_END_SHARE = 0.1


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of one unit for one micro-batch: forward, and backward when input and weights both need a gradient."""

    forward: float
    backward: float


def assumed_times(num_layers: int) -> list[UnitTimes]:
    """Times of the L + 2 units in units of one block's forward; backward takes twice the forward."""
    end = UnitTimes(_END_SHARE, 2 * _END_SHARE)
    return [end, *[UnitTimes(1.0, 2.0)] * num_layers, end]


def layer_costs(num_layers: int, boundary: int, unit_times: Sequence[UnitTimes] | None = None) -> list[float]:
    """Cost of each of the L + 2 units when the first `boundary` blocks are frozen.

    A frozen unit runs forward only; the first active one computes no gradient of its input, about half of its backward;
    every other runs forward and backward.

    Raises:
        ValueError: `unit_times` does not have L + 2 items.
    """
    times = assumed_times(num_layers) if unit_times is None else unit_times
    if len(times) != num_layers + 2:
        raise ValueError(f"{len(times)} times for {num_layers + 2} units")
    first_active = boundary + 1 if boundary else 0
    costs = []
    for unit, time in enumerate(times):
        if unit < first_active:
            costs.append(time.forward)
        elif unit == first_active:
            costs.append(time.forward + time.backward / 2)
        else:
            costs.append(time.forward + time.backward)
    return costs
