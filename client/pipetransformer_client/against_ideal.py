"""Compares a job's forecast with the best that layouts could reach, and with runs that never change their layout."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipetransformer_client.phases import Phase, bounds_of, most_workers
from pipetransformer_contract.api import JobSpec

if TYPE_CHECKING:
    from pipetransformer.library.forecast import Forecast
    from pipetransformer.partition.ideal import Course


@dataclass(frozen=True)
class AgainstIdeal:
    """The run of a job, and the runs that it is compared with. The pauses of regroups are not counted in any run.

    Attributes:
        job: the job as planned.
        elastic: the ideal: in each period with a constant number of frozen layers, the fastest legal layout.
        released: the ideal with release: in each period, the layout with the fewest GPU-seconds among those whose steps
            are about as fast as the first steps of `unfrozen`.
        kept: always the layout of `unfrozen`. Its stages are cut again whenever layers freeze.
        unfrozen: always the fastest layout that fits with no frozen layers. No layer freezes.
        work_seconds: a bound on the seconds of any layout: the computations divided evenly among all GPUs, without
            waiting and without transfers.
        gpus: largest number of GPUs that a layout may use.
        exact: whether all possible cuts of each layout were tried.
        measured: whether times are in seconds. Otherwise they are only relative.
        cached: whether the cache is counted, which saves forwards of frozen layers.
        offloads: whether frozen layers leave the GPU once the cache has their outputs.
        regroups: number of regroups of the job.
    """

    job: "Course"
    elastic: "Course"
    released: "Course"
    kept: "Course"
    unfrozen: "Course"
    work_seconds: float
    gpus: int
    exact: bool
    measured: bool
    cached: bool
    offloads: bool
    regroups: int


def compare_with_ideal(found: Sequence[Phase], spec: JobSpec, forecast: "Forecast") -> AgainstIdeal:
    """Compare a plan with the ideal and with static runs.

    Args:
        found: the phases of the plan, from `phases`.
        spec: the job's spec.
        forecast: the forecast that made the plan.

    Raises:
        ValueError: gradients decide when layers freeze, the job has levels, or no layout fits the memory.
    """
    from pipetransformer.partition.ideal import Course, Part

    if spec.multi_level is not None:
        raise ValueError("spec.multiLevel: --ideal compares layouts of one model, so leave --ideal out")
    run = forecast.segments()
    if run is None:
        raise ValueError(
            "spec.freeze.policy: gradients decide when layers freeze, so --ideal does not know at which steps. Set"
            " policy Explicit with the boundaries that you expect"
        )
    ideal = forecast.ideal(replace(bounds_of(spec, forecast), max_workers=most_workers(spec)))
    parts = []
    for segment in run:
        phase = [phase for phase in found if (phase.first_step or 0) <= segment.first_step][-1]
        seconds = forecast.segment_seconds(segment, phase.cut, phase.layout.pipelines)
        parts.append(Part(segment, phase.layout, seconds, phase.gpus))
    return AgainstIdeal(
        job=Course(parts),
        elastic=ideal.elastic(run),
        released=ideal.released(run),
        kept=ideal.kept(ideal.static(), run),
        unfrozen=ideal.unfrozen(forecast.job.total_steps),
        work_seconds=ideal.work_seconds(run),
        gpus=ideal.bounds.max_workers,
        exact=ideal.exact(),
        measured=forecast.costs is not None,
        cached=ideal.model.cache_bytes > 0,
        offloads=ideal.model.offloads,
        regroups=sum(phase.regroups for phase in found),
    )
