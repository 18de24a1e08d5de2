"""A job's forecast beside the best that any layout could reach, and beside the static runs that a user has instead."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipetransformer_client.dry_run import Phase, bounds_of, most_workers
from pipetransformer_contract.api import JobSpec

if TYPE_CHECKING:
    from pipetransformer.library.forecast import Forecast
    from pipetransformer.partition.ideal import Course


@dataclass(frozen=True)
class AgainstIdeal:
    """The job and what it is compared with. No pause of a regroup is in any of them.

    Attributes:
        job: the job as planned.
        elastic: the fastest legal layout at each boundary.
        released: the fewest GPU-seconds at each boundary, with steps about as fast as at the start of `unfrozen`.
        kept: the layout of `unfrozen`, whose stages are cut anew at each boundary.
        unfrozen: the fastest layout that fits with no frozen layers, and nothing freezes.
        work_seconds: seconds that no layout can beat: the work spread evenly over all GPUs, without bubble and links.
        gpus: the most GPUs of a layout.
        exact: whether every cut of each layout was looked at.
        measured: whether times are in seconds. Otherwise they are only relative.
        cached: whether a cache spares frozen forwards.
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
    """Compare a plan with the ideal.

    Raises:
        ValueError: gradients decide when layers freeze, the job has levels, or no layout fits the memory.
    """
    from pipetransformer.partition.ideal import Course, Part

    if spec.multi_level is not None:
        raise ValueError("spec.multiLevel: --ideal compares layouts of one model, so leave --ideal out")
    run = forecast.segments()
    if run is None:
        raise ValueError(
            "spec.freeze.policy: gradients decide when layers freeze, so --ideal knows no steps. Set policy Explicit"
            " with the boundaries that you expect"
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
