"""`make bench-scale`: jobs by the thousand on fake nodes, behind the real API server, scheduler and controllers."""

import argparse
import asyncio
import gc
import resource
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.testkit.operator.scale.baseline import Baseline, run_baseline
from tests.testkit.operator.scale.run import Figures, run_scale
from tests.testkit.results import print_table, write_result

HEADLINE = ("seconds_all_running", "plan_p99_seconds", "rss_mb")


def main() -> int:
    """Runs each size and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "bench-scale-operator.log")
    parser.add_argument("--dry", action="store_true", help="write no result")
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each request has a connection
    gc.set_threshold(10_000, 10, 10)  # thousands of workers are kept here
    runs: list[Figures] = []
    baselines: list[Baseline] = []
    failed: dict[int, str] = {}
    for jobs in arguments.jobs:
        try:
            runs.append(asyncio.run(run_scale(jobs, arguments.log, _say)))
            _show(f"{jobs} jobs", runs[-1].document())
        except (RuntimeError, TimeoutError) as error:
            failed[jobs] = str(error) or type(error).__name__
            _say(f"{jobs} jobs: {failed[jobs]}")
        baselines.append(asyncio.run(run_baseline(jobs, _say)))
        _show(f"{jobs} plain Jobs", baselines[-1].document())
    ratios: dict[str, float] = {}
    for run in runs:
        plain = next(one for one in baselines if one.jobs == run.jobs)
        _show_processes(run, plain)
        ratios |= over_plain_jobs(run, plain)
    _show("the start over that of plain Jobs", ratios)
    if not arguments.dry:
        figures = {
            **{f"{name}_{run.jobs}": getattr(run, name) for run in runs for name in HEADLINE},
            **{f"seconds_all_running_{one.jobs}_plain_jobs": one.seconds_all_running for one in baselines},
            **ratios,
            "failed": failed,
            "runs": [run.document() for run in runs],
            "plain_jobs": [one.document() for one in baselines],
        }
        print(write_result("scale", figures))
    return int(bool(failed))


def over_plain_jobs(run: Figures, plain: Baseline) -> dict[str, float]:
    """The start over that of as many plain Jobs: until all jobs are `Running`, and until all pods are (`_pods`)."""
    name = f"start_over_plain_jobs_{run.jobs}"
    return {
        f"{name}_core_seconds": sum(run.cpu_start.values()) / sum(plain.cpu_start.values()),
        f"{name}_seconds": run.seconds_all_running / plain.seconds_all_running,
        f"{name}_pods_core_seconds": sum(run.cpu_pods.values()) / sum(plain.cpu_pods.values()),
        f"{name}_pods_seconds": run.seconds_pods_running / plain.seconds_pods_running,
    }


def _show_processes(run: Figures, plain: Baseline) -> None:
    """Core-seconds of each process until all jobs run, ours beside those of plain Jobs."""
    rows = [[name, run.cpu_start[name], plain.cpu_start.get(name, 0.0)] for name in run.cpu_start]
    total = ["all", sum(run.cpu_start.values()), sum(plain.cpu_start.values())]
    print_table(f"core-seconds until {run.jobs} jobs run", ["process", "our jobs", "plain Jobs"], [*rows, total])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(title: str, document: Mapping[str, object]) -> None:
    print_table(title, ["figure", "value"], list(document.items()))


if __name__ == "__main__":
    sys.exit(main())
