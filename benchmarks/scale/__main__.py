"""`make bench-scale`: jobs by the thousand on fake nodes, behind the real API server, scheduler and controllers."""

import argparse
import asyncio
import resource
import sys
import tempfile
from pathlib import Path

from benchmarks.common import print_table, write_result

from .run import Figures, run_scale

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
    runs: list[Figures] = []
    failed: dict[int, str] = {}
    for jobs in arguments.jobs:
        try:
            runs.append(asyncio.run(run_scale(jobs, arguments.log, _say)))
            _show(runs[-1])
        except (RuntimeError, TimeoutError) as error:
            failed[jobs] = str(error) or type(error).__name__
            _say(f"{jobs} jobs: {failed[jobs]}")
    if not arguments.dry:
        headline = {f"{name}_{run.jobs}": getattr(run, name) for run in runs for name in HEADLINE}
        print(write_result("scale", {**headline, "failed": failed, "runs": [run.document() for run in runs]}))
    return int(bool(failed))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(run: Figures) -> None:
    print_table(f"{run.jobs} jobs", ["figure", "value"], [[name, value] for name, value in run.document().items()])


if __name__ == "__main__":
    sys.exit(main())
