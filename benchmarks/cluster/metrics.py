"""What a simulation says: times, GPU-hours, fairness; of all jobs and by size."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from .engine import Run
from .trace import Job

_HOUR = 3600.0
#: Sizes of jobs that are looked at apart, in GPUs.
CLASSES: Mapping[str, Callable[[Job], bool]] = {
    "all": lambda job: True,
    "1-2": lambda job: job.gpus <= 2,
    "4": lambda job: job.gpus == 4,
    "8-16": lambda job: job.gpus >= 8,
    "elastic": lambda job: job.elastic,
}


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def figures(runs: Sequence[Run], gpus: int) -> dict[str, float]:
    """Figures of one simulation, by name; those of a size end in its name.

    `utilisation` is the share of GPU-seconds that jobs hold while jobs arrive. `slowdown` is the time from a job's
    arrival to its end over the seconds that it trains alone on the GPUs that its user asks for: finish-time fairness.
    `jain` is Jain's index of the slowdowns: 1 if all are alike.
    """
    slowdowns = [_completion(run) / run.job.seconds for run in runs]
    regroups = sum(max(0, len(run.layouts) - 1) for run in runs)
    makespan = max(run.ended or 0.0 for run in runs)
    last = max(run.job.arrival for run in runs) or makespan
    found = {
        "gpu_hours": sum(run.gpu_seconds() for run in runs) / _HOUR,
        "makespan_hours": makespan / _HOUR,
        "utilisation": sum(run.gpu_seconds(last) for run in runs) / (gpus * last),
        "slowdown_p99": quantile(slowdowns, 0.99),
        "slowdown_max": max(slowdowns),
        "jain": sum(slowdowns) ** 2 / (len(slowdowns) * sum(value**2 for value in slowdowns)),
        "regroups_per_hour": regroups / (makespan / _HOUR),
        "gpu_hours_elastic": sum(run.gpu_seconds() for run in runs if run.job.elastic) / _HOUR,
    }
    for name, belongs in CLASSES.items():
        of_class = [run for run in runs if belongs(run.job)]
        if of_class:
            found |= {f"{figure}_{name}": value for figure, value in _times(of_class).items()}
    return found


def summary(each: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Mean and standard deviation over simulations that differ in their seed."""
    names = set.intersection(*(set(one) for one in each))
    values = {name: [one[name] for one in each] for name in each[0] if name in names}
    return {
        name: {"mean": statistics.fmean(seen), "std": statistics.stdev(seen) if len(seen) > 1 else 0.0}
        for name, seen in values.items()
    }


def _completion(run: Run) -> float:
    assert run.ended is not None
    return run.ended - run.job.arrival


def _times(runs: Sequence[Run]) -> dict[str, float]:
    completions = [_completion(run) / _HOUR for run in runs]
    waits = [((run.admitted or 0.0) - run.job.arrival) / _HOUR for run in runs]
    return {
        "jct_hours": statistics.fmean(completions),
        "jct_p50_hours": quantile(completions, 0.5),
        "jct_p95_hours": quantile(completions, 0.95),
        "queue_hours": statistics.fmean(waits),
        "queue_p99_hours": quantile(waits, 0.99),
    }
