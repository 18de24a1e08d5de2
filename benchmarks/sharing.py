"""`make bench-sharing`: jobs of mixed priorities on 200 random clusters, in simulated time.

Each job has the operator's `plan()`, and `allocate()` runs between them every ten seconds. Nodes, a scheduler that
preempts, and trainers are `simulated_cluster`. Jobs come, some end, and then nothing happens for an hour: each
generation that is published in it is restlessness.
"""

import argparse
import random
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from pipetransformer_contract.choose import OnPack
from pipetransformer_contract.messages import Outcome
from tests.testkit.operator.simulated_cluster import SECONDS, SimulatedCluster, auto, speeds
from tests.testkit.results import print_table, write_result

PRIORITIES = (-1000, 0, 0, 0, 1000)
#: How often jobs are `onPack: Auto`; the others widen into what is free, give back what they do not need, or keep it.
MODES = (OnPack.AUTO,) * 6 + (OnPack.WIDEN, OnPack.WIDEN, OnPack.RELEASE, OnPack.HOLD)
HOUR = 3600 // SECONDS
#: After the last job came or ended, until the cluster counts as at rest.
SETTLE = 900 // SECONDS


@dataclass(frozen=True, slots=True)
class Result:
    """What one cluster did.

    Attributes:
        at_rest: generations that each job published in the quiet hour.
        idle: share of accelerator time that nobody had while a job could have used it, from the first job on.
        inversions: times that jobs were granted what only jobs of higher priority could give up.
        preemptions: workers that the scheduler took away.
    """

    at_rest: list[int]
    idle: float
    inversions: int
    preemptions: int


def simulate(seed: int) -> Result:
    """One random cluster."""
    draw = random.Random(seed)
    nodes = [draw.choice((1, 2, 4, 8)) for _ in range(draw.randint(2, 6))]
    cluster = SimulatedCluster(nodes, pause=draw.randint(0, 3))
    ends = []
    for number in range(draw.randint(2, 6)):
        stages = draw.choice((1, 1, 2, 4))
        most_pipelines = max(1, min(3, sum(nodes) // stages))  # so only a pipeline longer than the cluster never fits
        workers = stages * draw.randint(1, most_pipelines)
        most = max(workers, stages * draw.randint(1, 12))
        name = f"job-{number}"
        cluster.add(
            name,
            auto(workers, most, stages=stages, on_pack=draw.choice(MODES)),
            priority=draw.choice(PRIORITIES),
            offers=speeds(stages, most, draw.choice((0.3, 0.5, 0.7, 0.9, 1.0))),
        )
        if draw.random() < 0.3:
            ends.append(name)
        cluster.run(draw.randint(1, 60))
    for name in ends:
        if cluster.worlds[name].report is not None:
            cluster.worlds[name].finish(Outcome.SUCCEEDED)
        cluster.run(draw.randint(1, 60))
    cluster.run(SETTLE)
    before = cluster.generations()
    cluster.run(HOUR)
    after = cluster.generations()
    return Result(
        at_rest=[after[name] - before[name] for name in after],
        idle=cluster.idle / cluster.all,
        inversions=cluster.inversions,
        preemptions=sum(cluster.preemptions.values()),
    )


def main() -> int:
    """Simulates all clusters and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first cluster; the others follow")
    parser.add_argument("--dry", action="store_true", help="write no result")
    arguments = parser.parse_args()
    started = time.monotonic()
    with ProcessPoolExecutor() as processes:
        results = list(processes.map(simulate, range(arguments.seed, arguments.seed + arguments.clusters)))
    figures = {
        "clusters": len(results),
        "jobs": sum(len(result.at_rest) for result in results),
        "generations_per_job_at_rest": max(max(result.at_rest) for result in results),
        "mean_generations_per_job_at_rest": statistics.mean(n for result in results for n in result.at_rest),
        "idle_gpu_share_while_a_job_fits": statistics.mean(result.idle for result in results),
        "largest_idle_gpu_share": max(result.idle for result in results),
        "inversions": sum(result.inversions for result in results),
        "preemptions": sum(result.preemptions for result in results),
        "seconds": time.monotonic() - started,
    }
    print_table(f"{len(results)} clusters", ["figure", "value"], [[name, value] for name, value in figures.items()])
    if not arguments.dry:
        print(write_result("sharing", figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
