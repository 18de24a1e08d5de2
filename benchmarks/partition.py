"""The exact partition: how quick it is, how much better than the greedy of PipeTransformer's Algorithm 1, and what
measuring the costs for it takes.

The greedy cuts by parameters, at attention and perceptron, as the paper does. `worse` compares largest stages in
parameters, the paper's own measure; `worse_by_time` in time, where an embedding costs next to nothing.
"""

import datetime
import random
import statistics
import sys
import time

import torch
from torch._C._distributed_c10d import HashStore

from pipetransformer.elastic.transport.groups import GenerationGroups, Transport, make_group
from pipetransformer.job.load import load_job
from pipetransformer.partition import Cut, partition
from pipetransformer.pipeline import StageRunner, StageSpec
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.training.cost_measurement import LARGEST_SHARE, measure_costs
from pipetransformer_contract.messages import Generation, Member, ResizeReason
from pipetransformer_contract.spec import TrainerSpec
from tests.testkit import ROOT
from tests.testkit.results import print_table, spread, write_result
from tests.testkit.trainer.partition_cases import CASES, greedy, largest

#: The bar for 1,000 layers and 64 stages.
LIMIT_SECONDS = 0.05
_REPEATS = 20
_TURNS = 5


def seconds_of(num_items: int, stages: int) -> list[float]:
    """Seconds of one partition of random costs, several times."""
    rng = random.Random(0)
    seconds = []
    for _ in range(_REPEATS):
        costs = [rng.random() for _ in range(num_items)]
        started = time.perf_counter()
        partition(costs, stages)
        seconds.append(time.perf_counter() - started)
    return seconds


def measuring() -> dict[str, float]:
    """Seconds of a training step and of a measurement on one worker, and what the measurement predicts for the step."""
    spec = TrainerSpec.model_validate(
        {
            "model": {"name": "vit", "numLayers": 12, "hiddenSize": 192, "numHeads": 4, "mlpSize": 768},
            "data": {"name": "digits"},
            "training": {"steps": 1, "globalBatchSize": 128},
            "freeze": {"policy": "None"},
            "pipeline": {"packing": "Measured"},
        }
    )
    torch.set_num_threads(1)
    job = load_job(spec)
    transport = Transport("127.0.0.1", datetime.timedelta(seconds=60))
    group = make_group(HashStore(), "bench", 0, 1, transport)
    groups = GenerationGroups(group, group, group, group)
    units = list(job.build_units(range(job.num_layers + 2)).values())
    stage = StageSpec(0, [range(len(units))], (0,), 0, job.schedule, group, transport.device, job.dtype)
    runner = StageRunner(stage, job.model, units)
    member = Member(name="w0", uid="w0", address="127.0.0.1:1")
    generation = Generation(
        job_uid="bench", layout_generation=1, stages=1, pipelines=1, members=[member], leader="w0", nonce="n",
        reason=ResizeReason.START,
    )  # fmt: skip
    layout = StageLayout(generation, 0, [(0, 0)], Cut([range(len(units))], job.micro_batch_size))
    micro_batches = job.dealer.train(0, 1, job.micro_batch_size)[0]
    steps, measurements, predicted, waits = [], [], [], []
    for turn in range(_TURNS + 1):
        started = time.perf_counter()
        runner.train(0, micro_batches, job.dataset.train)
        trained = time.perf_counter()
        costs = measure_costs(runner, layout, groups, job.dataset.train, Control(), trained - started)
        if turn > 0:
            steps.append(trained - started)
            measurements.append(time.perf_counter() - trained)
            waits.append(costs.not_before)
            predicted.append(job.layouts.step_model(costs).step_seconds(0, layout.cut, 1))
    step, measurement = statistics.median(steps), statistics.median(measurements)
    return {
        "step_seconds": step,
        "predicted_step_seconds": statistics.median(predicted),
        "measurement_seconds": measurement,
        "steps_until_the_next": statistics.median(waits),
        "share": measurement / (statistics.median(waits) * step),
    }


def main() -> int:
    rows, cases = [], []
    for shape, frozen, stages in CASES:
        sizes, times = shape.sizes(frozen), shape.times(frozen)
        theirs, ours, ours_by_time = greedy(sizes, stages), partition(sizes, stages), partition(times, stages)
        worse = largest(sizes, theirs) / largest(sizes, ours) - 1
        worse_by_time = largest(times, theirs) / largest(times, ours_by_time) - 1
        cases.append(
            {
                "model": shape.name,
                "frozen": frozen,
                "stages": stages,
                "greedy_largest": largest(sizes, theirs),
                "exact_largest": largest(sizes, ours),
                "worse": worse,
                "worse_by_time": worse_by_time,
            }
        )
        rows.append(
            (shape.name, frozen, stages, f"{largest(sizes, theirs):.2f}", f"{largest(sizes, ours):.2f}",
             f"{worse:+.1%}", f"{worse_by_time:+.1%}")
        )  # fmt: skip
    columns = ["model", "frozen", "stages", "greedy, M params", "exact", "greedy is worse", "by time"]
    print_table("The largest stage", columns, rows)
    seconds = seconds_of(1000, 64)
    median = statistics.median(seconds)
    print(f"1,000 layers x 64 stages: {median * 1e3:.2f} ms (allowed: {LIMIT_SECONDS * 1e3:.0f} ms)")
    measured = measuring()
    print(
        f"measuring 12 blocks: {measured['measurement_seconds']:.2f} s, a step: {measured['step_seconds']:.2f} s,"
        f" predicted {measured['predicted_step_seconds']:.2f} s; the next after {measured['steps_until_the_next']:.0f}"
        f" steps at least: {measured['share']:.2%} of the time (allowed: {LARGEST_SHARE:.0%})"
    )
    path = write_result(
        "partition",
        {
            "seconds_1000x64": median,
            "seconds_1000x64_spread": spread(seconds),
            "cases": cases,
            "measuring": measured,
        },
    )
    print(f"written to {path.relative_to(ROOT)}")
    return 0 if median < LIMIT_SECONDS and measured["share"] < 1.1 * LARGEST_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
