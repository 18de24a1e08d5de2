"""The type that a model trains in."""

import torch
from torch import Tensor, nn


def cast(unit: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The unit with all that is floating in `dtype`, in place. What is complex, such as a table of rotations, becomes
    complex of that width: `nn.Module.to` would leave its real part."""

    def convert(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(dtype.to_complex()).resolve_conj()
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    unit._apply(convert)  # type: ignore[no-untyped-call]
    return unit
