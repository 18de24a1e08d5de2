"""Masks tokens of a split, which the model learns to predict (Devlin et al., 2019, section 3.1)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .dataset import NO_TARGET, Split

_MASKED, _KEPT, _REPLACED = 0.15, 0.1, 0.1


@dataclass(frozen=True)
class MaskedTokens:
    """An augmented split that masks different positions of a sample at each step. Step and sample decide which.

    15 % of the positions have a target: their original token. Of these positions 80 % hold `mask`, 10 % hold a random
    token, and 10 % keep their token.

    Attributes:
        tokens: a split whose inputs are ids below `num_ids`.
        mask: the id of the mask token.
        num_ids: number of ids to draw random tokens from.
        never: ids of tokens that are never masked, such as those at the start and end of a text.
    """

    tokens: Split
    mask: int
    num_ids: int
    never: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The samples with the masks of step 0. Held-out samples always have these."""
        return self.augmented_batch(ids, 0)

    def augmented_batch(self, ids: Sequence[int], step: int) -> tuple[Tensor, Tensor]:
        inputs = self.tokens.batch(ids)[0].clone()
        targets = torch.full_like(inputs, NO_TARGET)
        words = ~torch.isin(inputs, torch.tensor(self.never, dtype=inputs.dtype))
        for row, sample in enumerate(ids):
            generator = np.random.default_rng([step, sample])
            chosen = torch.from_numpy(generator.random(inputs.shape[1]) < _MASKED) & words[row]
            what = torch.from_numpy(generator.random(inputs.shape[1]))
            others = torch.from_numpy(generator.integers(self.num_ids, size=inputs.shape[1]))
            targets[row, chosen] = inputs[row, chosen]
            hidden, replaced = chosen & (what >= _KEPT + _REPLACED), chosen & (what < _REPLACED)
            inputs[row, hidden] = self.mask
            inputs[row, replaced] = others[replaced]
        return inputs, targets

    def augmentation_key(self, sample_id: int, step: int) -> int | None:
        """Always None, because a sample never gets the same masks twice."""
        del sample_id, step
        return None
