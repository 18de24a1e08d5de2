"""A small model whose blocks draw by functions, as much code for PyTorch does, and not by modules."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetransformer.data import DataInfo
from pipetransformer.models import PipelineModel

LENGTH = 5
HIDDEN = 8


class Block(nn.Module):
    """As nanoGPT's attention, with the stochastic depth of torchvision, and that of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        p = 0.3 if self.training else 0.0
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        added = functional.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.2, self.training)
        if self.training:
            added = added * torch.empty(len(x), 1, 1, dtype=x.dtype).bernoulli_(0.8) / 0.8
            added = added * (0.9 + torch.rand((len(x), 1, 1), dtype=x.dtype)).floor()
        return x + added


class Embedding(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        return functional.dropout(self.tokens(ids), 0.1, self.training)


def make_model(info: DataInfo, num_layers: int = 6) -> PipelineModel:
    blocks: list[nn.Module] = [Block() for _ in range(num_layers)]
    return PipelineModel(Embedding(info.vocab_size), blocks, nn.Linear(HIDDEN, info.vocab_size), (LENGTH, HIDDEN))
