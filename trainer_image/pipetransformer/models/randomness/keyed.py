"""Replaces torch's dropout by keyed dropout in any model, because torch's draws from the process's random state."""

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetransformer.models.model import PipelineModel

from .draws import key_draws
from .dropout import KeyedDropout, keyed_dropout, softmax_of

_PLACES_PER_UNIT = 1 << 20


def with_keyed_dropout(model: PipelineModel, *, seed: int) -> PipelineModel:
    """The model with keyed dropout in all units. A unit that shares a module with an earlier unit becomes a copy, so
    that the two draw at different places."""
    units: dict[int, nn.Module] = {}
    seen: set[nn.Module] = set()
    for index, unit in enumerate(model.units):
        modules = set(unit.modules())
        units[index] = copy.deepcopy(unit) if seen & modules else unit
        seen |= modules
    return model.with_units(
        {index: key_unit(unit, index, model.unit_name(index), seed=seed) for index, unit in units.items()}
    )


def key_unit(unit: nn.Module, index: int, name: str, *, seed: int) -> nn.Module:
    """Key the dropout modules of a unit, and the random draws of its code. Returns the unit that replaces it."""
    unit = key_dropout(unit, index, seed=seed)
    key_draws(unit, name, seed=seed, place=place_of(index, _PLACES_PER_UNIT - 1))
    return unit


def key_dropout(unit: nn.Module, index: int, *, seed: int) -> nn.Module:
    """Key the masks of `nn.Dropout` and `nn.MultiheadAttention` in a unit. Returns the unit that replaces it.

    Args:
        unit: the unit. It is changed in place, unless it is itself a dropout module.
        index: the unit's index in its model.
        seed: the job's seed.
    """
    for number, (path, module) in enumerate(list(unit.named_modules(remove_duplicate=False))):
        place = place_of(index, number)
        if type(module) in (nn.Dropout, _PlacedDropout):
            keyed = _PlacedDropout(module.p, seed=seed, place=place)
            if not path:
                return keyed
            unit.set_submodule(path, keyed)
        elif type(module) in (nn.MultiheadAttention, KeyedMultiheadAttention) and module.dropout:
            module.__class__ = KeyedMultiheadAttention
            object.__setattr__(module, "randomness", (seed, place))
    return unit


def is_keyed(attention: nn.MultiheadAttention) -> bool:
    """Whether the module's dropout is keyed. In a subclass it is not, because its forward is unknown."""
    return type(attention) is KeyedMultiheadAttention


class _PlacedDropout(KeyedDropout):
    """The keyed dropout that replaces a module of torch. `key_dropout` replaces it again if it meets it: a user's
    function may return the same modules twice."""


def place_of(index: int, number: int) -> int:
    """The place of the `number`-th module of a unit, unique in the model."""
    return index * _PLACES_PER_UNIT + number


class KeyedMultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` whose dropout is keyed, by its `randomness` (seed, place)."""

    randomness: tuple[int, int]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See `nn.MultiheadAttention.forward`. The batch must be the samples of the current micro-batch."""
        if not self.training:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if self.bias_k is not None or self.add_zero_attn:
            raise ValueError("MultiheadAttention with add_bias_kv or add_zero_attn cannot have dropout: set dropout=0")
        weights = self.in_proj_weight
        parts = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if weights is None else weights.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        inputs = [x if self.batch_first else x.transpose(0, 1) for x in (query, key, value)]
        q, k, v = (
            functional.linear(x, weight, bias).view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for x, weight, bias in zip(inputs, parts, biases, strict=True)
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(self.head_dim)
        if attn_mask is not None:  # (queries, keys), or (samples x heads, queries, keys)
            scores = _masked(scores, attn_mask if attn_mask.dim() == 2 else attn_mask.view_as(scores))
        if key_padding_mask is not None:
            scores = _masked(scores, key_padding_mask[:, None, None, :])
        seed, place = self.randomness
        dropped = keyed_dropout(softmax_of(scores), self.dropout, seed=seed, place=place, attention=True)
        output = self.out_proj((dropped @ v).transpose(1, 2).flatten(2))
        shown = (dropped.mean(dim=1) if average_attn_weights else dropped) if need_weights else None
        return output if self.batch_first else output.transpose(0, 1), shown


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    """Apply a mask to scores. A boolean mask hides the positions where it is true; any other mask is added."""
    return scores.masked_fill(mask, -math.inf) if mask.dtype is torch.bool else scores + mask
