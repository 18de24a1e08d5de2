"""What a unit may know of the micro-batch that runs through it, besides the hidden states.

Only hidden states travel between stages. Every worker can read the samples, so each stage derives the rest by itself:
which samples they are (keyed randomness) and how long each is (attention masks).
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
        sample_ids: samples in the order of the batch dimension, padding included.
        lengths: (micro-batch,) leading positions of each sample that are no padding; None when nothing is padded.
        autocast: type to compute products in; None for that of the weights.
        recompute: whether units that train compute their forward again instead of keeping it for the backward.
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
        """This one as it is before a unit's forward."""
        return MicroBatchContext(
            self.step, self.sample_ids, self.lengths, self.autocast, self.recompute, memory=self.memory
        )


_current: MicroBatchContext | None = None


def set_micro_batch(context: MicroBatchContext) -> None:
    """Say which micro-batch the next forward in this process sees."""
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
