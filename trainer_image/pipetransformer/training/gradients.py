"""One buffer for the gradients of all parameters that a worker trains. Each parameter's gradient is a view of it.

Each step clears gradients, computes norms, scales, and sums over replicas. With one buffer this work touches a few
large tensors instead of hundreds of small ones. The buffer is used as long as the worker's units and boundary stay. It
may outlive the process group: a step that was voted for can still be committed after a connection broke.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from pipetransformer.models import unit_name
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.packed_parameters import Pack, packing_order
from pipetransformer.state.worker_state import WorkerState


class Gradients:
    """The gradients of the parameters that a worker trains. They are undefined until `clear` is called.

    Parameters that units share are not in the buffer. Each copy of them has its own gradient.

    Attributes:
        parameters: by unit, its trained parameters that no other unit shares. The last unit comes first, as in a
            backward.
        packs: groups of these parameters; an optimizer may step each group as one tensor. With `pack_all` each
            parameter is in a pack. A step then does not change the version counter of the parameter, so autograd
            allows a backward after the step, with the newest weights.
        of_unit: by unit, its part of the buffer, a tensor of shape (elements,). The units have the same order as in
            `parameters`, and neighbouring parts are adjacent in memory.
    """

    def __init__(
        self, state: WorkerState, layout: StageLayout, no_decay: Collection[str] = (), *, pack_all: bool = False
    ) -> None:
        self._no_decay = no_decay
        groups = {index: _own_parameters(state, index, no_decay) for index in reversed(layout.units)}
        self.parameters = {
            index: [parameter for group in some for parameter in group.values()] for index, some in groups.items()
        }
        self._shared = _shared_parameters(state, layout.units)
        trained = [parameter for parameters in self.parameters.values() for parameter in parameters]
        sizes = [parameter.numel() for parameter in trained]
        for parameter in trained:
            parameter.grad = None  # frees an older buffer before this one is made
        self._flat = trained[0].new_empty(sum(sizes)) if trained else torch.empty(0, dtype=torch.float32)
        self._views = [
            (parameter, part.view_as(parameter))
            for parameter, part in zip(trained, torch.split(self._flat, sizes), strict=True)
        ]
        packable = [group for some in groups.values() for group in some]
        parts = torch.split(self._flat, [sum(parameter.numel() for parameter in group.values()) for group in packable])
        self.packs = [
            Pack(group, part) for group, part in zip(packable, parts, strict=True) if pack_all or len(group) > 1
        ]
        units = [sum(parameter.numel() for parameter in parameters) for parameters in self.parameters.values()]
        self.of_unit = dict(zip(self.parameters, torch.split(self._flat, units), strict=True))

    @property
    def device(self) -> torch.device:
        """The device of the buffer."""
        return self._flat.device

    def serve(self, state: WorkerState, layout: StageLayout) -> bool:
        """Whether the parameters of these gradients are exactly those that `state` trains in `layout`."""
        held = [*(parameter for some in self.parameters.values() for parameter in some), *self._shared]
        trained = [
            parameter
            for index in reversed(layout.units)
            for group in _own_parameters(state, index, self._no_decay)
            for parameter in group.values()
        ]
        trained += _shared_parameters(state, layout.units)
        return [id(parameter) for parameter in held] == [id(parameter) for parameter in trained]

    def clear(self) -> None:
        """Set all gradients to zero. Call this before each step."""
        self._flat.zero_()
        for parameter, view in self._views:
            if parameter.grad is not view:  # in the first round, or when user code replaced it
                parameter.grad = view
        for parameter in self._shared:
            parameter.grad = None

    def scale(self, factor: float) -> None:
        """Multiply all gradients, including those of shared parameters."""
        self._flat.mul_(factor)
        for parameter in self._shared:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def square_norms(self) -> dict[int, float]:
        """Return the squared gradient norm of each unit, without shared parameters. Waits once for the device."""
        norms = torch.stack(torch._foreach_norm(list(self.of_unit.values())))
        return {index: norm * norm for index, norm in zip(self.of_unit, norms.tolist(), strict=True)}

    def joined(self, units: list[int]) -> Tensor:
        """Return the parts of these units as one tensor that shares their memory. They must be adjacent in
        `of_unit`."""
        parts = [self.of_unit[index] for index in units]
        start = parts[0].storage_offset()
        return self._flat[start : start + sum(part.numel() for part in parts)]


def _own_parameters(state: WorkerState, index: int, no_decay: Collection[str]) -> list[dict[str, nn.Parameter]]:
    """Return a unit's trained parameters that no other unit shares, in groups that may be packed. Keys are names in the
    whole model."""
    prefix = unit_name(index, state.num_layers)
    own = {
        f"{prefix}.{name}": parameter
        for name, parameter in state.units[index].named_parameters()
        if parameter.requires_grad and state.ties.find(index, name) is None
    }
    return [{name: own[name] for name in names} for names in packing_order(own, no_decay)]


def _shared_parameters(state: WorkerState, units: Collection[int]) -> list[nn.Parameter]:
    return [
        parameter
        for tie in state.ties.all
        for unit, name in tie.places
        if unit in units and (parameter := state.units[unit].get_parameter(name)).requires_grad
    ]
