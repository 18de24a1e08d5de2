"""Keeps frozen units in host memory, because the cache has their outputs.

Such a unit can still compute: it comes to the device only for its own forward. So all such units together need the
device memory of one. The tensors in host memory never change, because a unit that comes back gets new ones. So mirrors
and checkpoints share them. With a GPU they are in pinned memory. On a CPU both memories are the same. There, too, units
move to new storages, and then do not count against the bytes of a worker's layers (`worker_memory`).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import Tensor, nn

from pipetransformer.device_copies import HostCopies

_OFF: WeakSet[nn.Module] = WeakSet()


def is_off(unit: nn.Module) -> bool:
    """Whether a unit was moved to host memory, from where it comes to the device only for its forward."""
    return unit in _OFF


def move_off(unit: nn.Module, device: torch.device) -> None:
    """Move a frozen unit from its device to host memory. Its parameters and buffers stay the same objects.

    Args:
        unit: a frozen unit.
        device: the unit's device. Its tensors may be in host memory already.
    """
    if unit in _OFF:
        return
    copies = HostCopies()
    host = [_in_host(tensor, device, copies) for tensor in _tensors(unit)]
    copies.wait()
    for tensor, copy in zip(_tensors(unit), host, strict=True):
        tensor.data = copy
    _OFF.add(unit)


def bring_back(unit: nn.Module, device: torch.device) -> None:
    """Move a unit from host memory back to its device, to stay there. Does nothing if it is not in host memory."""
    if unit in _OFF:
        for tensor in _tensors(unit):
            tensor.data = _on(device, tensor)
        _OFF.discard(unit)


@contextmanager
def on_device(unit: nn.Module, device: torch.device) -> Iterator[None]:
    """A context that lets a unit compute. A unit in host memory is on the device while the context lasts.

    On exit its memory on the device is freed, in the order of the current stream.
    """
    if unit not in _OFF:
        yield
        return
    host = [(tensor, tensor.data) for tensor in _tensors(unit)]
    try:
        for tensor, kept in host:
            tensor.data = _on(device, kept)
        yield
    finally:
        for tensor, kept in host:
            tensor.data = kept


def bytes_off(units: Iterable[nn.Module]) -> int:
    """Bytes of those of these units that are in host memory."""
    return sum(tensor.nbytes for unit in units if unit in _OFF for tensor in _tensors(unit))


def _tensors(unit: nn.Module) -> list[Tensor]:
    """Parameters and buffers, each once."""
    return [*unit.parameters(), *unit.buffers()]


def _in_host(tensor: Tensor, device: torch.device, copies: HostCopies) -> Tensor:
    on_gpu = device.type == "cuda"
    return tensor.detach().pin_memory() if on_gpu and not tensor.is_cuda else copies.copy(tensor)


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.detach().to(device, copy=True, non_blocking=True)
