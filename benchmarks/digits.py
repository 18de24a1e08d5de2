"""Does freezing cost accuracy? A job from random weights with and without it, three seeds, through the same controller.

The runs differ in `freeze.policy` and the seed alone. `accuracy_difference` is the frozen mean less the unfrozen one.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path

import yaml

from pipetransformer_contract.api.manifest import read_job
from pipetransformer_contract.api.status import ConditionType
from pipetransformer_operator.local.run import run_job
from tests.testkit import ROOT
from tests.testkit.results import print_table, spread, write_result

MANIFEST = ROOT / "examples" / "vit-digits.yaml"
#: The bar: freezing may move the mean test accuracy by this much.
TOLERANCE = 0.01


def run(seed: int, *, freeze: bool, folder: Path) -> dict[str, object]:
    """Train the job once and return its `summary.json`."""
    job = yaml.safe_load(MANIFEST.read_text())
    job["spec"]["training"]["seed"] = seed
    if not freeze:
        job["spec"]["freeze"] = {"policy": "None"}
    run_dir = folder / f"{'frozen' if freeze else 'unfrozen'}-{seed}"
    run_dir.mkdir()
    manifest = run_dir / "job.yaml"
    manifest.write_text(yaml.safe_dump(job))
    status = asyncio.run(run_job(read_job(manifest, run_dir), run_dir))
    if not status.is_true(ConditionType.COMPLETE):
        raise RuntimeError(f"{run_dir.name} did not complete: {status.condition(ConditionType.FAILED)}")
    summary: dict[str, object] = json.loads((run_dir / "summary.json").read_text())
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds: list[int] = parser.parse_args().seeds
    accuracy: dict[bool, list[float]] = {True: [], False: []}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="bench-digits-") as folder:
        for seed in seeds:
            for freeze in (True, False):
                print(f"seed {seed}, {'with' if freeze else 'without'} freezing ...", flush=True)
                summary = run(seed, freeze=freeze, folder=Path(folder))
                accuracy[freeze].append(float(str(summary["test_accuracy"])))
                seconds[freeze].append(float(str(summary["wall_seconds"])))
    difference = statistics.mean(accuracy[True]) - statistics.mean(accuracy[False])
    print_table(
        "examples/vit-digits.yaml",
        ["seed", "frozen: accuracy", "seconds", "unfrozen: accuracy", "seconds"],
        list(zip(seeds, accuracy[True], seconds[True], accuracy[False], seconds[False], strict=True)),
    )
    print(f"mean accuracy, frozen less unfrozen: {difference:+.4f} (allowed: {-TOLERANCE:+.2f})")
    path = write_result(
        "digits",
        {
            "seeds": seeds,
            "accuracy_frozen": accuracy[True],
            "accuracy_unfrozen": accuracy[False],
            "accuracy_difference": difference,
            "wall_seconds_frozen": spread(seconds[True]),
            "wall_seconds_unfrozen": spread(seconds[False]),
            "speedup": statistics.median(seconds[False]) / statistics.median(seconds[True]),
        },
    )
    print(f"written to {path.relative_to(ROOT)}")
    return 0 if difference >= -TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
