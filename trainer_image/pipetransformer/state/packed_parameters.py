"""Packs the small parameters of a unit, so that the optimizer updates them as one tensor.

An optimizer step runs a dozen operations on each tensor. A transformer layer has about ten small tensors (biases,
norms). For these, starting an operation takes longer than the operation. So the small parameters of a unit are stored
side by side, and so are their gradients and moments. The named parameters are views of that storage.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

#: Tensors of at least this size in bytes are not packed.
_LARGE = 1 << 17

#: The key of Adam's count of steps in a parameter's optimizer state. This entry is one value, and on the CPU. Its shape
#: does not tell it from others, because all entries of a scalar parameter are scalars.
STEP_COUNT = "step"


@dataclass(frozen=True)
class Pack:
    """Small parameters of one unit with the same weight decay, which are updated as one tensor.

    Attributes:
        parameters: the parameters by whole-model name, in the order of their storage.
        gradient: (elements,) the gradient of all these parameters.
    """

    parameters: Mapping[str, nn.Parameter]
    gradient: Tensor

    def join(self) -> nn.Parameter:
        """Move the parameters into one tensor. Returns it, with `gradient` as its gradient."""
        whole = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in self.parameters.values()]))
        whole.grad = self.gradient
        for parameter, part in zip(self.parameters.values(), self._parts(whole.detach()), strict=True):
            parameter.data = part
        return whole

    def join_moments(self, moments: Mapping[str, dict[str, Tensor]]) -> dict[str, Tensor]:
        """Move the moments of the parameters into one tensor for each key. Returns these tensors by key.

        Args:
            moments: moments by whole-model name. All parameters must have moments, and the same count of steps.
        """
        joined = {}
        for key, first in moments[next(iter(self.parameters))].items():
            entries = [moments[name][key] for name in self.parameters]
            joined[key] = first if key == STEP_COUNT else torch.cat([entry.flatten() for entry in entries])
            parts = [first] * len(entries) if key == STEP_COUNT else self._parts(joined[key])
            for name, part in zip(self.parameters, parts, strict=True):
                moments[name][key] = part
        return joined

    def _parts(self, whole: Tensor) -> list[Tensor]:
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        return [
            part.view_as(parameter)
            for part, parameter in zip(torch.split(whole, sizes), self.parameters.values(), strict=True)
        ]


def packing_order(parameters: Mapping[str, nn.Parameter], no_decay: Collection[str]) -> list[list[str]]:
    """Group the names of a unit's parameters for packing: each large one alone, then all small ones with weight decay,
    then all small ones without.

    Args:
        parameters: the unit's parameters by name.
        no_decay: names of the parameters without weight decay.
    """
    small = {name for name, parameter in parameters.items() if parameter.nbytes < _LARGE}
    # Vectors come last, so that matrices stay aligned.
    by_size = sorted(small, key=lambda name: (-parameters[name].numel(), name))
    packs = [[name for name in by_size if (name in no_decay) is without] for without in (False, True)]
    return [*([name] for name in parameters if name not in small), *(pack for pack in packs if pack)]
