"""Small parameters of a unit that an optimizer steps as one.

A step does a dozen operations on every tensor. A block of a transformer has ten tensors (biases, norms, in small models
its matrices too) of which each costs less than the operation itself. So those of a unit lie side by side, as do their
gradients and moments, and the optimizer sees one tensor. What everybody else sees by name are views of it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

#: Bytes from which on a tensor is worth operations of its own.
_LARGE = 1 << 16

#: The entry of an optimizer's state that has one value for a whole tensor, on the CPU wherever that is: Adam's count of
#: steps. Its shape does not tell: that of all entries of a scalar parameter is the same.
STEP_COUNT = "step"


@dataclass(frozen=True)
class Pack:
    """Parameters of one unit with the same weight decay.

    Attributes:
        parameters: by whole-model name, in the order in which they lie.
        gradient: (elements,) of all of them.
    """

    parameters: Mapping[str, nn.Parameter]
    gradient: Tensor

    def join(self) -> nn.Parameter:
        """Move the parameters into one tensor, and give that with its gradient."""
        whole = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in self.parameters.values()]))
        whole.grad = self.gradient
        for parameter, part in zip(self.parameters.values(), self._parts(whole.detach()), strict=True):
            parameter.data = part
        return whole

    def join_moments(self, moments: Mapping[str, dict[str, Tensor]]) -> dict[str, Tensor]:
        """Move their moments, which all of them have, into one tensor an entry, and give those. What has one value for
        a whole tensor is the same for all."""
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
    """Names of a unit's parameters, those side by side that may be packed: large ones alone, then small ones by decay.

    Args:
        parameters: by name.
        no_decay: names of those that weight decay leaves alone.
    """
    small = {name for name, parameter in parameters.items() if parameter.nbytes < _LARGE}
    # Vectors come last: a matrix wants to be aligned.
    by_size = sorted(small, key=lambda name: (-parameters[name].numel(), name))
    packs = [[name for name in by_size if (name in no_decay) is without] for without in (False, True)]
    return [*([name] for name in parameters if name not in small), *(pack for pack in packs if pack)]
