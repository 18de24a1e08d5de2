"""A small regression whose model and data are plain arrays, so that another program can compute the same."""

import numpy as np
import torch
from torch import Tensor, nn

from pipetransformer import DataInfo, Dataset, PipelineModel
from pipetransformer.data.dataset import TensorSplit

INPUTS, WIDTH, OUTPUTS, SAMPLES = 5, 6, 3, 96


def arrays(num_layers: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Weight (inputs, outputs) and bias of each unit."""
    draw = np.random.default_rng(1)
    sizes = [(INPUTS, WIDTH), *[(WIDTH, WIDTH)] * num_layers, (WIDTH, OUTPUTS)]
    return [(draw.normal(size=size) / np.sqrt(size[0]), draw.normal(size=size[1]) / 4) for size in sizes]


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets."""
    draw = np.random.default_rng(2)
    return draw.normal(size=(SAMPLES, INPUTS)), draw.normal(size=(SAMPLES, OUTPUTS))


class Affine(nn.Module):
    def __init__(self, weight: np.ndarray, bias: np.ndarray, residual: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(weight.copy()))
        self.bias = nn.Parameter(torch.from_numpy(bias.copy()))
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight + self.bias
        return x + torch.tanh(y) if self.residual else y


class Regression(PipelineModel):
    def loss(self, output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return ((output - target).square().sum(1) * weight).sum(), weight.sum()


def make_model(info: DataInfo, num_layers: int) -> PipelineModel:
    first, *inner, last = arrays(num_layers)
    return Regression(Affine(*first), [Affine(*each, residual=True) for each in inner], Affine(*last), (WIDTH,))


def make_data(path: str, dtype: torch.dtype) -> Dataset:
    inputs, targets = map(torch.from_numpy, samples())
    none = TensorSplit(inputs[:0], targets[:0])
    return Dataset(TensorSplit(inputs, targets), none, DataInfo((INPUTS,), OUTPUTS))
