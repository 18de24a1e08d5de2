"""Our executor against torch's own runtime: the same 1F1B, modules, group and micro-batches, with real compute.

Only forwards and backwards are in it. What a trainer does around them is in bench-overhead.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from pipetransformer.data import DataInfo
from pipetransformer.models import MicroBatchContext, PipelineModel, build_model
from pipetransformer.partition import spans
from pipetransformer.pipeline import Chunk, Executor, Loss, Span
from pipetransformer.schedules import OneForwardOneBackward, RoundShape, planned
from pipetransformer_contract.spec import Model
from tests.testkit.trainer.ranks import run_ranks

from .measured import Measured
from .part import Found

_INFO = DataInfo((1, 8, 8), 10)
_LAYERS = 8
_OURS, _STOCK = "executor", "torch's runtime"
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A pipeline, its micro-batches, and the rounds of a block."""

    workers: int
    chunks: int
    samples: int
    rounds: int

    @property
    def name(self) -> str:
        return f"K={self.workers}, M={self.chunks}, {self.samples} samples"


#: Two lengths of step each.
CASES = (Case(2, 4, 2, 10), Case(2, 4, 24, 2), Case(4, 8, 2, 6), Case(4, 8, 24, 1))


def run(pairs: int) -> Found:
    """For each length of pipeline the worse of its two lengths of step."""
    bounds: dict[int, list[float]] = {}
    ways = {}
    for case in CASES:
        measured = compare(case, pairs)
        bounds.setdefault(case.workers, []).append(measured.low(_STOCK, _OURS))
        ways[f"our executor, {case.name}"] = measured.table()
    return Found({f"executor_over_stock_k{workers}": min(found) for workers, found in bounds.items()}, ways)


def compare(case: Case, pairs: int) -> Measured:
    """Seconds of a round of each side, by pair. A block lasts until its last worker is done."""
    by_rank: list[list[tuple[float, float]]] = run_ranks(case.workers, _blocks, case, pairs + 1)
    found = [
        [max(of_ranks) / case.rounds for of_ranks in zip(*pair, strict=True)] for pair in zip(*by_rank, strict=True)
    ]
    ours, stock = zip(*found[1:], strict=True)
    return Measured({_OURS: list(ours), _STOCK: list(stock)})


def _blocks(group: dist.ProcessGroup, case: Case, pairs: int) -> list[tuple[float, float]]:
    """Seconds of this worker's blocks of both sides, which share the modules."""
    spec = Model.model_validate({"name": "vit", "numLayers": _LAYERS})
    model = build_model(spec, _INFO, seed=0, dtype=torch.float32)
    cut = spans(_LAYERS, 0, case.workers)
    ours, stock = Ours(model, cut, group, case), Stock(model, cut, group, case)
    found = []
    for pair in range(pairs):
        first, second = (ours, stock) if pair % 2 else (stock, ours)  # the second block of a pair may have an advantage
        seconds = {side: _seconds(side, group, case.rounds) for side in (first, second)}
        found.append((seconds[ours], seconds[stock]))
    return found


def _seconds(side: "Ours | Stock", group: dist.ProcessGroup, rounds: int) -> float:
    dist.all_reduce(torch.zeros(1), group=group)
    begun = time.perf_counter()
    for _ in range(rounds):
        side.run()
    return time.perf_counter() - begun


@dataclass(frozen=True)
class Inputs:
    """The first span's inputs, without frozen units before it."""

    parts: Sequence[Tensor]

    def take(self, number: int, context: MicroBatchContext) -> Tensor:
        return self.parts[number]


class Ours:
    """One worker's part of a round by our executor."""

    def __init__(self, model: PipelineModel, cut: Sequence[range], group: dist.ProcessGroup, case: Case) -> None:
        self._rank, self._last = group.rank(), case.workers - 1
        self._model, self._case = model, case
        mine = cut[self._rank]
        units = {model.unit_name(unit): model.units[unit] for unit in mine}
        first, last = self._rank == 0, self._rank == self._last
        span = Span(mine, units, 0, first=first, last=last, dtype=torch.float32)
        self._executor = Executor({self._rank: span}, group, _CPU, torch.float32)
        self._shape = RoundShape(tuple(range(case.workers)), case.chunks)
        self._operations = planned(OneForwardOneBackward(), self._shape)[self._rank]
        self._inputs, self._labels = _batch(case)

    def run(self) -> None:
        """One round."""
        case = self._case
        inputs, labels = Inputs(torch.split(self._inputs, case.samples)), torch.split(self._labels, case.samples)
        context = MicroBatchContext(0, range(case.samples))
        chunks = [
            Chunk(
                number,
                context,
                self._model.activation_shape(case.samples),
                prefix=inputs if self._rank == 0 else None,
                labels=labels[number] if self._rank == self._last else None,
                weights=torch.ones(case.samples) if self._rank == self._last else None,
            )
            for number in range(case.chunks)
        ]
        self._executor.run(self._operations, self._shape, chunks, Loss(self._model))


class Stock:
    """The same by torch's runtime, as its tutorial writes it."""

    def __init__(self, model: PipelineModel, cut: Sequence[range], group: dist.ProcessGroup, case: Case) -> None:
        self._rank, self._last = group.rank(), case.workers - 1
        hidden = torch.zeros(model.activation_shape(case.samples), requires_grad=True)
        self._inputs, self._labels = _batch(case)
        stage = PipelineStage(
            nn.Sequential(*(model.units[unit] for unit in cut[self._rank])),
            self._rank,
            case.workers,
            _CPU,
            input_args=self._inputs[: case.samples] if self._rank == 0 else hidden,
            output_args=torch.zeros(case.samples, _INFO.num_classes) if self._rank == self._last else hidden,
            group=group,
        )
        self._schedule = Schedule1F1B(stage, case.chunks, loss_fn=nn.CrossEntropyLoss(reduction="sum"))

    def run(self) -> None:
        """One round."""
        if self._rank == 0:
            self._schedule.step(self._inputs, return_outputs=False)
        elif self._rank == self._last:
            losses: list[Tensor] = []
            self._schedule.step(target=self._labels, losses=losses, return_outputs=False)
        else:
            self._schedule.step(return_outputs=False)


def _batch(case: Case) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    count = case.chunks * case.samples
    return torch.randn(count, *_INFO.input_shape, generator=generator), torch.arange(count) % _INFO.num_classes
