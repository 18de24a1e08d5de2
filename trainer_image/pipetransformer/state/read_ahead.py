"""A frozen unit that a new worker has read from a checkpoint before it knows which stage it gets."""

from typing import NamedTuple

from torch import Tensor


class ReadUnit(NamedTuple):
    """A unit's parameters and buffers (`tensors`, by name) after `step` committed steps."""

    step: int
    tensors: dict[str, Tensor]
