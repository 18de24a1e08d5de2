"""The committed state of one worker: the units that it holds, their optimizer moments and the control state."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipetransformer.errors import SpecError
from pipetransformer.freeze.boundary import apply_boundary, trains
from pipetransformer.models import Ties, unit_name
from pipetransformer.models.off_device import bring_back, bytes_off, move_off

from .control import Control
from .optimizer import Moments
from .packed_parameters import STEP_COUNT


@dataclass
class WorkerState:
    """What this worker holds of the model.

    Attributes:
        num_layers: number of layers of the model.
        ties: the parameters that units share.
        control: the control state of the job.
        units: the units that this worker's stage owns, by index.
        moments: optimizer state of their parameters, by whole-model name.
        copies: copies of frozen units that another stage owns, by index. This worker runs their forwards ahead. A copy
            is dropped when its unit, or a unit that shares a parameter with it, trains again.
    """

    num_layers: int
    ties: Ties = field(default_factory=Ties)
    control: Control = field(default_factory=Control)
    units: dict[int, nn.Module] = field(default_factory=dict)
    moments: Moments = field(default_factory=dict)
    copies: dict[int, nn.Module] = field(default_factory=dict)

    @property
    def held(self) -> dict[int, nn.Module]:
        """All units of this worker by index: those of its stage, and copies."""
        return {**self.copies, **self.units}

    def set_apart(self, copies: Iterable[int]) -> None:
        """Turn these units of the stage into copies."""
        for index in copies:
            self.copies[index] = self.units.pop(index)

    def named_parameters(self, index: int) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of a unit of this worker, with their whole-model names."""
        prefix = unit_name(index, self.num_layers)
        for name, parameter in self.held[index].named_parameters():
            yield f"{prefix}.{name}", parameter

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this worker's stage that train, with their whole-model names."""
        for index in sorted(self.units):
            prefix = unit_name(index, self.num_layers)
            for name, parameter in self.units[index].named_parameters():
                if trains(index, name, self.control.boundary, self.ties):
                    yield f"{prefix}.{name}", parameter

    def apply_boundary(self) -> None:
        """Freeze this worker's units below `control.boundary`, and let the others train. A parameter that freezes loses
        its moments, and a copy that no longer stays frozen is dropped."""
        apply_boundary(self.held, self.control.boundary, self.ties)
        for index in self.held:
            for name, parameter in self.named_parameters(index):
                if not parameter.requires_grad:
                    self.moments.pop(name, None)
        for index, copy in list(self.copies.items()):
            if copy.training or any(parameter.requires_grad for parameter in copy.parameters()):
                del self.copies[index]

    def keep_off_device(self, off: Collection[int], device: torch.device) -> int:
        """Move the units `off` to host memory, and all other units to the device. A unit that shares a parameter with a
        unit that trains stays on the device, because the parameter changes.

        Returns:
            Bytes of the units that are in host memory now.
        """
        resident = []
        for index, unit in self.held.items():
            if index in off and not any(parameter.requires_grad for parameter in unit.parameters()):
                move_off(unit, device)
            else:
                resident.append(unit)
        for unit in resident:  # last, once the other units have freed their memory
            bring_back(unit, device)
        return bytes_off(self.held.values())

    def drop_units(self) -> None:
        """Drop all units with their moments. The control state stays."""
        self.units.clear()
        self.copies.clear()
        self.moments.clear()

    def take_over(self, control: Control) -> None:
        """Take over the control state of other workers. They are at the same committed step, but may have decided
        since, for example to freeze layers."""
        self.control = control
        self.apply_boundary()

    def unit_tensors(self, index: int, *, with_moments: bool) -> dict[str, Tensor]:
        """A unit's parameters and buffers by whole-model name. `with_moments`, also its moments, by `NAME@KEY`."""
        prefix = unit_name(index, self.num_layers)
        tensors = {f"{prefix}.{name}": tensor for name, tensor in self.held[index].state_dict().items()}
        if with_moments:
            for name, _ in self.named_parameters(index):
                for key, tensor in self.moments.get(name, {}).items():
                    tensors[f"{name}@{key}"] = tensor
        return tensors

    def put_unit(self, index: int, unit: nn.Module, tensors: dict[str, Tensor]) -> None:
        """Add a unit to this worker's stage, with these tensors. Nothing is copied.

        Args:
            index: the unit's index.
            unit: the unit; may be on the meta device.
            tensors: tensors on the training device, by the names of `unit_tensors`. The unit owns them from now on.

        Raises:
            ValueError: a parameter or buffer of the unit is missing or has another shape.
            SpecError: a complex tensor was saved without its imaginary part.
        """
        prefix = unit_name(index, self.num_layers)
        for name, wanted in unit.state_dict().items():
            given = tensors.get(f"{prefix}.{name}")
            if given is None:
                raise ValueError(f"state of {prefix} has no {name}")
            if given.shape != wanted.shape:
                raise ValueError(f"{name} of {prefix} is {tuple(given.shape)} and not {tuple(wanted.shape)}")
            if given.is_complex() != wanted.is_complex():
                raise SpecError(
                    "spec.checkpoint.location",
                    f"{prefix}.{name} has lost its imaginary part in this checkpoint: start from the beginning",
                )
        parameters: dict[int, nn.Parameter] = {}
        for name, old in list(unit.named_parameters(remove_duplicate=False)):
            new = parameters.setdefault(id(old), nn.Parameter(tensors[f"{prefix}.{name}"], old.requires_grad))
            _set(unit, name, new)
        for name, _ in list(unit.named_buffers(remove_duplicate=False)):
            if f"{prefix}.{name}" in tensors:
                _set(unit, name, tensors[f"{prefix}.{name}"])
        self.units[index] = unit
        for name, _ in self.named_parameters(index):
            entries = {
                key.removeprefix(f"{name}@"): tensor for key, tensor in tensors.items() if key.startswith(f"{name}@")
            }
            self.moments[name] = {key: tensor.cpu() if key == STEP_COUNT else tensor for key, tensor in entries.items()}

    def joined(self, other: "WorkerState | None") -> "WorkerState":
        """This state, together with the units that only `other` has if both are at the same `Control.point`. If this
        state has no units, `other`. Nothing is copied."""
        if other is None or not other.units:
            return self
        if not self.units:
            return other
        if other.control.point != self.control.point:
            return self
        return WorkerState(
            self.num_layers,
            self.ties,
            self.control,
            {**other.units, **self.units},
            {**other.moments, **self.moments},
            {**other.copies, **self.copies},
        )


def _set(unit: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(unit.get_submodule(owner), attribute, tensor)
