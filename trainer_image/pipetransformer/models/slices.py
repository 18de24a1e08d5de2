"""Gives a slice of tokens the keys and values of earlier slices (TeraPipe, Li et al., 2021, section 3.2).

In a causal layer a position depends only on itself and earlier positions, for example by their keys and values. The
slices of a micro-batch run forward from first to last, so each finds what earlier slices kept. They run backward from
last to first, so each gets the gradients that later slices left for it. All of it stays on the worker.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .context import MicroBatchContext, TokenSlice, current_micro_batch


def with_earlier(module: nn.Module, *values: Tensor, dim: int) -> tuple[Tensor, ...]:
    """The values of all positions so far: those of earlier slices, followed by `values`, those of this slice.

    Without slices it returns `values`. Your own model calls it in each layer that mixes positions, usually for keys and
    values.

    Args:
        module: the layer that calls. Values are kept by layer; it may call this several times in one forward.
        values: tensors of this slice's positions that later positions need.
        dim: the dimension of positions in each of `values`.

    Returns:
        For each of `values` a tensor in which `dim` has `tokens.stop` positions.

    Raises:
        RuntimeError: an earlier slice has not run forward yet. In a backward: a later slice has not run backward yet.
        ValueError: `dim` of a tensor does not have as many positions as the slice.
    """
    context = current_micro_batch()
    if context.tokens is None:
        return values
    call = context.kept.get(id(module), 0)
    context.kept[id(module)] = call + 1
    return tuple(
        _with_earlier((id(module), call, number), value, dim, context, context.tokens)
        for number, value in enumerate(values)
    )


def _with_earlier(key: object, value: Tensor, dim: int, context: MicroBatchContext, tokens: TokenSlice) -> Tensor:
    if value.shape[dim] != len(tokens):
        raise ValueError(
            f"values of shape {tuple(value.shape)} in a slice of {len(tokens)} tokens: `dim` must be the dimension of"
            " tokens"
        )
    kept = context.memory.get(key)
    if kept is None:
        kept = context.memory[key] = _Kept(value, dim, tokens.total)
    assert isinstance(kept, _Kept)
    output: Tensor = _Append.apply(value, kept, tokens)  # type: ignore[no-untyped-call]
    repeats = context.recompute and torch.is_grad_enabled()  # then earlier slices run their forward after this one
    if tokens.stop == tokens.total and not output.requires_grad and not repeats:  # no backward will free it
        del context.memory[key]
    return output


class _Kept:
    """The values that a layer has kept of all positions so far, and the gradients that later slices left for them.

    All slices share the memory of the values, but each gets a separate tensor. Autograd forbids changes of a tensor
    that an earlier slice has saved for its backward. With separate tensors it cannot see them. They are safe, because a
    slice only writes positions that earlier slices do not read.
    """

    def __init__(self, like: Tensor, dim: int, total: int) -> None:
        shape = list(like.shape)
        shape[dim] = total
        self._values = torch.empty(shape, dtype=like.dtype, device=like.device)
        self._dim = dim
        self._filled = 0  # positions that have run forward
        self._left = total  # positions that have not run backward
        self._gradient: Tensor | None = None  # of the positions that have not run backward

    def append(self, value: Tensor, tokens: TokenSlice) -> Tensor:
        """Keep this slice's values. Returns the values of all positions up to the slice's end. A forward that is
        repeated (activation checkpointing) keeps the same values again."""
        if tokens.start > self._filled:
            raise RuntimeError(
                f"tokens {tokens.start} to {tokens.stop} ran forward, but the tokens from {self._filled} on did not yet"
            )
        self._values.narrow(self._dim, tokens.start, len(tokens)).data.copy_(value)
        self._filled = max(self._filled, tokens.stop)
        return self._values.narrow(self._dim, 0, tokens.stop).data

    def backward(self, gradient: Tensor, tokens: TokenSlice) -> Tensor:
        """The whole gradient of this slice's values.

        Args:
            gradient: what this slice's backward gives for the values of all positions up to the slice's end.
            tokens: the positions of the slice.
        """
        if tokens.stop != self._left:
            raise RuntimeError(
                f"tokens {tokens.start} to {tokens.stop} ran backward, but the tokens up to {self._left} did not yet: "
                "the last slice must come first"
            )
        if self._gradient is not None:
            gradient = gradient + self._gradient
        self._left = tokens.start
        self._gradient = gradient.narrow(self._dim, 0, tokens.start) if tokens.start else None
        if not tokens.start:
            self._values = self._values.new_empty(0)
        return gradient.narrow(self._dim, tokens.start, len(tokens))


class _Append(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, kept: _Kept, tokens: TokenSlice) -> Tensor:
        ctx.kept, ctx.tokens = kept, tokens
        return kept.append(value, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.kept.backward(gradient, ctx.tokens), None, None
