"""Asynchronous copies between an accelerator and host memory.

CUDA copies at full speed and asynchronously only from and to pinned memory, and pinning takes longer than the copy.
PyTorch reuses freed pinned memory of the same size, so one checkpoint, mirror or batch reuses the buffers of the last.
Without an accelerator nothing is pinned.
"""

import torch
from torch import Tensor

_CPU = torch.device("cpu")


class HostCopies:
    """Copies tensors to host memory as they are when `copy` is called. Read the copies only after `wait` returns."""

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None

    def copy(self, tensor: Tensor) -> Tensor:
        """Begin a copy. Later changes of the tensor in the same stream of its device wait for it."""
        copy = tensor.detach().to(_CPU, copy=True, non_blocking=True)  # pinned, if from a device
        if tensor.is_cuda:
            self._last = self._last or torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._last.record(torch.cuda.current_stream(tensor.device))
        return copy

    def wait(self) -> None:
        """Wait until all copies are whole; may be called by any thread.

        Raises:
            RuntimeError: the device failed.
        """
        if self._last is not None:
            self._last.synchronize()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device. Later work on the device waits for the copy."""
    if device.type == "cpu" or tensor.is_cuda:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
