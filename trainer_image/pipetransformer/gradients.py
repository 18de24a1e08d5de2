"""Reduction of gradients: sums over the workers that hold the same stage, one flat buffer a unit, and of a parameter
that several units share over the workers that hold any of them."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .elastic.groups import GenerationGroups
from .layout import StageLayout
from .state import WorkerState


def reduce_gradients(state: WorkerState, layout: StageLayout, groups: GenerationGroups) -> list[float]:
    """Sum the gradients of all that this worker holds over all who hold it, in place.

    Returns:
        Squared norm of the sum for each unit of the model: zero for units held elsewhere, and on all pipelines but the
        first, so that the sum over all workers counts every parameter once. A tied parameter counts in its last unit.
    """
    norms = [0.0] * (state.num_layers + 2)
    assert groups.data_parallel is not None
    for index in layout.span:
        own = [p for name, p in state.units[index].named_parameters() if state.ties.find(index, name) is None]
        norms[index] = reduce_unit_gradients(own, groups.data_parallel)
    for tie in state.ties.all:
        copies = [state.units[unit].get_parameter(name) for unit, name in tie.places if unit in layout.span]
        if copies:
            square_norm = reduce_tied_gradients(copies, groups.tied[tie.stages(layout.spans)])
            norms[tie.last_unit] += square_norm if tie.last_unit in layout.span else 0.0
    return norms if layout.pipeline == 0 else [0.0] * len(norms)


def reduce_tied_gradients(copies: Sequence[nn.Parameter], group: dist.ProcessGroup) -> float:
    """Give all copies of one parameter the sum of their gradients, at least in float32. Returns its squared norm.

    Args:
        copies: those that this worker holds.
        group: the workers that hold any.
    """
    if not copies[0].requires_grad:
        return 0.0
    total = torch.zeros_like(copies[0], dtype=torch.promote_types(copies[0].dtype, torch.float32))
    for copy in copies:
        if copy.grad is not None:
            total += copy.grad
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    for copy in copies:
        copy.grad = total.to(copy.dtype, copy=True)
    return float(total.double().square().sum())


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
