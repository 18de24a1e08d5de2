"""A frozen unit that a new worker has read from a checkpoint before it knows which stage it gets."""

from typing import NamedTuple

from torch import Tensor


class ReadUnit(NamedTuple):
    """A unit's parameters and buffers (`tensors`, by name), and `Control.fell_step` of the checkpoint. If layers have
    thawed since, this number is another one."""

    fell_step: int
    tensors: dict[str, Tensor]
