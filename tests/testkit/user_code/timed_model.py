"""A model whose layers take declared times and leave the processor meanwhile, as accelerators do.

So several workers on few cores overlap, and measured costs are those that the test declares. It needs nothing of the
tests, so that pods import it from a volume.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.data import DataInfo, Dataset
from pipetransformer.data.dataset import TensorSplit
from pipetransformer.models import PipelineModel

WIDTH = 8
CLASSES = 4


class _Takes(torch.autograd.Function):
    """The identity, whose forward and backward take some seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        if not x.is_meta:
            time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class Layer(nn.Module):
    """A residual layer with declared seconds of a sample's forward and backward."""

    def __init__(self, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._seconds = forward_seconds, backward_seconds

    def forward(self, x: Tensor) -> Tensor:
        forward, backward = self._seconds
        y = x + torch.tanh(self.linear(x))
        output: Tensor = _Takes.apply(y, len(x) * forward, len(x) * backward)  # type: ignore[no-untyped-call]
        return output


def model(info: DataInfo, *, layers: int, forward: float, backward: float) -> PipelineModel:
    """A classifier of flat samples. `forward` and `backward` are the seconds of one sample in one layer."""
    blocks: list[nn.Module] = [Layer(forward, backward) for _ in range(layers)]
    return PipelineModel(nn.Linear(info.input_shape[0], WIDTH), blocks, nn.Linear(WIDTH, info.num_classes), (WIDTH,))


def data(*, path: str, dtype: torch.dtype, samples: int = 256) -> Dataset:
    """Random samples whose class a random linear map tells; `path` is empty."""
    assert not path
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(samples + 16, WIDTH, generator=generator, dtype=torch.float64)
    targets = (rows @ torch.randn(WIDTH, CLASSES, generator=generator, dtype=torch.float64)).argmax(1)
    rows = rows.to(dtype)
    train, test = TensorSplit(rows[:samples], targets[:samples]), TensorSplit(rows[samples:], targets[samples:])
    return Dataset(train=train, test=test, info=DataInfo((WIDTH,), CLASSES))
