"""Data-parallel reduction of gradients: sums over the workers that hold the same stage, one flat buffer a unit."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def reduce_unit_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> float:
    """Sum a unit's gradients over `group`, at least in float32, in place. Returns the squared norm of the sum.

    A parameter that got no gradient counts as zero, since another worker may have one.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return 0.0
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    flat = torch.cat([gradient.reshape(-1).to(dtype) for gradient in gradients])
    if group.size() > 1:
        dist.all_reduce(flat, group=group)
        _scatter(flat, gradients)
    return float(torch.dot(flat, flat)) if dtype is torch.float64 else float(flat.double().square().sum())


def _scatter(flat: Tensor, gradients: list[Tensor]) -> None:
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
