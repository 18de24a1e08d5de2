"""A unit knows of its micro-batch the same wherever the model is cut."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

from pipetransformer.data import deal
from pipetransformer.data.tokens import PaddedTokens
from pipetransformer.models import PipelineModel, current_micro_batch
from pipetransformer.schedules import StageRunner, StageSpec
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)

POSITIONS, WIDTH, CLASSES, SAMPLES = 5, 8, 3, 6


class MeanOfReal(nn.Linear):
    """Classifies by the mean over the positions that are no padding."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = current_micro_batch().lengths
        assert lengths is not None
        real = torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)
        return super().forward((x * real.unsqueeze(2)).sum(1) / lengths.unsqueeze(1))


def loss(group: dist.ProcessGroup) -> float:
    """Of a step on the pipeline that is the group."""
    torch.manual_seed(0)
    lengths = torch.arange(SAMPLES) % POSITIONS + 1
    split = PaddedTokens(torch.randint(9, (SAMPLES, POSITIONS)), torch.arange(SAMPLES) % CLASSES, lengths)
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
    model = PipelineModel(nn.Embedding(9, WIDTH), blocks, MeanOfReal(WIDTH, CLASSES), (POSITIONS, WIDTH))
    stage, stages = group.rank(), group.size()
    span = range(stage * 4 // stages, (stage + 1) * 4 // stages)
    spec = StageSpec(stage, stages, span, 0, Schedule1F1B, group, torch.device("cpu"), torch.float32)
    runner = StageRunner(spec, model, model.units[span.start : span.stop])
    return runner.train(0, deal([list(range(SAMPLES))], 1, 2)[0], split).loss


def test_a_head_may_ask_which_positions_are_padding_in_every_cut() -> None:
    (alone,), (_, cut) = (run_ranks(stages, loss) for stages in (1, 2))
    assert alone > 0 and cut == pytest.approx(alone)
