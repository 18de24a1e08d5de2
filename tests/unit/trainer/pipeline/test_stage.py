"""A unit does, and knows of its micro-batch, the same wherever the model is cut."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.data import TensorSplit, deal
from pipetransformer.data.tokens import PaddedTokens
from pipetransformer.models import PipelineModel, current_micro_batch
from pipetransformer.schedules import GPipe, OneForwardOneBackward, Schedule
from tests.testkit.trainer.ranks import run_ranks
from tests.testkit.trainer.stages import make_runner

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
    return make_runner(group, model).train(0, deal([list(range(SAMPLES))], 1, 2)[0], split).loss


class Turned(nn.Conv1d):
    """Gives a view that is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class InPlace(nn.Linear):
    """Changes what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1.0).relu_())


def gradients(group: dist.ProcessGroup, schedule: Schedule) -> dict[str, list[float]]:
    """Of the parameters that this worker holds, after a step through blocks of both kinds."""
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, POSITIONS, WIDTH, dtype=torch.float64)
    blocks: list[nn.Module] = [Turned(WIDTH, WIDTH, 1), InPlace(WIDTH, WIDTH), Turned(WIDTH, WIDTH, 1)]
    head = nn.Sequential(nn.Flatten(), nn.Linear(POSITIONS * WIDTH, CLASSES))
    model = PipelineModel(nn.Linear(WIDTH, WIDTH), blocks, head, (POSITIONS, WIDTH))
    for unit in model.units:
        unit.double()
    runner = make_runner(group, model, schedule, dtype=torch.float64)
    runner.train(0, deal([list(range(SAMPLES))], 1, 2)[0], TensorSplit(inputs, torch.arange(SAMPLES) % CLASSES))
    return {
        f"{index}.{name}": parameter.grad.flatten().tolist()
        for index in runner.spec.units
        for name, parameter in model.units[index].named_parameters()
        if parameter.grad is not None
    }


class Checked(nn.Linear):
    """Looks at all values first."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.isfinite(x).all():
            raise ValueError("no numbers")
        return super().forward(x)


class Scaled(nn.Linear):
    """Takes a number out of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / max(1.0, x.detach().abs().max().item()))


class Selected(nn.Linear):
    """Computes some rows alone, by a mask of booleans and by their numbers."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        chosen = x.detach().sum(-1) > 0
        output = output.masked_fill(chosen.unsqueeze(-1), 0.0)
        output[chosen] = output[chosen] + super().forward(x[chosen].tanh())
        places = torch.nonzero(chosen)
        return output + len(places) * 0.1


class Repeated(nn.Linear):
    """Runs as often as its input says."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + int(x.detach().abs().sum()) % 3):
            x = x + x.tanh()
        return super().forward(x)


class Rows(nn.Linear):
    """Gives the rows that are above a threshold, and no others: as many as there are."""

    def forward(self, x: Tensor) -> Tensor:
        rows = super().forward(x).flatten(0, -2)
        return rows[rows.detach().sum(-1) > 0]


class OfRows(PipelineModel):
    def loss(self, output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return output.square().sum(), weight.sum()


BY_VALUES: list[type[nn.Linear]] = [Checked, Scaled, Selected, Repeated, Rows]


def by_values(group: dist.ProcessGroup) -> list[tuple[dict[str, list[float]], float, float]]:
    """Of models whose head and last block compute by values: gradients, the loss, and that of an evaluation."""
    results = []
    for kind in BY_VALUES:
        torch.manual_seed(0)
        split = TensorSplit(torch.randn(SAMPLES, POSITIONS, WIDTH, dtype=torch.float64), torch.zeros(SAMPLES))
        block = nn.Linear(WIDTH, WIDTH) if kind is Rows else kind(WIDTH, WIDTH)
        units: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), block, kind(WIDTH, CLASSES)]
        model = OfRows(units[0], units[1:3], units[3], (POSITIONS, WIDTH))
        for unit in units:
            unit.double()
        runner = make_runner(group, model, dtype=torch.float64)
        dealt = deal([list(range(SAMPLES))], 1, 2)[0]
        before, drawn = runner.evaluate(dealt, split, [model.loss], name="test"), torch.get_rng_state()
        trained = runner.train(0, dealt, split).loss
        assert torch.equal(torch.get_rng_state(), drawn)
        gradients = {
            f"{index}.{name}": parameter.grad.flatten().tolist()
            for index in runner.spec.units
            for name, parameter in units[index].named_parameters()
            if parameter.grad is not None
        }
        results.append((gradients, trained, before[0, 0].item()))
    return results


def test_units_may_compute_by_values_in_every_cut() -> None:
    """What they branch on, select or repeat no example of a tensor without values could tell."""
    (alone,), cut = (run_ranks(stages, by_values) for stages in (1, 2))
    for kind, (gradients, trained, evaluated), *parts in zip(BY_VALUES, alone, *cut, strict=True):
        assert trained > 0 and len(gradients) == 8, kind
        merged = {name: values for part in parts for name, values in part[0].items()}
        assert merged == {name: pytest.approx(values, rel=1e-12) for name, values in gradients.items()}, kind
        assert parts[-1][1:] == pytest.approx((trained, evaluated), rel=1e-12), kind


@pytest.mark.parametrize("schedule", [OneForwardOneBackward(), GPipe()])
def test_units_may_give_views_and_change_their_input_in_place_in_every_cut(
    schedule: Schedule,
) -> None:
    """The cut lies between one that does the one and one that does the other."""
    (alone,), cut = (run_ranks(stages, gradients, schedule) for stages in (1, 2))
    assert len(alone) == 10
    assert cut[0] | cut[1] == {name: pytest.approx(values, rel=1e-12) for name, values in alone.items()}


def test_a_head_may_ask_which_positions_are_padding_in_every_cut() -> None:
    (alone,), (_, cut) = (run_ranks(stages, loss) for stages in (1, 2))
    assert alone > 0 and cut == pytest.approx(alone)
