"""Models that nobody had in mind train under every schedule as on one worker."""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.data import MicroBatch, TensorSplit, deal
from pipetransformer.models import PipelineModel
from pipetransformer.schedules import GPipe, OneForwardOneBackward, Schedule
from pipetransformer.schedules.from_torch import Interleaved, ZeroBubble, ZeroBubbleV
from tests.testkit.trainer.ranks import run_ranks
from tests.testkit.trainer.stages import make_runner

pytestmark = pytest.mark.timeout(180)

WIDTH, SAMPLES = 6, 13
RING, V = (0, 1, 0, 1), (0, 1, 1, 0)


class Learned(nn.Module):
    """Gives the same for any input, as a view that was expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.value.tanh().expand_as(x)


class Buffered(nn.Linear):
    """Scales by a buffer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.scale, Tensor)
        return x + super().forward(x * self.scale).tanh()


class Branching(nn.Linear):
    """Uses its weights for some micro-batches only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.detach().sum() > 0 else x * 0.5


class Squares(PipelineModel):
    def loss(self, output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return ((output - target.unsqueeze(1)).square().sum(1) * weight).sum(), weight.sum()


def tied() -> list[nn.Module]:
    """Layers without parameters, one that is used by values, and weights that two layers share."""
    layers = [Buffered(), nn.Identity(), Branching(WIDTH, WIDTH), Buffered(), nn.Tanh()]
    layers[3].weight = layers[0].weight
    return [nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, WIDTH)]


def cut_off() -> list[nn.Module]:
    """The layers before one that ignores its input get no gradient, and the head has no parameters."""
    return [nn.Linear(WIDTH, WIDTH), Buffered(), Buffered(), Learned(), Buffered(), nn.Tanh(), nn.Identity()]


class Round(NamedTuple):
    """Settings of a round."""

    units: str
    boundary: int
    recompute: bool
    dtype: torch.dtype
    autocast: torch.dtype | None = None


ROUNDS = [
    *(Round(*each, torch.float64) for each in product(("tied", "cut_off"), (0, 2, 5), (False, True))),
    *(Round("tied", boundary, False, torch.float32, torch.bfloat16) for boundary in (0, 2)),
]


def trained(
    group: dist.ProcessGroup, schedule: Schedule, owners: tuple[int, ...], micro_batches: Sequence[MicroBatch]
) -> list[tuple[float, list[float], dict[str, Tensor]]]:
    """Of each round: the loss, that of an evaluation, and the gradients of this worker's parameters, each once."""
    results = []
    for settings in ROUNDS:
        torch.manual_seed(0)
        units = {"tied": tied, "cut_off": cut_off}[settings.units]()
        split = TensorSplit(torch.randn(SAMPLES, WIDTH, dtype=settings.dtype), torch.zeros(SAMPLES))
        model = Squares(units[0], units[1:-1], units[-1], (WIDTH,))
        first = settings.boundary + 1 if settings.boundary else 0
        for number, unit in enumerate(units):
            unit.to(settings.dtype).requires_grad_(number >= first)
        for unit in units[first:]:
            unit.requires_grad_()  # also of parameters that a frozen unit shares
        runner = make_runner(
            group, model, schedule, boundary=settings.boundary, dtype=settings.dtype, owners=owners,
            autocast=settings.autocast, recompute=settings.recompute,
        )  # fmt: skip
        loss = runner.train(0, micro_batches, split).loss
        own = {id(parameter) for index in runner.spec.units for parameter in model.units[index].parameters()}
        gradients = {
            name: parameter.grad
            for name, parameter in nn.ModuleList(units).named_parameters()
            if parameter.grad is not None and id(parameter) in own
        }
        scored = runner.evaluate(micro_batches, split, [model.loss], name="test")[0].tolist()
        results.append((loss, scored, gradients))
    return results


@pytest.mark.parametrize(
    ("schedule", "owners"),
    [
        (OneForwardOneBackward(), (0, 1)),
        (GPipe(), V),
        (Interleaved(2), RING),
        (ZeroBubble(1), (0, 1)),
        (ZeroBubble(2), RING),
        (ZeroBubbleV(), V),
    ],
    ids=str,
)
def test_odd_models_train_as_on_one_worker(schedule: Schedule, owners: tuple[int, ...]) -> None:
    micro_batches = deal([list(range(SAMPLES))], 1, 4)[0]
    assert micro_batches[-1].num_real == 1
    (alone,) = run_ranks(1, trained, OneForwardOneBackward(), (0,), micro_batches)

    several = run_ranks(2, trained, schedule, owners, micro_batches)

    for number, settings in enumerate(ROUNDS):
        loss, scored, gradients = alone[number]
        first, second = (each[number] for each in several)
        tolerance = 1e-12 if settings.dtype is torch.float64 else 2e-2
        assert first[0] + second[0] == pytest.approx(loss, rel=tolerance), settings
        assert [a + b for a, b in zip(first[1], second[1], strict=True)] == pytest.approx(scored, rel=tolerance)
        zero = torch.zeros(())
        for name in first[2].keys() | second[2].keys() | gradients.keys():
            gradient = first[2].get(name, zero) + second[2].get(name, zero)
            expected = gradients.get(name, zero).expand_as(gradient).to(gradient)
            torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance, msg=f"{name} {settings}")
