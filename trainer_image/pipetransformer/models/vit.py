"""A pre-norm Vision Transformer for small images (Dosovitskiy et al., 2020), without class token, pooled by mean."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetransformer.data import DataInfo
from pipetransformer.errors import SpecError
from pipetransformer_contract.spec import Model

from .randomness.dropout import KeyedDropout

_PLACES_PER_UNIT = 2


class PatchEmbedding(nn.Module):
    """(batch, channels, height, width) to (batch, tokens, hidden): linear patches plus learned positions."""

    def __init__(self, spec: Model, channels: int, num_tokens: int, seed: int) -> None:
        super().__init__()
        self.patch_size = spec.patch_size
        self.projection = nn.Linear(channels * spec.patch_size**2, spec.hidden_size)
        self.positions = nn.Parameter(torch.empty(num_tokens, spec.hidden_size))
        self.dropout = KeyedDropout(spec.dropout, seed=seed, place=0)

    def forward(self, images: Tensor) -> Tensor:
        patches = functional.unfold(images, self.patch_size, stride=self.patch_size).transpose(1, 2)
        return self.dropout(self.projection(patches) + self.positions)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Multi-head self-attention over (batch, tokens, hidden)."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.projection = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, hidden = x.shape
        query, key, value = self.qkv(x).view(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.projection(mixed.transpose(1, 2).reshape(batch, tokens, hidden))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One transformer layer: attention, then a two-layer perceptron, each with its own norm and residual."""

    def __init__(self, spec: Model, index: int, seed: int) -> None:
        super().__init__()
        first_place = (index + 1) * _PLACES_PER_UNIT
        self.norm1 = nn.LayerNorm(spec.hidden_size)
        self.attn = Attention(spec.hidden_size, spec.num_heads)
        self.dropout1 = KeyedDropout(spec.dropout, seed=seed, place=first_place)
        self.norm2 = nn.LayerNorm(spec.hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(spec.hidden_size, spec.mlp_size), nn.GELU(), nn.Linear(spec.mlp_size, spec.hidden_size)
        )
        self.dropout2 = KeyedDropout(spec.dropout, seed=seed, place=first_place + 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout1(self.attn(self.norm1(x)))
        return x + self.dropout2(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]


class Head(nn.Module):
    """(batch, tokens, hidden) to (batch, classes)."""

    def __init__(self, hidden_size: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.classifier = nn.Linear(hidden_size, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.norm(x).mean(dim=1))  # type: ignore[no-any-return]


def num_tokens(spec: Model, info: DataInfo) -> int:
    """Number of patches in an image.

    Raises:
        SpecError: the data are not images, or cannot be cut into whole patches.
    """
    if len(info.input_shape) != 3:
        raise SpecError(
            "spec.data.name", f"vit needs images (channels, height, width), not samples of {info.input_shape}"
        )
    _, height, width = info.input_shape
    if height % spec.patch_size or width % spec.patch_size:
        raise SpecError(
            "spec.model.patchSize", f"images of {height}x{width} cannot be cut into patches of {spec.patch_size}"
        )
    return (height // spec.patch_size) * (width // spec.patch_size)


def build_empty_unit(spec: Model, info: DataInfo, index: int, *, seed: int, dtype: torch.dtype) -> nn.Module:
    """Unit `index` on the meta device: with names and shapes, but without memory."""
    with torch.device("meta"):
        if index == 0:
            unit: nn.Module = PatchEmbedding(spec, info.input_shape[0], num_tokens(spec, info), seed)
        elif index <= spec.num_layers:
            unit = Block(spec, index - 1, seed)
        else:
            unit = Head(spec.hidden_size, info.num_classes)
        return unit.to(dtype)


def initialise(unit: nn.Module, generator: torch.Generator) -> None:
    """Fill the parameters of a unit: Xavier for matrices, a narrow normal for positions, the identity for norms."""
    for module in unit.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight, generator=generator)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, PatchEmbedding):
            nn.init.trunc_normal_(module.positions, std=0.02, generator=generator)
