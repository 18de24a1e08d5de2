"""A script that trains on a few samples."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipetransformer import (
    Callback,
    Freeze,
    Result,
    Training,
    train,
)
from pipetransformer_contract.spec import FreezePolicyName

#: A micro-batch, that is scored before the first step.
REHEARSED = 16


NO_FREEZE = Freeze(policy=FreezePolicyName.NONE)


def model() -> Sequence[nn.Module]:
    return [nn.Linear(4, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 2)]


def samples(count: int, seed: int) -> TensorDataset:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())


class Log(Callback):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def on_step(self, line: Mapping[str, Any]) -> None:
        self.told.append(("step", line["step"]))

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        self.told.append(("evaluate", (step, sorted(metrics))))

    def on_freeze(self, step: int, frozen_layers: int) -> None:
        self.told.append(("freeze", (step, frozen_layers)))

    def on_generation(self, step: int, generation: int, stages: int, pipelines: int) -> None:
        self.told.append(("generation", (step, generation, stages, pipelines)))

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.told.append(("end", summary["steps"]))

    def of(self, kind: str) -> list[Any]:
        return [value for name, value in self.told if name == kind]


def run(folder: Path, **changes: Any) -> Result:
    """Two epochs of 4 steps, alone."""
    arguments: dict[str, Any] = {
        "model": model,
        "data": (samples(64, 0), samples(20, 1)),
        "training": Training(epochs=2, global_batch_size=16),
        "freeze": NO_FREEZE,
        "run_dir": folder / "run",
    }
    return train(**arguments | changes)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def positives(output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return (target * weight).sum(), weight.sum()
