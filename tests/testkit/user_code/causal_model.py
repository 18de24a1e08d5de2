"""A small causal language model with attention, dropout and a tied output, which runs slices of tokens, and padded
token data of two lengths for it; workers import both."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetransformer import DataInfo, Dataset, PipelineModel, current_micro_batch, with_earlier

LENGTHS = (7, 16)
VOCABULARY = 11
HIDDEN, HEADS = 8, 2


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(LENGTHS[-1], HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        places = current_micro_batch().places(ids.shape[1], ids.device)
        return self.tokens(ids) + self.positions(places)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        key, value = with_earlier(self, key, value, dim=2)
        places = current_micro_batch().places(x.shape[1], x.device)
        mask = places[:, None] >= torch.arange(key.shape[2], device=x.device)
        dropout = self.dropout.p if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        return x + self.dropout(torch.tanh(self.out(mixed.transpose(1, 2).flatten(2))))  # type: ignore[no-any-return]


class Head(nn.Module):
    def __init__(self, tokens: nn.Embedding) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.output = nn.Linear(HIDDEN, VOCABULARY)
        self.output.weight = tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))  # type: ignore[no-any-return]


def make_model(info: DataInfo, num_layers: int = 6, dropout: float = 0.1) -> PipelineModel:
    embedding = Embedding()
    blocks: list[nn.Module] = [Block(dropout) for _ in range(num_layers)]
    return PipelineModel(embedding, blocks, Head(embedding.tokens), (LENGTHS[-1], HIDDEN), slices_tokens=True)


class Rows:
    """Sums modulo the vocabulary, of 4 to 16 tokens. Padding has no target."""

    def __init__(self, start: int, stop: int) -> None:
        first = torch.arange(start, stop).unsqueeze(1)
        tokens = (first * 7 + torch.arange(LENGTHS[-1] + 1) * (first % 4 + 1)) % VOCABULARY
        self.used = 4 + (first.squeeze(1) * 5) % (LENGTHS[-1] - 3)
        padding = torch.arange(LENGTHS[-1]) >= self.used.unsqueeze(1)
        self.inputs, self.targets = tokens[:, :-1].masked_fill(padding, 0), tokens[:, 1:].masked_fill(padding, -100)

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self.inputs[list(ids)], self.targets[list(ids)]

    def lengths(self, ids: Sequence[int]) -> Tensor:
        return self.used[list(ids)]


def make_data(path: str, dtype: torch.dtype) -> Dataset:
    """As an imported dataset."""
    info = DataInfo((LENGTHS[-1],), VOCABULARY, VOCABULARY, lengths=LENGTHS)
    return Dataset(Rows(0, 120), Rows(120, 150), info)
