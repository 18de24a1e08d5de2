"""A model and data for virtual devices: `model.name: benchmarks.virtual:model`, `data.name: benchmarks.virtual:data`.

The layers inside are small, so their own time is lost in the declared one; losses are real and fall.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from pipetransformer.data import DataInfo, Dataset
from pipetransformer.data.dataset import TensorSplit
from pipetransformer.models import PipelineModel

from .calibration import DEFAULT, UnitTimes, profile
from .device import Timed


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def units(times: list[UnitTimes], inputs: int, width: int, classes: int) -> list[nn.Module]:
    """Embedding, layers and head on a virtual device, with `times` in that order."""
    inner = [nn.Linear(inputs, width), *(Block(width) for _ in times[1:-1]), nn.Linear(width, classes)]
    return [Timed(module, unit) for module, unit in zip(inner, times, strict=True)]


def model(
    info: DataInfo,
    *,
    layers: int = 12,
    width: int = 16,
    kind: str = "even",
    dilate: float = 1.0,
    calibration: str = str(DEFAULT),
) -> PipelineModel:
    """A classifier of flat samples.

    Args:
        info: of the samples.
        layers: number of layers, which must be `model.numLayers`.
        width: of the small layers inside.
        kind: the profile in the file.
        dilate: makes all times so many times longer.
        calibration: the file with declared times.
    """
    times = profile(kind, Path(calibration)).units(layers, dilate)
    embedding, *blocks, head = units(times, info.input_shape[0], width, info.num_classes)
    return PipelineModel(embedding, blocks, head, (width,))


def data(
    *, path: str, dtype: torch.dtype, samples: int = 1024, held_out: int = 128, inputs: int = 16, classes: int = 4
) -> Dataset:
    """Random samples whose class a random linear map tells.

    Raises:
        ValueError: a path is given.
    """
    if path:
        raise ValueError("there is nothing to read, so the path must be empty")
    generator = torch.Generator().manual_seed(0)
    count = samples + held_out
    rows = torch.randn(count, inputs, generator=generator, dtype=torch.float64)
    targets = (rows @ torch.randn(inputs, classes, generator=generator, dtype=torch.float64)).argmax(1)
    rows = rows.to(dtype)
    return Dataset(
        train=TensorSplit(rows[:samples], targets[:samples]),
        test=TensorSplit(rows[samples:], targets[samples:]),
        info=DataInfo((inputs,), classes),
    )
