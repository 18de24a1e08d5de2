"""Dropout whose mask belongs to the sample and not to the process.

A mask is drawn from (seed, step, sample, place), so a run that moves layers and samples between workers drops what
one that stays drops, and no random state has to be carried.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class _Context:
    step: int
    sample_ids: tuple[int, ...]


_current: _Context | None = None


def set_dropout_context(step: int, sample_ids: Sequence[int]) -> None:
    """Say which samples the next forward of a micro-batch in this process sees, padding included."""
    global _current
    _current = _Context(step, tuple(sample_ids))


def key(*parts: int) -> int:
    """A 63-bit seed that depends on every part."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class KeyedDropout(nn.Module):
    """Zeroes elements of (micro-batch, ...) with probability `p` and scales the rest by 1/(1-p), by a mask for each
    sample.

    `place` is unique in the model. The step and the samples come from `set_dropout_context`.
    """

    def __init__(self, p: float, *, seed: int, place: int) -> None:
        super().__init__()
        self.p = p
        self.seed = seed
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        if _current is None or len(_current.sample_ids) != x.shape[0]:
            raise RuntimeError("set_dropout_context was not called for this micro-batch")
        masks = [self._mask(_current.step, sample_id, x.shape[1:]) for sample_id in _current.sample_ids]
        return x * torch.stack(masks).to(device=x.device, dtype=x.dtype) / (1.0 - self.p)

    def _mask(self, step: int, sample_id: int, shape: torch.Size) -> Tensor:
        generator = torch.Generator().manual_seed(key(self.seed, step, sample_id, self.place))
        return torch.rand(shape, generator=generator) >= self.p
