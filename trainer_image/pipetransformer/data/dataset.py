"""What the trainer needs of a dataset: samples by id, in two splits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class DataInfo:
    """Shape of one input, without the batch, and the number of classes."""

    input_shape: tuple[int, ...]
    num_classes: int


class Split(Protocol):
    """Samples 0..len-1, the same on every worker."""

    def __len__(self) -> int: ...

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs (len(ids), *input_shape) and targets (len(ids),) of these samples, in this order, on the CPU."""
        ...


@dataclass(frozen=True)
class Dataset:
    """A training split and a held-out one."""

    train: Split
    test: Split
    info: DataInfo


@dataclass(frozen=True)
class TensorSplit:
    """A split that fits memory."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        index = torch.as_tensor(list(ids), dtype=torch.long)
        return self.inputs[index], self.targets[index]
