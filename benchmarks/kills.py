"""How soon after a worker's death a step ends that nobody had made before.

Four workers and two spares lose four of them in each run, at moments of a round or of a regroup that a seed draws: the
runs of `test_engine_kills.py`, which compares their losses. All have checkpoints, every other one has mirrors as well:
where nothing is kept, a death after which no replica is left costs all that was trained, and the time tells how long
the job had run.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from tests.testkit.results import print_table, write_result
from tests.testkit.trainer.chaos import KILLS, draw
from tests.testkit.trainer.kills import KEPT, STEPS, run_chaos, seconds_to_the_next_step

BAR_SECONDS = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=25, help=f"of {KILLS} deaths each")
    arguments = parser.parse_args()
    seconds: list[float] = []
    deaths = 0
    with tempfile.TemporaryDirectory(prefix="bench-kills-") as folder:
        for seed in range(arguments.runs):
            run = run_chaos(draw(seed, STEPS), seed, Path(folder) / str(seed), KEPT[1 + 2 * (seed % 2)])
            deaths += len(run.lost_at)
            seconds += seconds_to_the_next_step(run)
    figures = {
        "deaths": deaths,
        "all_struck": deaths == KILLS * arguments.runs,
        "count": len(seconds),
        "median_seconds": statistics.median(seconds),
        "p90_seconds": statistics.quantiles(seconds, n=10)[-1],
        "max_seconds": max(seconds),
        "within_bar": sum(one < BAR_SECONDS for one in seconds),
        "bar_seconds": BAR_SECONDS,
    }
    print_table("From a death to the end of the first new step", ["figure", "measured"], list(figures.items()))
    path = write_result("kills", figures)
    print(f"written to {path.relative_to(Path.cwd())}")
    return 0 if figures["all_struck"] and max(seconds) < BAR_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
