"""A run that regroups, freezes, unfreezes and loses workers at random computes what one that never moves does.

float64: losses and gradient norms of every step, against one worker that stays alone, relative. float32: each layer's
gradient from one state in every layout, relative to its norm. bfloat16: only how far the losses go apart.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.testkit.results import print_table, write_result
from tests.testkit.trainer.equality import (
    BAR_FLOAT32,
    BAR_FLOAT64,
    BOUNDARIES_FLOAT32,
    Compared,
    compare,
    draw,
    worst_gradient,
)

#: Steps in layouts of several stages that a scenario must have, on average.
LEAST_STEPS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="random scenarios a schedule")
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    double = Compared()
    with tempfile.TemporaryDirectory(prefix="bench-equality-") as temporary:
        folder = Path(temporary)
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            scenario = draw(seed)
            print(scenario, flush=True)
            found = compare(scenario, folder / f"float64-{seed}")
            double.extend(found)
            print(f"    {found.deaths} deaths, worst {found.worst()}", flush=True)
        print("float32: gradients of one state in every layout ...", flush=True)
        single = max(
            worst_gradient(arguments.first_seed + number, boundary, folder / f"float32-{boundary}")
            for number, boundary in enumerate(BOUNDARIES_FLOAT32)
        )
        print("bfloat16 ...", flush=True)
        half = compare(draw(arguments.first_seed), folder / "bfloat16", "BFloat16")
    print_table(
        "Worst relative difference of a loss or gradient norm from one worker that stays alone",
        ["", *double.worst()],
        [
            [
                f"float64, {arguments.seeds} scenarios, {double.deaths} deaths",
                *map("{:.1e}".format, double.worst().values()),
            ],
            ["bfloat16, 1 scenario (no bar)", *map("{:.1e}".format, half.worst().values())],
            ["steps in layouts of several stages", *(double.steps[name] for name in double.worst())],
        ],
    )
    print(f"float32, a layer's gradient against its norm: {single:.1e} (at most {BAR_FLOAT32:.0e})")
    worst = max(double.worst().values())
    path = write_result(
        "equality",
        {
            "seeds": [arguments.first_seed, arguments.first_seed + arguments.seeds - 1],
            "worst_relative_difference": worst,
            "worst_relative_difference_by_schedule": double.worst(),
            "steps_of_several_stages_by_schedule": dict(double.steps),
            "deaths": double.deaths,
            "worst_float32_gradient_difference": single,
            "bfloat16_difference_by_schedule": half.worst(),
        },
    )
    print(f"written to {path.relative_to(Path.cwd())}")
    compared = min(double.steps[name] for name in double.worst()) >= LEAST_STEPS * arguments.seeds
    return 0 if worst <= BAR_FLOAT64 and single <= BAR_FLOAT32 and compared else 1


if __name__ == "__main__":
    sys.exit(main())
