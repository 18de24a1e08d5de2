"""A frozen unit that a worker reads from storage before it knows its role."""

from typing import NamedTuple

from torch import Tensor


class ReadUnit(NamedTuple):
    """A unit's parameters and buffers after `step` committed steps."""

    step: int
    tensors: dict[str, Tensor]
