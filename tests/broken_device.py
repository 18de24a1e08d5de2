"""A model for digits whose head is on an accelerator that breaks after some steps; workers import it."""

import torch
from torch import Tensor, nn

from pipetransformer.data import DataInfo
from pipetransformer.models import PipelineModel

#: Of one process, after its warm-up and some steps.
_GOOD_FORWARDS = 30
WORDS = "CUDA error: uncorrectable ECC error encountered"


class Head(nn.Linear):
    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        Head.forwards += self.training
        if Head.forwards > _GOOD_FORWARDS:
            raise torch.AcceleratorError(WORDS)
        return super().forward(x)


def make_model(info: DataInfo, num_layers: int = 4) -> PipelineModel:
    embedding = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(num_layers)]
    return PipelineModel(embedding, blocks, Head(8, info.num_classes), (8,))
