"""The committed state of a worker, and its form on the wire.

One list of what is committed serves regroup, checkpoint and the final model: parameters and buffers of the units held,
their optimizer moments, and the control state that is the same on all workers. A unit travels as one flat byte buffer
whose layout follows from the unit, the optimizer and the boundary alone, so a receiver knows its size before anything
is sent.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer_contract.spec import Optimizer

from .freezing import apply_boundary, trains
from .models import Ties, unit_name
from .optimizer import Moments, moment_shapes

_ALIGNMENT = 16


@dataclass
class Control:
    """What every worker knows alike between rounds.

    Attributes:
        step: global steps committed so far.
        boundary: frozen blocks.
        boundary_step: step before which the boundary was last changed.
        policy: state of the freeze policy.
        best_accuracy: highest test accuracy so far, None before the first evaluation.
        last_accuracy: test accuracy of the newest evaluation.
        round_ended_at: wall clock at the end of the last round, 0 before the first: a pause is counted from it.
        costs: what the units cost, `ModelCosts` by field name; None before it was measured.
        skipped_steps: steps in a row, up to now, that were not finite.
        last_vote: the vote that committed the last step; lets a worker that missed it commit the same.
        last_step: the last step's line in the run's record, in case that the leader died before it was written.
        evaluated_step: steps that were committed at the newest evaluation.
    """

    step: int = 0
    boundary: int = 0
    boundary_step: int = 0
    policy: dict[str, Any] = field(default_factory=dict)
    best_accuracy: float | None = None
    last_accuracy: float | None = None
    round_ended_at: float = 0.0
    costs: dict[str, Any] | None = None
    skipped_steps: int = 0
    last_vote: list[float] = field(default_factory=list)
    last_step: dict[str, Any] = field(default_factory=dict)
    evaluated_step: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Control":
        return cls(**fields)


@dataclass
class WorkerState:
    """Units that this worker holds, by index, with the moments of their parameters by whole-model name."""

    num_layers: int
    ties: Ties = field(default_factory=Ties)
    control: Control = field(default_factory=Control)
    units: dict[int, nn.Module] = field(default_factory=dict)
    moments: Moments = field(default_factory=dict)

    def named_parameters(self, index: int) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of a unit under their whole-model names."""
        prefix = unit_name(index, self.num_layers)
        for name, parameter in self.units[index].named_parameters():
            yield f"{prefix}.{name}", parameter

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of all units held that still train."""
        for index in sorted(self.units):
            prefix = unit_name(index, self.num_layers)
            for name, parameter in self.units[index].named_parameters():
                if trains(index, name, self.control.boundary, self.ties):
                    yield f"{prefix}.{name}", parameter

    def apply_boundary(self) -> None:
        """Freeze and unfreeze the units held, by the boundary. A parameter that freezes loses its moments."""
        apply_boundary(self.units, self.control.boundary, self.ties)
        for index in self.units:
            for name, parameter in self.named_parameters(index):
                if not parameter.requires_grad:
                    self.moments.pop(name, None)

    def unit_tensors(self, index: int, *, with_moments: bool) -> dict[str, Tensor]:
        """Parameters and buffers, and moments as `NAME@KEY`, of one unit by whole-model name."""
        prefix = unit_name(index, self.num_layers)
        tensors = {f"{prefix}.{name}": tensor for name, tensor in self.units[index].state_dict().items()}
        if with_moments:
            for name, _ in self.named_parameters(index):
                for key, tensor in self.moments.get(name, {}).items():
                    tensors[f"{name}@{key}"] = tensor
        return tensors

    def put_unit(self, index: int, unit: nn.Module, tensors: dict[str, Tensor]) -> None:
        """Hold `unit`, filled from what `unit_tensors` gave.

        Raises:
            ValueError: a parameter or buffer of the unit is missing.
        """
        prefix = unit_name(index, self.num_layers)
        with torch.no_grad():
            for name, target in unit.state_dict().items():
                source = tensors.get(f"{prefix}.{name}")
                if source is None:
                    raise ValueError(f"state of {prefix} has no {name}")
                target.copy_(source)
        self.units[index] = unit
        for name, _ in self.named_parameters(index):
            moments = {
                key.removeprefix(f"{name}@"): tensor.clone()
                for key, tensor in tensors.items()
                if key.startswith(f"{name}@")
            }
            self.moments[name] = moments

    def joined(self, other: "WorkerState | None") -> "WorkerState":
        """This state with the units that only `other` holds, if both are of the same step; nothing is copied."""
        if other is None or not other.units:
            return self
        if not self.units:
            return other
        if other.control.step != self.control.step:
            return self
        return WorkerState(
            self.num_layers, self.ties, self.control, {**other.units, **self.units}, {**other.moments, **self.moments}
        )

    def keep_only(self, indices: set[int]) -> None:
        """Forget every other unit and its moments."""
        for index in set(self.units) - indices:
            for name, _ in self.named_parameters(index):
                self.moments.pop(name, None)
            del self.units[index]


@dataclass(frozen=True, slots=True)
class UnitCodec:
    """Lays a unit out as one flat uint8 buffer. Both ends derive the layout; only the bytes travel.

    A parameter that still trains carries its moments, each after a flag that says whether the optimizer has made them
    yet.
    """

    optimizer: Optimizer
    num_layers: int
    ties: Ties = field(default_factory=Ties)

    def _slots(self, index: int, unit: nn.Module, boundary: int) -> Iterator[tuple[str, torch.Size, torch.dtype]]:
        prefix = unit_name(index, self.num_layers)
        for name, tensor in unit.state_dict().items():
            yield f"{prefix}.{name}", tensor.shape, tensor.dtype
        for name, parameter in unit.named_parameters():
            if not trains(index, name, boundary, self.ties):
                continue
            for key, (shape, dtype) in moment_shapes(self.optimizer, parameter).items():
                yield f"{prefix}.{name}@{key}", shape, dtype

    def size(self, index: int, unit: nn.Module, boundary: int) -> int:
        """Bytes of the buffer."""
        return sum(_ALIGNMENT + _padded(shape, dtype) for _, shape, dtype in self._slots(index, unit, boundary))

    def pack(self, state: WorkerState, index: int, device: torch.device) -> Tensor:
        """The unit's buffer, (size,) uint8 on `device`."""
        boundary = state.control.boundary
        unit = state.units[index]
        tensors = state.unit_tensors(index, with_moments=True)
        buffer = torch.zeros(self.size(index, unit, boundary), dtype=torch.uint8, device=device)
        offset = 0
        for name, shape, dtype in self._slots(index, unit, boundary):
            tensor = tensors.get(name)
            if tensor is not None:
                buffer[offset] = 1
                self._view(buffer, offset, shape, dtype).copy_(tensor.detach())
            offset += _ALIGNMENT + _padded(shape, dtype)
        return buffer

    def unpack(self, buffer: Tensor, index: int, unit: nn.Module, boundary: int) -> dict[str, Tensor]:
        """The tensors of a buffer, views into it, as `WorkerState.put_unit` takes them."""
        tensors = {}
        offset = 0
        for name, shape, dtype in self._slots(index, unit, boundary):
            if buffer[offset].item():
                tensors[name] = self._view(buffer, offset, shape, dtype)
            offset += _ALIGNMENT + _padded(shape, dtype)
        return tensors

    @staticmethod
    def _view(buffer: Tensor, offset: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        start = offset + _ALIGNMENT
        return buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def _padded(shape: torch.Size, dtype: torch.dtype) -> int:
    return -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
