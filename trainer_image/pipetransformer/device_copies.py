"""Copies between an accelerator and the host's memory that nobody waits for before they are needed.

CUDA copies at full speed, and while the host goes on, only from and to pinned memory, and pinning takes longer than the
copy. PyTorch keeps pinned memory that was freed, once the copies that use it have ended, for the next that are as
large: the buffers of one checkpoint, mirror or batch serve those that follow. Without an accelerator nothing is pinned.
"""

import torch
from torch import Tensor

_CPU = torch.device("cpu")


class HostCopies:
    """Copies in host memory, of tensors as they are when `copy` is called; to be read once `wait` has returned."""

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None

    def copy(self, tensor: Tensor) -> Tensor:
        """Begin a copy. What changes the tensor later in the same stream of its device waits for it."""
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
    """What is in host memory, on the device: what is started there from now on finds it whole."""
    if device.type == "cpu" or tensor.is_cuda:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
