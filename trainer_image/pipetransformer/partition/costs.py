"""Costs of one micro-batch in each unit. They are measured on the workers; before that they are assumed."""

from collections.abc import Sequence
from typing import NamedTuple

from pydantic import BaseModel

from pipetransformer.freeze.boundary import first_trainable

#: Assumed cost of an embedding or head, relative to one layer.
_END_SHARE = 0.1


class UnitCost(NamedTuple):
    """What one micro-batch costs in one unit.

    Attributes:
        forward: seconds of the forward.
        backward: seconds of a backward that computes the gradients of weights and input.
        weights_backward: seconds of a backward for the gradients of weights only.
        saved_bytes: bytes that the forward keeps for the backward.
    """

    forward: float
    backward: float
    weights_backward: float
    saved_bytes: float = 0.0


class ModelCosts(BaseModel):
    """Costs of all L + 2 units and facts about the workers. All workers have the same numbers.

    Attributes:
        micro_batch_sizes: the two measured sizes of a micro-batch in samples, ascending.
        small: cost of each unit at the smaller size.
        large: cost of each unit at the larger size.
        seconds_per_byte: seconds to send a byte from one worker to another; 0 if there is only one worker.
        seconds_per_action: seconds that each computation of a schedule takes in addition to those of its units.
        processor_per_action: processor seconds among them.
        worker_bytes: bytes that layers may use on the worker with the least memory; None if nothing limits them.
        host_apart: whether on all workers host memory does not count against `worker_bytes`. Only then can frozen
            layers move there.
        step_seconds: seconds that the last step before the measurement took; None if it was not timed.
        step: number of committed steps at the measurement.
        boundary: number of frozen layers at the measurement.
        not_before: earliest step of the next measurement.
        unit_bytes: bytes of each unit of the measured model, if another job may read the costs; otherwise None.
    """

    micro_batch_sizes: tuple[int, int]
    small: list[UnitCost]
    large: list[UnitCost]
    seconds_per_byte: float = 0.0
    seconds_per_action: float = 0.0
    processor_per_action: float = 0.0
    worker_bytes: int | None = None
    host_apart: bool = False
    step_seconds: float | None = None
    step: int = 0
    boundary: int = 0
    not_before: int = 0
    unit_bytes: list[int] | None = None

    def at(self, micro_batch_size: int) -> list[UnitCost]:
        """Costs of each unit at another micro-batch size, by linear interpolation or extrapolation."""
        return [
            UnitCost(*(self._line(a, b, micro_batch_size) for a, b in zip(small, large, strict=True)))
            for small, large in zip(self.small, self.large, strict=True)
        ]

    def _line(self, small: float, large: float, size: int) -> float:
        first, second = self.micro_batch_sizes
        slope = (large - small) / (second - first)
        if slope < 0:
            return max(small, large)
        fixed = small - slope * first
        return fixed + slope * size if fixed > 0 else large * size / second


def measured_sizes(micro_batch_size: int) -> tuple[int, int]:
    """The two sizes of a micro-batch to measure, for a layout that runs `micro_batch_size` samples.

    The larger one is that of the layout, or 2. More samples might not fit the memory, although the layout does.
    """
    small = max(1, min(2, micro_batch_size // 2), micro_batch_size // 4)
    return small, max(2 * small, micro_batch_size)


def assumed_costs(num_layers: int) -> ModelCosts:
    """Assumed costs before a measurement. A layer's forward takes 1 a sample, in place of seconds. Its backward takes
    2, and half of that is for weights."""
    units = [UnitCost(share, 2 * share, share) for share in [_END_SHARE, *[1.0] * num_layers, _END_SHARE]]
    return ModelCosts(
        micro_batch_sizes=(1, 2), small=units, large=[UnitCost(*(2 * value for value in unit)) for unit in units]
    )


def training_seconds(
    costs: Sequence[UnitCost], boundary: int, miss_share: float = 1.0
) -> tuple[list[float], list[float]]:
    """Seconds of the forward and backward of each of the L + 2 units when `boundary` layers are frozen.

    Frozen units have only a forward. Only its share `miss_share` counts, because the cache saves the rest.
    The first unit that trains computes no gradient of its input.
    """
    first = first_trainable(boundary)
    backward = [
        0.0 if unit < first else cost.weights_backward if unit == first else cost.backward
        for unit, cost in enumerate(costs)
    ]
    forward = [cost.forward * (miss_share if unit < first else 1) for unit, cost in enumerate(costs)]
    return forward, backward
