"""The pause of a change of size: our regroup in process against torchrun's restart from a checkpoint.

Same model, data, cut, micro-batches and machine, one after the other in one run: pipelines of two stages go from two to
one (4 -> 2 workers) and from one to two (2 -> 4). torchrun runs at its default settings and at its best. A pause runs
from the end of the last old step to the end of the first new one, less the median steady new step, on both sides.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common import ROOT, print_table, spread, write_result
from benchmarks.torchrun import BEST, DEFAULT, TorchrunJob
from pipetransformer_contract.spec import TrainerSpec
from tests.trainer_harness import Ran, Scripted, run_job

BAR = 10.0
STAGES = 2
#: Steps a layout, enough for a median of the steady ones.
STEPS = 12
SHRINK, GROW = "4 -> 2", "2 -> 4"
#: Ours shrinks and grows once; joiners are processes that wait, warm, as the operator's prepared pods do.
SCRIPT = [
    Scripted(STAGES, 2, [0, 1, 2, 3]),
    Scripted(STAGES, 1, [0, 1], at_step=STEPS, leavers=[2, 3]),
    Scripted(STAGES, 2, [0, 1, 4, 5], at_step=2 * STEPS),
]


def make_spec(hidden_size: int, steps: int) -> TrainerSpec:
    """A ViT of 12 blocks; 256 wide it has about 9.5 million parameters."""
    return TrainerSpec.model_validate(
        {
            "model": {
                "name": "vit", "numLayers": 12, "hiddenSize": hidden_size, "numHeads": 4, "mlpSize": 4 * hidden_size,
            },
            "data": {"name": "digits"},
            "training": {"steps": steps, "globalBatchSize": 16},
            "freeze": {"policy": "None"},
            "pipeline": {"stages": STAGES, "microBatchSize": 4},
            "numShards": 2,
            "workers": 4,
        }
    )  # fmt: skip


def our_pauses(run: Ran) -> dict[str, float]:
    """Pauses of the shrink and the growth of one run."""
    pauses = {}
    for name, generation in zip((SHRINK, GROW), run.summary["generations"][1:], strict=True):
        first = generation["first_step"]
        steady = [16 / step["samplesPerSecond"] for step in run.steps[first + 1 : first + STEPS]]
        pauses[name] = generation["pause_seconds"] - statistics.median(steady)
    return pauses


def torchrun_pauses(folder: Path, spec: Path, settings: Mapping[str, str], monitor_interval: float) -> dict[str, float]:
    """Pauses of the shrink and the growth of one elastic torchrun job."""
    job = TorchrunJob(folder, spec, STAGES, (2, 4), settings, monitor_interval)
    try:
        job.start(4)
        job.wait_steps(4, STEPS, 0.0, 180)
        pauses = {}
        begun = time.time()
        job.leave(2)
        pauses[SHRINK] = job.pause(4, 2, begun, steady_steps=STEPS)
        begun = time.time()
        job.start(2)
        pauses[GROW] = job.pause(2, 4, begun, steady_steps=STEPS)
        return pauses
    finally:
        job.stop()


def collect(rounds: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [pauses[name] for pauses in rounds] for name in (SHRINK, GROW)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of ours and of torchrun's best; its default gets one")
    parser.add_argument("--hidden-size", type=int, default=256)
    arguments = parser.parse_args()
    ours, best, default = [], [], []
    with tempfile.TemporaryDirectory(prefix="bench-regroup-") as temporary:
        folder = Path(temporary)
        endless = folder / "spec.json"
        endless.write_text(json.dumps(make_spec(arguments.hidden_size, 1_000_000).to_wire()))
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds}: ours ...", flush=True)
            run = run_job(make_spec(arguments.hidden_size, 3 * STEPS), SCRIPT, folder / f"ours-{number}")
            ours.append(our_pauses(run))
            print(f"round {number + 1} of {arguments.rounds}: torchrun, best settings ...", flush=True)
            best.append(torchrun_pauses(folder / f"best-{number}", endless, BEST, 0.1))
        print("torchrun, default settings ...", flush=True)
        default.append(torchrun_pauses(folder / "default", endless, DEFAULT, 0.1))
    sides = {"ours": collect(ours), "torchrun, best settings": collect(best), "torchrun, defaults": collect(default)}
    print_table(
        "Pause of a change of size, seconds (median; least to most)",
        ["", SHRINK, GROW],
        [
            [side, *(f"{s['median']:.2f} ({s['min']:.2f} to {s['max']:.2f})" for s in map(spread, pauses.values()))]
            for side, pauses in sides.items()
        ],
    )
    ratios = {
        name: min(statistics.median(sides[side][name]) for side in sides if side != "ours")
        / statistics.median(sides["ours"][name])
        for name in (SHRINK, GROW)
    }
    ratio = min(ratios.values())
    print(f"ratio, torchrun's best median over ours, of the worse change: {ratio:.1f} (at least {BAR:.0f})")
    path = write_result(
        "regroup",
        {
            "hidden_size": arguments.hidden_size,
            "pause_seconds": {side: {name: spread(p) for name, p in pauses.items()} for side, pauses in sides.items()},
            "ratios": ratios,
            "ratio": ratio,
        },
    )
    print(f"written to {path.relative_to(ROOT)}")
    return 0 if ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
