"""LoRA (Hu et al., 2021): the pretrained weights stay, and each linear layer learns a change of low rank.

The gradient passes through every layer, so LoRA saves memory and a third of the work, and forbids the cache. The
product never trains parameters that require no gradient; the embedding is named by `freeze.always`.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_RANK, _SCALE = 8, 2.0


class Adapted(nn.Module):
    """(..., in) to (..., out): a linear layer plus `scale` times a product of two narrow matrices, which starts at
    zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.empty(_RANK, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, _RANK))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + _SCALE * (x @ self.down.T) @ self.up.T  # type: ignore[no-any-return]


def adapt(blocks: Iterable[nn.Module]) -> None:
    """Give each linear layer of the blocks an adapter, in place; all other weights of the blocks become constants."""
    for block in blocks:
        for parameter in block.parameters():
            parameter.requires_grad_(False)
        for holder in list(block.modules()):
            for name, child in list(holder.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(holder, name, Adapted(child))
