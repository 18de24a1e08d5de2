"""What a unit may know about the micro-batch that runs through it, in addition to the hidden states.

Only hidden states travel between stages. Each stage derives the rest itself, because every worker can read the samples:
their ids (for keyed randomness) and their lengths (for attention masks).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenSlice:
    """The positions `start` to `stop` of samples that have `total` positions."""

    start: int
    stop: int
    total: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class MicroBatchContext:
    """One forward of one micro-batch.

    Attributes:
        step: global step, part of every random key.
        sample_ids: samples in the order of the batch dimension, including padding.
        lengths: (micro-batch,) number of leading positions of each sample that are not padding; None without padding.
        autocast: type to compute products in; None for the weights' type.
        recompute: whether units that train repeat their forward for the backward instead of keeping activations.
        tokens: the positions of this forward, if it runs a slice of each sample; None for all positions.
        memory: what layers keep for later slices of the same samples (`slices.with_earlier`). All slices of a
            micro-batch share it.
        draws: how often each place has drawn random numbers in the present forward of one unit.
        kept: how often each layer has used `memory` in the present forward of one unit.
    """

    step: int
    sample_ids: Sequence[int]
    lengths: Tensor | None = None
    autocast: torch.dtype | None = None
    recompute: bool = False
    tokens: TokenSlice | None = None
    memory: dict[Any, Any] = field(default_factory=dict)
    draws: dict[int, int] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)

    def before_unit(self) -> "MicroBatchContext":
        """A copy as before a unit's forward: nothing has been drawn or kept in it."""
        return replace(self, draws={}, kept={})

    def in_slices(self, lengths: Sequence[int]) -> "list[MicroBatchContext]":
        """The contexts of the slices of these lengths, which share `memory`; this one if there are none."""
        if not lengths:
            return [self]
        total = sum(lengths)
        slices = [TokenSlice(start, stop, total) for start, stop in pairwise(accumulate(lengths, initial=0))]
        return [replace(self, tokens=tokens, draws={}, kept={}) for tokens in slices]

    def places(self, count: int, device: torch.device) -> Tensor:
        """(count,) positions, within the whole samples, of the `count` positions that this forward runs."""
        start = 0 if self.tokens is None else self.tokens.start
        return torch.arange(start, start + count, device=device)


_current: MicroBatchContext | None = None


def set_micro_batch(context: MicroBatchContext) -> None:
    """Set the micro-batch of the next forward in this process."""
    global _current
    _current = context


def current_micro_batch() -> MicroBatchContext:
    """The micro-batch of the present forward.

    Raises:
        RuntimeError: `set_micro_batch` was not called.
    """
    if _current is None:
        raise RuntimeError("set_micro_batch was not called")
    return _current
