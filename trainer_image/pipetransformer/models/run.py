"""Runs a unit's forward in the job's precision, with or without activation checkpointing."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .context import MicroBatchContext, set_micro_batch
from .randomness.draws import drawing


class _NoLeaf(torch.autograd.Function):
    """Turns a leaf into a tensor of the same memory that may be changed in place. A received activation is a leaf,
    because its gradient is needed, and autograd forbids in-place changes of leaves."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        return gradient


def run_unit(unit: nn.Module, x: Tensor, context: MicroBatchContext) -> Tensor:
    """The unit's output for the micro-batch of `context`.

    With an `autocast` type, products are computed in that type, weights keep theirs, and activations between units are
    float32. With `recompute`, a unit that trains keeps only its input and repeats its forward in its backward
    (activation checkpointing; Chen et al., 2016). A unit may change its input in place, except with `recompute`.

    Raises:
        SpecError: the unit draws random numbers that are not keyed.
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
    set_micro_batch(context.before_unit())  # other micro-batches ran before the repetition
    return _forward(unit, x, context)


def _forward(unit: nn.Module, x: Tensor, context: MicroBatchContext) -> Tensor:
    with drawing(unit, x.device):
        if context.autocast is None:
            return unit(x)  # type: ignore[no-any-return]
        with torch.autocast(x.device.type, dtype=context.autocast):
            return unit(x).float()  # type: ignore[no-any-return]
