"""Asynchronous copies between an accelerator and host memory.

CUDA copies at full speed and asynchronously only from and to pinned memory, and pinning takes longer than the copy.
PyTorch reuses freed pinned memory of the same size, so each checkpoint, mirror or batch reuses the buffers of the
previous one. Without an accelerator nothing is pinned.
"""

import torch
from torch import Tensor

_CPU = torch.device("cpu")


class HostCopies:
    """Copies tensors to host memory, with the values that they have when `copy` is called.

    Read the copies only after `wait` returns.
    """

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None

    def copy(self, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor. Later work on its CUDA stream waits for the copy, so it may change the tensor."""
        copy = tensor.detach().to(_CPU, copy=True, non_blocking=True)  # pinned, if the tensor is on a device
        if tensor.is_cuda:
            self._last = self._last or torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._last.record(torch.cuda.current_stream(tensor.device))
        return copy

    def wait(self) -> None:
        """Wait until all copies are complete. Any thread may call this.

        Raises:
            RuntimeError: the device failed.
        """
        if self._last is not None:
            self._last.synchronize()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device. Later work on the device waits for the copy."""
    if tensor.is_cuda or device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
