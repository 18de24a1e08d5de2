"""The attention function for models of transformers: it makes masks itself, and has keyed dropout.

Only hidden states are sent between stages, so layers get no mask. The function makes it from the sample lengths in the
micro-batch's context. In a slice of tokens, a causal layer also sees the keys and values that earlier slices kept.
"""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from pipetransformer.errors import SpecError
from pipetransformer.models.context import current_micro_batch
from pipetransformer.models.randomness.dropout import keyed_dropout
from pipetransformer.models.slices import with_earlier

#: The value of a configuration's `_attn_implementation`.
NAME = "pipetransformer"


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Compute attention. transformers calls it, with the signature of its attention functions.

    Args:
        module: the attention layer. It has `is_causal`, and `randomness` (seed, place) if `dropout` is not 0.
        query: (micro-batch, heads, positions, head size).
        key: (micro-batch, heads, positions, head size). It may have fewer heads than `query`, which share them.
        value: the shape of `key`.
        attention_mask: not used, because the mask follows from the micro-batch.
        scaling: factor of the products of queries and keys; by default 1 / sqrt(head size).
        dropout: share of the attention weights to drop.
        sliding_window: number of latest positions that a query sees, including its own; None for all.
        others: further options of the layer; only those that are None or false are supported.

    Returns:
        (micro-batch, positions, heads, head size), and None in place of attention weights.

    Raises:
        SpecError: the layer passes an option that is not supported.
    """
    causal = bool(module.is_causal)
    if causal:
        key, value = with_earlier(module, key, value, dim=2)
    length = key.shape[2]
    first = length - query.shape[2]  # positions of earlier slices
    window = sliding_window if sliding_window is not None and sliding_window < length else None
    _check(module, others if causal else {**others, "sliding_window": window})
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    mask = _causal_mask(first, length, window, key.device) if causal else _padding_mask(length, key.device)
    if dropout == 0.0:
        plain = causal and window is None and not first  # kernels need no mask for this case
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=None if plain else mask, is_causal=plain, scale=scaling
        )
    else:
        scores = query @ key.transpose(2, 3) * (1 / math.sqrt(query.shape[-1]) if scaling is None else scaling)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        seed, place = cast(tuple[int, int], module.randomness)
        mixed = keyed_dropout(scores.softmax(dim=-1), dropout, seed=seed, place=place, attention=True) @ value
    return mixed.transpose(1, 2).contiguous(), None


def _causal_mask(first: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """(queries, keys) true where a query sees a key. The queries are the positions from `first` on. Padding needs no
    mask: it is at the end, so only queries of padding see it."""
    positions = torch.arange(length, device=device)
    distances = positions[first:, None] - positions[None, :]
    return distances >= 0 if window is None else (distances >= 0) & (distances < window)


def _padding_mask(length: int, device: torch.device) -> Tensor | None:
    """(micro-batch, 1, 1, positions) false at padding and true elsewhere; None if no sample is padded."""
    lengths = current_micro_batch().lengths
    if lengths is None:
        return None
    return (torch.arange(length, device=device) < lengths[:, None])[:, None, None, :]


def _check(module: nn.Module, others: dict[str, object]) -> None:
    """Check that a layer passes no options that this attention function does not support.

    Raises:
        SpecError: it does. The message names these options.
    """
    asked = [name for name, value in others.items() if value is not None and value is not False]
    if asked:
        raise SpecError(
            "spec.model.architecture",
            f"{type(module).__name__} needs attention with {', '.join(sorted(asked))}, which is not supported",
        )


AttentionInterface.register(NAME, attention)
