"""What units see of a round: their mode, the order of forwards and backwards, and which gradients are computed."""

import datetime
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from pipetransformer.data import TensorSplit, deal
from pipetransformer.elastic.transport.groups import Transport, drop_groups, make_group
from pipetransformer.models import PipelineModel
from pipetransformer.pipeline import RoundHooks
from pipetransformer.schedules import GPipe
from pipetransformer.schedules.from_torch import ZeroBubble
from tests.testkit.trainer.ranks import run_ranks
from tests.testkit.trainer.stages import make_runner

pytestmark = pytest.mark.timeout(120)

WIDTH, CLASSES, SAMPLES = 4, 3, 6


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    group = make_group(HashStore(), "one", 0, 1, Transport("127.0.0.1", datetime.timedelta(seconds=20)))
    yield group
    drop_groups([group])


class _Noted(torch.autograd.Function):
    """The identity, which notes its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[object], what: object) -> Tensor:
        ctx.seen, ctx.what = seen, what
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.seen.append(ctx.what)
        return gradients[0], None, None


class Noting(nn.Linear):
    """Notes what it sees."""

    def __init__(self, number: int, width: int = WIDTH) -> None:
        super().__init__(WIDTH, width)
        self.number = number
        self.seen: list[object] = []
        self.modes: list[bool] = []
        self.wants_gradient: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        self.wants_gradient.append(x.requires_grad)
        self.seen.append(("forward", self.number))
        output: Tensor = _Noted.apply(super().forward(x), self.seen, ("backward", self.number))  # type: ignore[no-untyped-call]
        return output


def make_model(num_layers: int = 2) -> tuple[PipelineModel, list[Noting]]:
    """A model whose units note what they see in one list."""
    torch.manual_seed(0)
    units = [Noting(number) for number in range(num_layers + 1)] + [Noting(num_layers + 1, CLASSES)]
    for unit in units:
        unit.seen = units[0].seen
    return PipelineModel(units[0], list[nn.Module](units[1:-1]), units[-1], (WIDTH,)), units


def samples() -> TensorSplit:
    return TensorSplit(torch.ones(SAMPLES, WIDTH), torch.arange(SAMPLES) % CLASSES)


MICRO_BATCHES = deal([list(range(SAMPLES))], 1, 2)[0]


def test_an_evaluation_changes_the_mode_of_units_and_changes_it_back(group: dist.ProcessGroup) -> None:
    model, units = make_model()
    units[0].eval()

    make_runner(group, model).evaluate(MICRO_BATCHES, samples(), [model.loss], name="test")

    assert [unit.modes for unit in units] == [[False] * 3] * 4
    assert [unit.training for unit in units] == [False, True, True, True]


def test_the_first_unit_that_is_not_finite_is_found_in_any_micro_batch(group: dist.ProcessGroup) -> None:
    model, units = make_model()
    split = samples()
    split.inputs[0] = math.inf
    runner = make_runner(group, model)

    assert runner.first_non_finite(0, MICRO_BATCHES, split) == 0
    assert runner.first_non_finite(0, MICRO_BATCHES[1:], split) is None
    assert not any(unit._forward_hooks for unit in units), "nothing looks at the outputs of training"


def test_a_lone_worker_runs_one_micro_batch_after_another_under_any_schedule(group: dist.ProcessGroup) -> None:
    model, units = make_model(1)

    make_runner(group, model, GPipe()).train(0, MICRO_BATCHES, samples())

    there = [("forward", number) for number in range(3)]
    back = [("backward", number) for number in reversed(range(3))]
    assert units[0].seen == [*there, *back] * 3


class Passed(RoundHooks):
    """Notes which units backwards have passed."""

    def __init__(self, seen: list[object]) -> None:
        self.seen = seen

    def passed(self, unit: int) -> None:
        self.seen.append(("passed", unit))


def test_hooks_hear_of_a_unit_before_the_backward_reaches_lower_units(group: dist.ProcessGroup) -> None:
    """So the sum of its gradients over the pipelines overlaps with the rest of the backward."""
    model, units = make_model(1)

    make_runner(group, model).train(0, MICRO_BATCHES[:1], samples(), Passed(units[0].seen))

    expected = [(what, unit) for unit in (2, 1, 0) for what in ("backward", "passed")]
    assert units[0].seen[3:] == expected


def behind_frozen_layers(group: dist.ProcessGroup) -> list[list[bool]]:
    """For each unit of this worker, whether its inputs want a gradient."""
    model, units = make_model(4)
    for unit in units[:3]:
        unit.requires_grad_(False)
    runner = make_runner(group, model, boundary=2)
    runner.train(0, MICRO_BATCHES, samples())
    return [units[unit].wants_gradient for unit in runner.spec.units]


def test_no_gradient_is_computed_that_no_span_waits_for() -> None:
    first, second = run_ranks(2, behind_frozen_layers)

    assert first == [[False] * 3] * 3, "frozen units"
    assert second == [[False] * 3, [True] * 3, [True] * 3]


def recomputed(group: dist.ProcessGroup) -> dict[int, int]:
    """How often each unit of this worker ran forward in a round of three chunks."""
    model, units = make_model(4)
    runner = make_runner(group, model, ZeroBubble(1), recompute=True)
    runner.train(0, MICRO_BATCHES, samples())
    return {unit: len(units[unit].modes) for unit in runner.spec.units}


def test_halves_of_a_backward_repeat_a_forward_once() -> None:
    first, second = run_ranks(2, recomputed)

    assert first | second == dict.fromkeys(range(6), 2 * 3)
