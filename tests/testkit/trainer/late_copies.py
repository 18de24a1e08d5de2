"""Copies to the host that end late."""

import torch
from torch import Tensor

from pipetransformer.device_copies import HostCopies


class Late(HostCopies):
    """Copies that are whole only after `wait`, as a device's may be."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: list[tuple[Tensor, Tensor]] = []

    def copy(self, tensor: Tensor) -> Tensor:
        copy = torch.zeros_like(tensor)
        self._begun.append((copy, tensor.detach().clone()))
        return copy

    def wait(self) -> None:
        for copy, value in self._begun:
            copy.copy_(value)
