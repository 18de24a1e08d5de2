"""Casts a model to the type that it trains in."""

import torch
from torch import Tensor, nn


def cast(unit: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a unit's floating-point tensors to `dtype`, in place. Complex tensors, such as tables of rotations, become
    complex tensors of the same width; `nn.Module.to` would keep only their real part."""

    def convert(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(dtype.to_complex()).resolve_conj()
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    unit._apply(convert)  # type: ignore[no-untyped-call]
    return unit
