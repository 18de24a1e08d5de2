"""The committed state of one worker: the units that it holds, their optimizer moments and the control state."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from pipetransformer.errors import SpecError
from pipetransformer.freeze.boundary import apply_boundary, trains
from pipetransformer.models import Ties, unit_name

from .control import Control
from .optimizer import Moments
from .packed_parameters import STEP_COUNT


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

    def go_on_from(self, control: Control) -> None:
        """Take over what others have decided after the step that this worker has committed, too."""
        self.control = control
        self.apply_boundary()

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
        """Hold `unit`, whose parameters and buffers become those that `unit_tensors` gave: nothing is copied.

        Args:
            index: of the unit.
            unit: may be on the meta device.
            tensors: on the device of training, and nobody else's from here on.

        Raises:
            ValueError: a parameter or buffer of the unit is missing, or of another shape.
            SpecError: an older trainer took its real part for a complex one.
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
                    f"{prefix}.{name} has lost its imaginary part there, as trainers before dropped it: begin anew",
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
        """This state with the units that only `other` holds, if both are of the same point; nothing is copied."""
        if other is None or not other.units:
            return self
        if not self.units:
            return other
        if other.control.point != self.control.point:
            return self
        return WorkerState(
            self.num_layers, self.ties, self.control, {**other.units, **self.units}, {**other.moments, **self.moments}
        )


def _set(unit: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(unit.get_submodule(owner), attribute, tensor)
