"""Units of the measured models: an embedding, layers and a head. Random weights do: times do not depend on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """A kind of transformer.

    Attributes:
        hidden: width of a layer.
        heads: attention heads.
        mlp: width of the MLP's hidden layer.
        tokens: positions of a sample.
        layers: number of layers of the whole model.
        causal: whether a position sees only earlier ones.
        vocabulary: number of tokens; 0 for pictures.
        classes: outputs of the head; with `causal` each position has them, otherwise the first one alone.
        patch: side of a patch in pixels, of a picture with three colours; 0 for text.
    """

    hidden: int
    heads: int
    mlp: int
    tokens: int
    layers: int
    causal: bool = False
    vocabulary: int = 0
    classes: int = 1000
    patch: int = 0


#: ViT-B/16 (Dosovitskiy et al., 2021), BERT-large (Devlin et al., 2019), the 1.3 B model of GPT-3 (Brown et al., 2020).
SHAPES = {
    "vit-base": Shape(768, 12, 3072, 197, 12, patch=16),
    "bert-large": Shape(1024, 16, 4096, 128, 24, vocabulary=30522, classes=2),
    "decoder-1.3b": Shape(2048, 16, 8192, 1024, 24, causal=True, vocabulary=50257, classes=50257),
}
#: all-MiniLM-L6-v2, a BERT of 22.7 million parameters.
MINILM = Shape(384, 12, 1536, 128, 6, vocabulary=30522, classes=15)
#: Shapes for a CPU and for tests.
TINY = {
    "vit-base": Shape(32, 2, 64, 5, 2, patch=4),
    "bert-large": Shape(32, 2, 64, 8, 2, vocabulary=50, classes=2),
    "decoder-1.3b": Shape(32, 2, 64, 8, 2, causal=True, vocabulary=50, classes=50),
}
TINY_MINILM = Shape(32, 2, 64, 8, 2, vocabulary=50, classes=3)


class Pictures(nn.Module):
    """Patches of pictures (samples, 3, side, side), and a token before them: (samples, tokens, hidden)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, shape.hidden, shape.patch, stride=shape.patch)
        self.first = nn.Parameter(torch.zeros(1, 1, shape.hidden))
        self.positions = nn.Parameter(torch.zeros(1, shape.tokens, shape.hidden))

    def forward(self, pictures: Tensor) -> Tensor:
        patches = self.patches(pictures).flatten(2).transpose(1, 2)
        return torch.cat([self.first.expand(len(patches), -1, -1), patches], dim=1) + self.positions


class Words(nn.Module):
    """Embeds tokens (samples, tokens): (samples, tokens, hidden)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Parameter(torch.zeros(1, shape.tokens, shape.hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.words(tokens)
        return embedded + self.positions


class Layer(nn.Module):
    """A transformer block, norms first: (samples, tokens, hidden) to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.causal = shape.heads, shape.causal
        self.before, self.after = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.projected = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.joined = nn.Linear(shape.hidden, shape.hidden)
        self.wide, self.narrow = nn.Linear(shape.hidden, shape.mlp), nn.Linear(shape.mlp, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        parts = self.projected(self.before(x)).view(samples, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=self.causal)
        x = x + self.joined(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.narrow(functional.gelu(self.wide(self.after(x))))
        return out


class Head(nn.Module):
    """Outputs (samples, tokens, classes) of a causal model, (samples, classes) of another."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.causal = shape.causal
        self.norm, self.out = nn.LayerNorm(shape.hidden), nn.Linear(shape.hidden, shape.classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.norm(x if self.causal else x[:, 0]))
        return outputs


def embedding(shape: Shape) -> nn.Module:
    """The unit that reads samples."""
    return Pictures(shape) if shape.patch else Words(shape)


def samples_of(shape: Shape, count: int, device: torch.device) -> Tensor:
    """Random samples as the embedding reads them."""
    if shape.patch:
        side = shape.patch * round((shape.tokens - 1) ** 0.5)
        return torch.randn(count, 3, side, side, device=device)
    return torch.randint(shape.vocabulary, (count, shape.tokens), device=device)


def activations(shape: Shape, count: int, device: torch.device) -> Tensor:
    """Random outputs of a layer."""
    return torch.randn(count, shape.tokens, shape.hidden, device=device)


def whole(shape: Shape, device: torch.device) -> list[nn.Module]:
    """All units of the model."""
    units: Sequence[Callable[[], nn.Module]] = [
        lambda: embedding(shape),
        *[lambda: Layer(shape)] * shape.layers,
        lambda: Head(shape),
    ]
    with device:
        return [unit() for unit in units]
