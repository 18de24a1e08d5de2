"""A small language model whose embedding is its output projection, and token data for it; workers import both."""

import torch
from torch import Tensor, nn

from pipetransformer.data import DataInfo, Dataset, TensorSplit
from pipetransformer.models import PipelineModel

LENGTH = 5
VOCABULARY = 11
HIDDEN = 8


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Parameter(torch.randn(LENGTH, HIDDEN))

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions  # type: ignore[no-any-return]


class Block(nn.Module):
    """Mixes a position with the mean of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mix = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        before = normed.cumsum(1) / torch.arange(1, LENGTH + 1, dtype=x.dtype, device=x.device).unsqueeze(1)
        return x + torch.tanh(self.mix(torch.cat([normed, before], dim=-1)))


class Head(nn.Module):
    def __init__(self, tokens: nn.Embedding) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.output = nn.Linear(HIDDEN, VOCABULARY)
        self.output.weight = tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))  # type: ignore[no-any-return]


def make_model(info: DataInfo, num_layers: int = 6) -> PipelineModel:
    embedding = Embedding()
    blocks: list[nn.Module] = [Block() for _ in range(num_layers)]
    return PipelineModel(embedding, blocks, Head(embedding.tokens), (LENGTH, HIDDEN))


def make_data(path: str, dtype: torch.dtype) -> Dataset:
    """Sums modulo the vocabulary; the last target of every third sample is missing."""
    start = torch.arange(150).unsqueeze(1)
    tokens = (start * 7 + torch.arange(LENGTH + 1) * (start % 4 + 1)) % VOCABULARY
    targets = tokens[:, 1:].clone()
    targets[::3, -1] = -100
    train, test = (TensorSplit(tokens[rows, :-1], targets[rows]) for rows in (slice(0, 120), slice(120, 150)))
    return Dataset(train, test, DataInfo((LENGTH,), VOCABULARY, VOCABULARY))
