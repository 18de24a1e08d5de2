"""Seconds of a step on virtual devices: 4 workers, 8 micro-batches a step, 16 steps between two flushes.

Every way steps the same optimizer over the same weights. Ways alternate in the same run.
"""

import statistics
import time
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.schedules.in_place import ONE_F_ONE_B, in_place
from benchmarks.schedules.measured import Measured
from benchmarks.schedules.ways import Way, even_cut, even_units
from benchmarks.schedules.worker import Runner
from pipetransformer.pipeline import RoundHooks
from pipetransformer.schedules import Asynchronous, RoundShape, staleness
from pipetransformer.state.packed_parameters import Pack
from pipetransformer.training.asynchronous import Newest, Predicted, Stashed
from pipetransformer.training.commit import Committer
from pipetransformer.training.gradients import GradientReducer
from tests.testkit.trainer.ranks import run_ranks

_WORKERS, _CHUNKS, _STEPS = 4, 8, 16
_UNIT_SECONDS = 0.004
#: Rounds of a flushed way in a block; an asynchronous one has a single round of `_STEPS` steps.
_FLUSHED_ROUNDS = 6
#: Width of the layers, so that the optimizer and a prediction have some work.
_WIDTH = 128
PREDICTED, NEWEST, STASHED = "PipeOptim", "newest weights", "PipeDream"
_HOOKS = {PREDICTED: Predicted, NEWEST: Newest, STASHED: Stashed}


def run(pairs: int) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Lower bounds of the throughput over that of others, and what a step of each way took."""
    flushed = ways()[: -len(_HOOKS)]
    measured = measure(pairs)
    best = measured.best([way.name for way in flushed])
    figures = {
        "throughput_over_flushed": measured.low(ONE_F_ONE_B, PREDICTED),
        "over_best_synchronous": measured.low(best, PREDICTED),
        "prediction_over_newest": measured.low(NEWEST, PREDICTED),
        "stashed_over_newest": measured.low(NEWEST, STASHED),
    }
    return figures, measured.table()


def ways(
    workers: int = _WORKERS, chunks: int = _CHUNKS, steps: int = _STEPS, unit_seconds: float = _UNIT_SECONDS
) -> list[Way]:
    """The synchronous schedules, and then the asynchronous ones."""
    units = even_units(2 * workers, unit_seconds)
    shape = RoundShape(tuple(range(workers)), chunks * steps, steps=(chunks,) * steps)
    cut = even_cut(units, workers)
    return [
        *in_place(units, workers, chunks),
        *(Way(name, tuple(units), cut, Asynchronous(), shape) for name in _HOOKS),
    ]


def measure(pairs: int) -> Measured:
    """Seconds of a step of each way, by pair of blocks, after one block that warms up. A block lasts until its last
    worker is done."""
    by_rank: list[list[list[float]]] = run_ranks(_WORKERS, blocks, ways(), pairs + 1, within=600)
    found: dict[str, list[float]] = {way.name: [] for way in ways()}
    for pair in range(1, pairs + 1):
        for number, name in enumerate(found):
            found[name].append(max(rank[pair][number] for rank in by_rank))
    return Measured(found)


def blocks(group: dist.ProcessGroup, ways: Sequence[Way], pairs: int) -> list[list[float]]:
    """Seconds of a step on this worker: for each pair of blocks those of each way."""
    torch.manual_seed(0)
    sides = [_Side(way, group) for way in ways]
    found = []
    for pair in range(pairs):
        seconds = [0.0] * len(sides)
        order = range(len(sides)) if pair % 2 == 0 else reversed(range(len(sides)))
        for number in order:
            seconds[number] = sides[number].run()
        found.append(seconds)
    return found


class _Side:
    """One way on one worker."""

    def __init__(self, way: Way, group: dist.ProcessGroup) -> None:
        self._way, self._group, self._runner = way, group, Runner(way, group, _WIDTH)
        self._weights = _Weights([self._runner.units[index] for index in sorted(self._runner.units)])
        found = staleness(way.lists, way.shape)
        self._staleness = {chunk: age for (span, chunk), age in found.items() if span == group.rank()}

    def run(self) -> float:
        """Run a block. Returns the seconds of a step; of several rounds the median counts, because a disturbance of the
        machine lengthens single rounds."""
        if not self._way.shape.steps:
            return statistics.median(self._flushed() for _ in range(_FLUSHED_ROUNDS))
        self._meet()
        begun = time.perf_counter()
        committer, reducer = cast(Committer, self._weights), cast(GradientReducer, self._weights)
        hooks = _HOOKS[self._way.name](committer, reducer, 0, self._way.shape.steps, self._staleness, lambda step: None)
        self._runner.run(hooks)
        return (time.perf_counter() - begun) / len(self._way.shape.steps)

    def _flushed(self) -> float:
        self._meet()
        begun = time.perf_counter()
        chunks = self._way.shape.chunks
        self._weights.begin(chunks)
        self._runner.run(RoundHooks())
        self._weights.finish()
        self._weights.step(0, 1 / chunks)
        return time.perf_counter() - begun

    def _meet(self) -> None:
        """Wait for the other workers, as the vote after each round does."""
        dist.all_reduce(torch.zeros(1), group=self._group)


class _Weights:
    """A worker's weights without a replica: what the hooks of a round need of a `Committer` and a `GradientReducer`."""

    def __init__(self, units: Sequence[nn.Module]) -> None:
        parameters = {
            f"{number}.{name}": parameter
            for number, unit in enumerate(units)
            for name, parameter in unit.named_parameters()
        }
        self._parameters = list(parameters.values())
        self._gradient = torch.zeros(sum(parameter.numel() for parameter in self._parameters))
        whole = Pack(parameters, self._gradient).join()
        self.optimizer = torch.optim.AdamW([whole])
        self.weights = [whole.detach()]

    def begin(self, chunks: int) -> None:
        self._gradient.zero_()
        parts = torch.split(self._gradient, [parameter.numel() for parameter in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def awaits(self, unit: int) -> bool:
        return False  # there is no replica to sum with

    def passed(self, unit: int) -> None:
        """Nothing is summed here either."""

    def finish(self) -> list[float]:
        return [float(self._gradient.norm())]

    def sum_over_pipelines(self, weight: Tensor) -> float:
        return float(weight)

    def rate(self, step: int) -> float:
        return 1e-3

    def step(self, step: int, scale: float) -> None:
        self._gradient.mul_(scale)
        self.optimizer.step()
