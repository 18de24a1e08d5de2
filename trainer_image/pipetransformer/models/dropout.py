"""Dropout whose mask belongs to the sample and not to the process.

A mask is drawn from (seed, step, sample, place), so a run that moves layers and samples between workers drops what
one that stays drops, and no random state has to be carried.
"""

import hashlib

import torch
from torch import Tensor, nn

from .context import current_micro_batch


def key(*parts: int) -> int:
    """A 63-bit seed that depends on every part."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def keyed_dropout(x: Tensor, p: float, *, seed: int, place: int) -> Tensor:
    """Zeroes elements of (micro-batch, ...) with probability `p` and scales the rest by 1/(1-p), by a mask for each
    sample.

    `place` is unique in the model. The step and the samples come from the micro-batch's context; a place that draws
    several times in one forward gets other masks each time.
    """
    context = current_micro_batch()
    if len(context.sample_ids) != x.shape[0]:
        raise RuntimeError(f"a batch of {x.shape[0]} in a micro-batch of {len(context.sample_ids)} samples")
    draw = context.draws[place]
    context.draws[place] += 1
    masks = []
    for sample_id in context.sample_ids:
        generator = torch.Generator().manual_seed(key(seed, context.step, sample_id, place, draw))
        masks.append(torch.rand(x.shape[1:], generator=generator) >= p)
    return x * torch.stack(masks).to(device=x.device, dtype=x.dtype) / (1.0 - p)


class KeyedDropout(nn.Module):
    """`keyed_dropout` in training, nothing in evaluation."""

    def __init__(self, p: float, *, seed: int, place: int) -> None:
        super().__init__()
        self.p = p
        self.seed = seed
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        return keyed_dropout(x, self.p, seed=self.seed, place=self.place)
