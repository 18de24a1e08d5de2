"""The attention that models of transformers compute here: masks from the micro-batch's lengths, keyed dropout.

Only hidden states travel between stages, so a layer gets no mask; it knows the micro-batch's context instead.
"""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from ..context import current_micro_batch
from ..dropout import keyed_dropout

#: What a configuration's `_attn_implementation` says.
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
    **_: object,
) -> tuple[Tensor, None]:
    """As transformers calls an attention function.

    Args:
        module: the attention layer. It has `is_causal`, and `randomness` (seed, place) where `dropout` is not 0.
        query: (micro-batch, heads, positions, head size).
        key: as query, with heads of which each may serve several of the query's.
        value: as key.
        attention_mask: None; nobody could give one.

    Returns:
        (micro-batch, positions, heads, head size), and no weights.
    """
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    causal = bool(module.is_causal)
    lengths = current_micro_batch().lengths
    positions = torch.arange(key.shape[2], device=key.device)
    mask = None
    if not causal and lengths is not None:  # padding is at the end, where no causal query that counts looks
        mask = (positions < lengths[:, None])[:, None, None, :]
    if dropout == 0.0:
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scaling
        )
    else:
        scores = query @ key.transpose(2, 3) * (1 / math.sqrt(query.shape[-1]) if scaling is None else scaling)
        if causal:
            mask = positions[None, :] <= positions[:, None]
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        seed, place = cast(tuple[int, int], module.randomness)
        mixed = keyed_dropout(scores.softmax(dim=-1), dropout, seed=seed, place=place) @ value
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)
