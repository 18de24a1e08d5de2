"""Frozen forwards of the next round, computed in this one on any worker, give the same bits as in place."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.cache import ActivationCache
from pipetransformer.data import MicroBatch, TensorSplit, deal
from pipetransformer.models import KeyedDropout, PipelineModel
from pipetransformer.pipeline import StageRunner, StageSpec
from pipetransformer.schedules import Ahead, GPipe, OneForwardOneBackward, RoundSeconds, Schedule
from pipetransformer_contract.spec import Cache
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


def micro_batches_of(step: int, steps: int = STEPS) -> list[MicroBatch]:
    if step >= steps:
        return []
    # Rounds have different numbers of micro-batches.
    first = step * BATCH % SAMPLES
    return deal([[*range(first, first + BATCH - 3 * (step == 2))]], 1, 3)[0]


def make_stage(
    group: dist.ProcessGroup,
    schedule: Schedule,
    micro_batches_of: Callable[[int], list[MicroBatch]] = micro_batches_of,
    *,
    ahead: bool,
    cached: bool = False,
    cache: ActivationCache | None = None,
) -> tuple[StageRunner, PipelineModel]:
    """This worker's runner, and the model."""
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
    runner = StageRunner(spec, model, [model.units[unit] for unit in spec.units], cache, micro_batches_of)
    if ahead:
        seconds = RoundSeconds((1.0,) * workers, (2.0,) * workers, (1.0,) * frozen)
        runner.run_ahead(Ahead(schedule, seconds, tuple(range(workers))), model.units[:frozen], cached=cached)
    return runner, model


def trained(group: dist.ProcessGroup, schedule: Schedule, *, ahead: bool) -> tuple[dict[str, list[float]], list[float]]:
    """Parameters of this worker after all steps, and for each step the share of frozen forwards made ahead."""
    runner, model = make_stage(group, schedule, ahead=ahead)
    parameters = {
        f"{unit}.{name}": parameter
        for unit in runner.spec.units
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


def shares_with_a_cache(group: dist.ProcessGroup, scratch: Path) -> list[float]:
    """The shares of frozen forwards made ahead in each step of two epochs, with a cache on the first worker."""
    settings = Cache.model_validate({"policy": "Always", "memory_bytes": 1 << 20})
    cache = ActivationCache(settings, job="job", scratch=scratch) if group.rank() == 0 else None
    generator = torch.Generator().manual_seed(1)
    split = TensorSplit(torch.randn(SAMPLES, POSITIONS, WIDTH, generator=generator), torch.arange(SAMPLES) % CLASSES)
    steps = 2 * STEPS
    dealt = partial(micro_batches_of, steps=steps)
    runner, _ = make_stage(group, OneForwardOneBackward(), dealt, ahead=True, cached=True, cache=cache)
    shares = []
    for step in range(steps):
        runner.train(step, dealt(step), split)
        shares.append(runner.ahead_share)
    if cache is not None:
        cache.close()
    return shares


def test_a_cache_keeps_what_was_made_ahead_so_that_it_is_made_once(tmp_path: Path) -> None:
    """The first round runs in place. In the second epoch only those samples are missing that step 2 had left out."""
    first_epoch, second_epoch = [0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.25, 0.0]
    assert run_ranks(2, shares_with_a_cache, tmp_path) == [first_epoch + second_epoch] * 2
