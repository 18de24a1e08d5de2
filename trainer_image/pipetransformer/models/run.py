"""Runs a unit's forward in the job's precision, with or without activation checkpointing."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .context import MicroBatchContext, set_micro_batch
from .randomness.draws import drawing


class _NoLeaf(torch.autograd.Function):
    """Returns a tensor with the memory of a leaf, but which a unit may change in place. Autograd forbids that for a
    leaf, and a received activation is a leaf because its gradient is needed."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        return gradient


def run_unit(unit: nn.Module, x: Tensor, context: MicroBatchContext) -> Tensor:
    """Run a unit on its input `x`, for the micro-batch of `context`. Returns its output.

    With `context.autocast`, matrix products are computed in that type, weights keep their type, and activations between
    units are float32. With `context.recompute`, a unit that trains keeps only its input and runs its forward again in
    its backward (activation checkpointing; Chen et al., 2016). A unit may change `x` in place, except with `recompute`.

    Raises:
        SpecError: the unit draws random numbers that would depend on the layout, or changes a parameter or a buffer.
    """
    if x.is_leaf and x.requires_grad:
        x = _NoLeaf.apply(x)  # type: ignore[no-untyped-call]
    set_micro_batch(context)
    if context.recompute and torch.is_grad_enabled():
        output: Tensor = checkpoint(_forward_again, unit, x, context, use_reentrant=False)
        return output
    context.draws.clear()
    context.kept.clear()
    return _forward(unit, x, context)


def _forward_again(unit: nn.Module, x: Tensor, context: MicroBatchContext) -> Tensor:
    set_micro_batch(context.before_unit())  # other micro-batches ran since its first forward
    return _forward(unit, x, context)


def _forward(unit: nn.Module, x: Tensor, context: MicroBatchContext) -> Tensor:
    with drawing(unit, x.device):
        if context.autocast is None:
            return unit(x)  # type: ignore[no-any-return]
        with torch.autocast(x.device.type, dtype=context.autocast):
            output: Tensor = unit(x)
    # Anything else is wrong. It stays as it is, so that the caller's error names it.
    return output.float() if isinstance(output, Tensor) and output.is_floating_point() else output
