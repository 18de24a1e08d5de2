"""Turns units into the tensors that are sent from worker to worker, and back.

The shapes depend only on the unit, the optimizer and the boundary, so a receiver knows all of them in advance.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipetransformer.freeze.boundary import trains
from pipetransformer.models import Ties, unit_name
from pipetransformer_contract.spec import Optimizer

from .optimizer import moment_shapes
from .worker_state import WorkerState

_ALIGNMENT = 16
#: Tensors of at least this size in bytes are sent separately.
_LARGE = 1 << 16


class _Slot(NamedTuple):
    """The name (in `WorkerState.unit_tensors`), shape and type of a tensor of a unit."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes in the packed tensor, padded so that a tensor of any type can follow."""
        return -(-self.shape.numel() * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class UnitCodec:
    """Turns a unit into a few tensors to send, and received tensors into a unit.

    The first tensor packs all small tensors, because many small messages are slow. Large tensors are sent and received
    in place. Sender and receiver both compute the shapes, so only the data are sent. A parameter that trains is sent
    with its moments. If it has none yet, zeros are sent, which our optimizers treat in the same way.
    """

    optimizer: Optimizer | None  #: the optimizer whose moments are sent; None to send no moments
    num_layers: int
    ties: Ties = field(default_factory=Ties)
    predicts: bool = False  #: whether to send also the moments that only a prediction of weights needs

    def size(self, index: int, unit: nn.Module, boundary: int) -> int:
        """Bytes that are sent for a unit."""
        return sum(slot.size for slot in self._slots(index, unit, boundary))

    def give(self, state: WorkerState, index: int, device: torch.device) -> list[Tensor]:
        """The tensors to send for a unit of `state`, on `device`. Small tensors are copied. Large ones are sent as they
        are, if they are on `device`."""
        small, large = self._split(index, state.held[index], state.control.boundary)
        tensors = state.unit_tensors(index, with_moments=True)
        packed = torch.zeros(sum(slot.size for slot in small), dtype=torch.uint8, device=device)
        for slot, view in _views(small, packed):
            if slot.name in tensors:
                view.copy_(tensors[slot.name].detach())
        given = [
            tensors[slot.name].detach().contiguous().to(device)
            if slot.name in tensors
            else torch.zeros(slot.shape, dtype=slot.dtype, device=device)
            for slot in large
        ]
        return [packed, *given]

    def blank(self, index: int, unit: nn.Module, boundary: int, device: torch.device) -> list[Tensor]:
        """Tensors to receive the result of `give`. Only the shapes of `unit` are used."""
        small, large = self._split(index, unit, boundary)
        packed = torch.empty(sum(slot.size for slot in small), dtype=torch.uint8, device=device)
        return [packed, *(torch.empty(slot.shape, dtype=slot.dtype, device=device) for slot in large)]

    def take(self, parts: Sequence[Tensor], index: int, unit: nn.Module, boundary: int) -> dict[str, Tensor]:
        """The tensors for `WorkerState.put_unit`, from the received tensors `parts`."""
        small, large = self._split(index, unit, boundary)
        tensors = {slot.name: view.clone() for slot, view in _views(small, parts[0])}
        return tensors | {slot.name: part for slot, part in zip(large, parts[1:], strict=True)}

    def _split(self, index: int, unit: nn.Module, boundary: int) -> tuple[list[_Slot], list[_Slot]]:
        slots = list(self._slots(index, unit, boundary))
        return [slot for slot in slots if slot.size < _LARGE], [slot for slot in slots if slot.size >= _LARGE]

    def _slots(self, index: int, unit: nn.Module, boundary: int) -> Iterator[_Slot]:
        prefix = unit_name(index, self.num_layers)
        for name, tensor in unit.state_dict().items():
            yield _Slot(f"{prefix}.{name}", tensor.shape, tensor.dtype)
        for name, parameter in unit.named_parameters():
            if self.optimizer is None or not trains(index, name, boundary, self.ties):
                continue
            for key, (shape, dtype) in moment_shapes(self.optimizer, parameter, predicts=self.predicts).items():
                yield _Slot(f"{prefix}.{name}@{key}", shape, dtype)


def _views(slots: Iterable[_Slot], packed: Tensor) -> Iterator[tuple[_Slot, Tensor]]:
    offset = 0
    for slot in slots:
        end = offset + slot.shape.numel() * slot.dtype.itemsize
        yield slot, packed[offset:end].view(slot.dtype).view(slot.shape)
        offset += slot.size
