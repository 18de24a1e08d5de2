"""Predicts the phases of a job with their layouts, and the time that they save, without training.

The same code decides as for a job that trains: the contract's functions choose layouts, and the trainer's code makes
the offers and cuts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipetransformer_contract.api import JobSpec
from pipetransformer_contract.choose import Bounds, OnPack, ReleaseDownTo, next_layout
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.spec import FrozenForward, ScheduleName

if TYPE_CHECKING:
    from pipetransformer.library.forecast import Forecast
    from pipetransformer.partition import Candidate, Cut


@dataclass(frozen=True)
class Phase:
    """A period of the training. The number of frozen layers and the layout stay the same.

    Attributes:
        first_step: the first step of the phase, from 0; None if gradients decide when it begins.
        boundary: number of frozen layers.
        off_layers: number of frozen layers that are in host memory, because the cache has their outputs.
        layout: the layout that the operator would choose.
        cut: the trainer's cut of the layout.
        stage_layers: number of layers of each stage.
        schedule: the schedule that the layout runs.
        why_schedule: why `schedule` is not the schedule of the spec; empty if it is.
        frozen_forward: when frozen layers compute.
        why_frozen_forward: why `frozen_forward` is not what the spec says; empty if it is.
        step_seconds: time of a step. Without measured costs it is relative: compare it only with other phases.
        gpus: number of GPUs that the job holds.
        regroups: whether workers regroup when the phase begins, into another layout or into stages that are cut again.
        staleness: by stage, the largest number of steps that the weights of a forward are behind when its gradient is
            used; empty with a synchronous schedule.
        level: the level of `multiLevel` that trains; 0 is the job's own model.
        candidates: the schedules, spans and micro-batches among which measured costs choose, the best one first. A
            phase without a regroup keeps those of the phase before.
    """

    first_step: int | None
    boundary: int
    off_layers: int
    layout: Layout
    cut: "Cut"
    stage_layers: Sequence[int]
    schedule: ScheduleName
    why_schedule: str
    frozen_forward: FrozenForward
    why_frozen_forward: str
    step_seconds: float
    gpus: int
    regroups: bool
    staleness: Sequence[int] = ()
    level: int = 0
    candidates: Sequence["Candidate"] = ()


@dataclass(frozen=True)
class Savings:
    """What the job saves compared with a run that keeps the first layout and freezes nothing. Pauses are not counted.

    Attributes:
        time: saved time, as a share of that run's time.
        gpu_time: saved GPU-seconds, as a share of that run's GPU-seconds.
    """

    time: float
    gpu_time: float


def phases(spec: JobSpec, forecast: "Forecast") -> list[Phase]:
    """Predict the phases of a run, in order. No phase begins if frozen layers only leave the accelerators, and the
    layout stays the same.

    If gradients decide when layers freeze, the steps are unknown. Then there is one phase for each possible number of
    frozen layers.

    Args:
        spec: the job's spec.
        forecast: predicts what the trainer would measure and report.

    Raises:
        ValueError: no layout fits the numbers of workers that the spec allows.
    """
    found: list[Phase] = []
    whole, elastic, bounds = forecast, spec.elastic_policy, bounds_of(spec, forecast)
    layout = _starting_layout(spec)
    cut = forecast.cut(0, layout)
    for step, visit, boundary, cached_layers in _beginnings(forecast):
        forecast = whole.at(visit)
        level = forecast.job.level
        if found and level != found[-1].level:
            cut = forecast.cut(boundary, layout)  # another level has another model

        # The layout that the operator would choose now. If it stays, and no layer froze, no phase begins.
        left = None if step is None else forecast.job.total_steps - step
        to = next_layout(
            forecast.offers(boundary, cached_layers),
            most_workers(spec),
            bounds,
            on_pack=elastic.on_pack,
            packing=spec.pipeline.packing,
            present=forecast.present(boundary, cut, layout, left),
        )
        if to is not None:
            layout, cut = to, forecast.cut(boundary, to, cached_layers)
        elif found and step is not None and (found[-1].level, found[-1].boundary) == (level, boundary):
            continue

        # What a step takes, and how many GPUs the job holds.
        seconds = forecast.step_seconds(boundary, cut, layout.pipelines)
        gpus = min(elastic.workers, elastic.ceiling) if elastic.on_pack is OnPack.HOLD else layout.workers
        found.append(
            Phase(
                first_step=step,
                boundary=boundary,
                off_layers=forecast.off_layers(boundary, cut, layout.pipelines, cached_layers),
                layout=layout,
                cut=cut,
                stage_layers=cut.stage_layers,
                schedule=cut.schedule,
                why_schedule=cut.why_schedule,
                frozen_forward=cut.frozen_forward,
                why_frozen_forward=cut.why_in_place,
                step_seconds=seconds,
                gpus=gpus,
                regroups=to is not None,
                staleness=forecast.staleness(boundary, cut, layout.pipelines),
                level=level,
                candidates=forecast.candidates(boundary, layout, cached_layers),
            )
        )
    return found


def _beginnings(forecast: "Forecast") -> Iterator[tuple[int | None, int, int, int]]:
    """Yields where phases may begin: (first step or None, index of the visit, frozen layers, layers off the device).

    A visit is a period of training of one level of `multiLevel`.
    """
    *earlier, last = forecast.job.visits
    for number, visit in enumerate(earlier):
        yield visit.first_step, number, 0, 0
    for step, boundary, cached_layers in forecast.layout_changes():
        begins = None if step is None else max(step, last.first_step)
        yield begins, len(earlier), boundary, cached_layers


def savings(found: Sequence[Phase], spec: JobSpec, forecast: "Forecast") -> Savings | None:
    """Compute what the phases save; None if it is unknown when they begin."""
    starts = [phase.first_step for phase in found]
    total = forecast.job.total_steps
    time = gpu_time = 0.0
    for phase, start, end in zip(found, starts, [*starts[1:], total], strict=True):
        if start is None or end is None:
            return None
        time += (end - start) * phase.step_seconds
        gpu_time += (end - start) * phase.step_seconds * phase.gpus
    initial = _starting_layout(spec)
    unfrozen = total * forecast.step_seconds(0, forecast.cut(0, initial), initial.pipelines)
    return Savings(1 - time / unfrozen, 1 - gpu_time / (unfrozen * initial.workers))


def _starting_layout(spec: JobSpec) -> Layout:
    try:
        return spec.starting_layout()
    except ValueError as error:
        raise ValueError(f"spec.elasticPolicy.maxWorkers: {error}") from error


def most_workers(spec: JobSpec) -> int:
    """The largest number of workers that the job would train with."""
    elastic = spec.elastic_policy
    return elastic.ceiling if elastic.on_pack.widens else min(elastic.workers, elastic.ceiling)


def bounds_of(spec: JobSpec, forecast: "Forecast") -> Bounds:
    """The limits of layouts that follow from the job's spec.

    Raises:
        ValueError: the spec allows no layout for the start.
    """
    elastic, starting_step_seconds = spec.elastic_policy, None
    if elastic.release_down_to is ReleaseDownTo.STARTING_STEP:
        starting_step_seconds = forecast.starting_step_seconds(_starting_layout(spec))
    return Bounds(
        initial=spec.initial_layout,
        min_workers=elastic.min_workers,
        max_workers=elastic.ceiling,
        min_pipelines=elastic.min_pipelines,
        max_pipelines=spec.max_pipelines,
        bytes_budget=forecast.job.layouts.bytes_budget,
        starting_step_seconds=starting_step_seconds,
    )
