"""Metrics of a worker's current state, read from the trainer at each scrape, at no cost to the training."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout

from .names import PREFIX


@dataclass(frozen=True, slots=True)
class Position:
    """A worker's current state.

    Attributes:
        control: the control state.
        layout: the layout of its generation; None between two generations.
        num_layers: number of layers.
        level: the level of `multiLevel` that trains; 0 is the job's own model.
        idle_share: idle share of a step by the step model; None if this worker is not the leader.
    """

    control: Control
    layout: StageLayout | None
    num_layers: int
    idle_share: float | None
    level: int = 0


class Positioned(Protocol):
    """A worker that stands somewhere in the run."""

    @property
    def position(self) -> Position:
        """Its current state. Other threads than the training's ask."""
        ...


class PositionCollector(Collector):
    """Collects the worker's role, its accelerator's memory and, on the leader, the metrics of the whole job.

    Args:
        worker: what stands somewhere.
        device: the worker's device.
    """

    def __init__(self, worker: Positioned, device: torch.device) -> None:
        self._worker = worker
        self._device = device

    def collect(self) -> Iterator[Metric]:
        """The metrics of this scrape."""
        here = self._worker.position
        if here.layout is not None:
            yield from _role(here.layout)
            if here.layout.is_leader:
                yield from _job(here, here.layout)
        if self._device.type == "cuda":
            yield _accelerator_memory(self._device)


def _role(layout: StageLayout) -> Iterator[Metric]:
    yield _gauge("stage", "Stage of this worker in its pipeline, from 0.", layout.stage)
    yield _gauge("pipeline", "Pipeline of this worker, from 0.", layout.pipeline)
    held = sum(map(len, layout.cut.layers_of(layout.stage)))
    yield _gauge("held_layers", "Layers that this worker holds.", held)


def _job(here: Position, layout: StageLayout) -> Iterator[Metric]:
    control, last = here.control, here.control.last_step
    schedule = GaugeMetricFamily(
        f"{PREFIX}_schedule_info", "1 for the schedule of the present layout; told by the leader.", labels=("schedule",)
    )
    schedule.add_metric((layout.schedule,), 1)
    yield schedule
    for name, help_text, value in (
        ("step", "Committed steps of the job; told by the leader.", control.step),
        ("layout_generation", "Layout generation that trains; told by the leader.", layout.number),
        ("stages", "Stages of each pipeline (K); told by the leader.", layout.stages),
        ("pipelines", "Pipelines, the data-parallel width (R); told by the leader.", layout.pipelines),
        ("layers", "Layers of the model; told by the leader.", here.num_layers),
        ("level", "Level of multiLevel that trains, 0 for the job's own model; told by the leader.", here.level),
        ("frozen_layers", "Layers that no longer train; told by the leader.", control.boundary),
        ("loss", "Mean loss of the newest step, none if it was no number; told by the leader.", last.get("loss")),
        (
            "gradient_norm",
            "Norm of the newest step's gradient, not clipped; told by the leader.",
            last.get("gradient_norm"),
        ),
        ("learning_rate", "Learning rate of the newest step; told by the leader.", last.get("learning_rate")),
        (
            "bubble_ratio",
            "Share of a step in which the pipeline leaves its stages idle, by the step model: from measured times with"
            " packing Measured, else as if all layers cost the same; told by the leader.",
            here.idle_share,
        ),
    ):
        if value is not None:
            yield _gauge(name, help_text, value)


def _accelerator_memory(device: torch.device) -> Metric:
    family = GaugeMetricFamily(
        f"{PREFIX}_accelerator_memory_bytes",
        "Memory of this worker's accelerator, by kind: Allocated (in tensors), Reserved (by PyTorch), Peak (most that"
        " was ever allocated).",
        labels=("kind",),
    )
    for kind, value in (
        ("Allocated", torch.cuda.memory_allocated(device)),
        ("Reserved", torch.cuda.memory_reserved(device)),
        ("Peak", torch.cuda.max_memory_allocated(device)),
    ):
        family.add_metric((kind,), value)
    return family


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", help_text, value)
