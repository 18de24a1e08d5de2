"""Frozen forwards of the next round, computed in this one on any worker, give the same bits as in place."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.data import MicroBatch, deal
from pipetransformer.models import KeyedDropout, PipelineModel
from pipetransformer.pipeline import StageRunner, StageSpec
from pipetransformer.schedules import Ahead, GPipe, OneForwardOneBackward, RoundSeconds, Schedule
from tests.testkit.trainer.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)

POSITIONS, WIDTH, CLASSES, SAMPLES, BATCH, STEPS, FROZEN = 5, 8, 3, 48, 12, 4, 3
SCHEDULES: list[Schedule] = [GPipe(), OneForwardOneBackward()]


class Noisy:
    """Samples with noise that depends on the step."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(SAMPLES, POSITIONS, WIDTH, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self.inputs[list(ids)], torch.tensor(ids) % CLASSES

    def augmented_batch(self, ids: Sequence[int], step: int) -> tuple[Tensor, Tensor]:
        inputs, labels = self.batch(ids)
        noise = [
            torch.randn(POSITIONS, WIDTH, generator=torch.Generator().manual_seed(1000 * step + each)) for each in ids
        ]
        return inputs + torch.stack(noise), labels

    def augmentation_key(self, sample_id: int, step: int) -> int | None:
        del sample_id, step
        return None


class Turned(nn.Conv1d):
    """Gives a view that is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def micro_batches_of(step: int) -> list[MicroBatch]:
    if step >= STEPS:
        return []
    # Rounds have different numbers of micro-batches.
    first = step * BATCH % SAMPLES
    return deal([[*range(first, first + BATCH - 3 * (step == 2))]], 1, 3)[0]


def trained(group: dist.ProcessGroup, schedule: Schedule, *, ahead: bool) -> tuple[dict[str, list[float]], list[float]]:
    """Parameters of this worker after all steps, and for each step the share of frozen forwards made ahead."""
    torch.manual_seed(0)
    workers, worker = group.size(), group.rank()
    blocks: list[nn.Module] = [
        nn.Sequential(Turned(WIDTH, WIDTH, 1), nn.Tanh(), KeyedDropout(0.2, seed=0, place=place))
        for place in range(FROZEN + workers)
    ]
    head = nn.Sequential(nn.Flatten(), nn.Linear(POSITIONS * WIDTH, CLASSES))
    model = PipelineModel(Turned(WIDTH, WIDTH, 1), blocks, head, (POSITIONS, WIDTH))
    frozen = FROZEN + 1
    starts = [0, *range(frozen + 1, frozen + workers), frozen + workers + 1]
    cut = [range(start, end) for start, end in pairwise(starts)]
    for unit in model.units[:frozen]:
        unit.eval().requires_grad_(False)
    spec = StageSpec(worker, cut, tuple(range(workers)), FROZEN, schedule, group, torch.device("cpu"), torch.float32)
    runner = StageRunner(spec, model, [model.units[unit] for unit in spec.units], None, micro_batches_of)
    if ahead:
        seconds = RoundSeconds((1.0,) * workers, (2.0,) * workers, (1.0,) * frozen)
        runner.run_ahead(Ahead(schedule, seconds, tuple(range(workers))), model.units[:frozen], cached=False)
    parameters = {
        f"{unit}.{name}": parameter
        for unit in spec.units
        for name, parameter in model.units[unit].named_parameters()
        if parameter.requires_grad
    }
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    shares = []
    for step in range(STEPS):
        runner.train(step, micro_batches_of(step), Noisy())
        shares.append(runner.ahead_share)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.flatten().tolist() for name, parameter in parameters.items()}, shares


def both_ways(group: dist.ProcessGroup) -> list[tuple[object, object, list[float]]]:
    results: list[tuple[object, object, list[float]]] = []
    for schedule in SCHEDULES:
        expected, _ = trained(group, schedule, ahead=False)
        parameters, shares = trained(group, schedule, ahead=True)
        results.append((expected, parameters, shares))
    return results


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_frozen_forwards_ahead_give_the_same_bits_as_in_place(workers: int) -> None:
    for of_worker in run_ranks(workers, both_ways):
        for expected, parameters, shares in of_worker:
            assert parameters == expected
            assert shares == [0.0, 1.0, 1.0, 1.0]
