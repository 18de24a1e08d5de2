"""A unit does, and knows of its micro-batch, the same wherever the model is cut."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from pipetransformer.data import TensorSplit, deal
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


class Turned(nn.Conv1d):
    """Gives a view that is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class InPlace(nn.Linear):
    """Changes what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1.0).relu_())


def gradients(group: dist.ProcessGroup, schedule: type[PipelineScheduleSingle]) -> dict[str, list[float]]:
    """Of the parameters that this worker holds, after a step through blocks of both kinds."""
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, POSITIONS, WIDTH, dtype=torch.float64)
    blocks: list[nn.Module] = [Turned(WIDTH, WIDTH, 1), InPlace(WIDTH, WIDTH), Turned(WIDTH, WIDTH, 1)]
    head = nn.Sequential(nn.Flatten(), nn.Linear(POSITIONS * WIDTH, CLASSES))
    model = PipelineModel(nn.Linear(WIDTH, WIDTH), blocks, head, (POSITIONS, WIDTH))
    for unit in model.units:
        unit.double()
    stage, stages = group.rank(), group.size()
    span = range(stage * 2, 5 if stage == stages - 1 else stage * 2 + 2)
    spec = StageSpec(stage, stages, span, 0, schedule, group, torch.device("cpu"), torch.float64)
    runner = StageRunner(spec, model, model.units[span.start : span.stop])
    runner.train(0, deal([list(range(SAMPLES))], 1, 2)[0], TensorSplit(inputs, torch.arange(SAMPLES) % CLASSES))
    return {
        f"{index}.{name}": parameter.grad.flatten().tolist()
        for index in span
        for name, parameter in model.units[index].named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("schedule", [Schedule1F1B, ScheduleGPipe])
def test_units_may_give_views_and_change_their_input_in_place_in_every_cut(
    schedule: type[PipelineScheduleSingle],
) -> None:
    """The cut lies between one that does the one and one that does the other."""
    (alone,), cut = (run_ranks(stages, gradients, schedule) for stages in (1, 2))
    assert len(alone) == 10
    assert cut[0] | cut[1] == {name: pytest.approx(values, rel=1e-12) for name, values in alone.items()}


def test_a_head_may_ask_which_positions_are_padding_in_every_cut() -> None:
    (alone,), (_, cut) = (run_ranks(stages, loss) for stages in (1, 2))
    assert alone > 0 and cut == pytest.approx(alone)
