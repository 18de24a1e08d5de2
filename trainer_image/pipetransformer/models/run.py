"""How a unit's forward runs: in which precision, and what it keeps for its backward."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .context import MicroBatchContext, current_micro_batch, set_micro_batch
from .randomness.draws import drawing


class _NoLeaf(torch.autograd.Function):
    """The same memory as no leaf and no view of one: what came from another worker is a leaf, for its gradient, and
    autograd lets nobody change one."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        return gradient


def run_unit(unit: nn.Module, x: Tensor) -> Tensor:
    """The unit's output for the current micro-batch, whose context says how to compute.

    With an `autocast` type, products are computed in it from weights that stay as they are, and what travels between
    units is float32, whatever the cut. With `recompute`, a unit that trains keeps only its input, and computes its
    forward again when its backward comes (activation checkpointing; Chen et al., 2016). Another unit
    may change its input in place, wherever the model is cut; one whose forward is computed again may not.

    Raises:
        SpecError: the unit draws random numbers that are not keyed.
    """
    if x.is_leaf and x.requires_grad:
        x = _NoLeaf.apply(x)  # type: ignore[no-untyped-call]
    context = current_micro_batch()
    if context.recompute and torch.is_grad_enabled():
        output: Tensor = checkpoint(_forward_again, unit, x, context, use_reentrant=False)
        return output
    context.draws.clear()
    return _forward(unit, x, context)


def _forward_again(unit: nn.Module, x: Tensor, context: MicroBatchContext) -> Tensor:
    set_micro_batch(context.before_draws())  # when it runs again, others have been current
    return _forward(unit, x, context)


def _forward(unit: nn.Module, x: Tensor, context: MicroBatchContext) -> Tensor:
    with drawing(unit, x.device):
        if context.autocast is None:
            return unit(x)  # type: ignore[no-any-return]
        with torch.autocast(x.device.type, dtype=context.autocast):
            return unit(x).float()  # type: ignore[no-any-return]
