"""The micro-batch context: what a unit may use in its forward in addition to the hidden states.

Only hidden states are sent between stages. Each worker makes the context itself, because all workers know the samples
of a micro-batch: their ids (random draws depend on them) and their lengths (for attention masks).
"""

import threading
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
    """The context of a micro-batch, or of a slice of its tokens, in forwards.

    Attributes:
        step: step of the job. Random draws depend on it.
        sample_ids: samples in the order of the batch dimension, including samples that only pad the micro-batch.
        lengths: (micro-batch,) number of leading positions of each sample that are not padding; None without padding.
        autocast: type to compute matrix products in; None for the weights' type.
        recompute: whether units that train run their forward again for the backward, in place of keeping activations.
        tokens: the positions of this forward, if it runs a slice of each sample; None for all positions.
        memory: what layers keep for later slices of the same samples (`slices.with_earlier`). All slices of a
            micro-batch share it.
        sample_keys: (micro-batch,) keys of the samples' random draws, by the job's seed and device, once one is made.
        draws: how often each place in the code has drawn random numbers in the current forward of a unit.
        kept: how often each layer has used `memory` in the current forward of a unit.
    """

    step: int
    sample_ids: Sequence[int]
    lengths: Tensor | None = None
    autocast: torch.dtype | None = None
    recompute: bool = False
    tokens: TokenSlice | None = None
    memory: dict[Any, Any] = field(default_factory=dict)
    sample_keys: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)
    draws: dict[int, int] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)

    def before_unit(self) -> "MicroBatchContext":
        """A copy for the start of a unit's forward: its `draws` and `kept` are empty."""
        return replace(self, draws={}, kept={})

    def of_samples(self, some: slice) -> "MicroBatchContext":
        """The context of a micro-batch of only some of the samples, at the start of a unit's forward."""
        lengths = None if self.lengths is None else self.lengths[some]
        ids = self.sample_ids[some]
        return replace(self, sample_ids=ids, lengths=lengths, memory={}, sample_keys={}, draws={}, kept={})

    def in_slices(self, lengths: Sequence[int]) -> "list[MicroBatchContext]":
        """The contexts of slices with these lengths in tokens; they share `memory`. Without lengths, only this one."""
        if not lengths:
            return [self]
        total = sum(lengths)
        slices = [TokenSlice(start, stop, total) for start, stop in pairwise(accumulate(lengths, initial=0))]
        return [replace(self, tokens=tokens, draws={}, kept={}) for tokens in slices]

    def places(self, count: int, device: torch.device) -> Tensor:
        """(count,) the positions that this forward runs, counted from the start of the whole samples."""
        start = 0 if self.tokens is None else self.tokens.start
        return torch.arange(start, start + count, device=device)


#: Of each thread, because a program's callback may run a finished model while this process trains.
_of_thread = threading.local()


def set_micro_batch(context: MicroBatchContext) -> None:
    """Set the context that `current_micro_batch` returns in this thread from now on."""
    _of_thread.context = context


def current_micro_batch() -> MicroBatchContext:
    """The context of the micro-batch whose forward runs now.

    Raises:
        RuntimeError: `set_micro_batch` was not called.
    """
    context: MicroBatchContext | None = getattr(_of_thread, "context", None)
    if context is None:
        raise RuntimeError("set_micro_batch was not called")
    return context
