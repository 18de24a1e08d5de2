"""Models for digits whose head is on an accelerator that fails after some steps; workers import them."""

import torch
from torch import Tensor, nn

from pipetransformer.data import DataInfo
from pipetransformer.models import PipelineModel

#: Of one process, after its warm-up and some steps.
_GOOD_FORWARDS = 30


class Head(nn.Linear):
    forwards = 0

    def __init__(self, width: int, num_classes: int, error: RuntimeError) -> None:
        super().__init__(width, num_classes)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        Head.forwards += self.training
        if Head.forwards > _GOOD_FORWARDS:
            raise self.error
        return super().forward(x)


def breaks(info: DataInfo, num_layers: int = 4) -> PipelineModel:
    return _make_model(info, num_layers, torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"))


def runs_short(info: DataInfo, num_layers: int = 4) -> PipelineModel:
    return _make_model(info, num_layers, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))


def _make_model(info: DataInfo, num_layers: int, error: RuntimeError) -> PipelineModel:
    embedding = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(num_layers)]
    return PipelineModel(embedding, blocks, Head(8, info.num_classes, error), (8,))
