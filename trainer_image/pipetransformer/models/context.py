"""What a unit may know about the micro-batch that runs through it, in addition to the hidden states.

Only hidden states travel between stages. Each stage derives the rest itself, because every worker can read the samples:
their ids (for keyed randomness) and their lengths (for attention masks).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MicroBatchContext:
    """One forward of one micro-batch.

    Attributes:
        step: global step, part of every random key.
        sample_ids: samples in the order of the batch dimension, including padding.
        lengths: (micro-batch,) number of leading positions of each sample that are not padding; None without padding.
        autocast: type to compute products in; None for the weights' type.
        recompute: whether units that train repeat their forward for the backward instead of keeping activations.
        draws: how often each place has drawn random numbers in the present forward of one unit.
        memory: what layers keep for later slices of the same samples, such as keys and values, by layer.
    """

    step: int
    sample_ids: Sequence[int]
    lengths: Tensor | None = None
    autocast: torch.dtype | None = None
    recompute: bool = False
    draws: dict[int, int] = field(default_factory=dict)
    memory: dict[int, list[Tensor]] = field(default_factory=dict)

    def before_draws(self) -> "MicroBatchContext":
        """A copy as before a unit's forward: without draws."""
        return MicroBatchContext(
            self.step, self.sample_ids, self.lengths, self.autocast, self.recompute, memory=self.memory
        )


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
