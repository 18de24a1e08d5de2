"""Whether a V-cycle saves a small GPT floating-point operations, against two baselines: the large and the small model.

The large model gets its full schedule, and the V-cycle 75 % of its operations. The small model alone gets as many as
the V-cycle, because a V-cycle that does not beat it saves nothing. Each runs at the best of three learning rates for
the first seed. All are whole jobs of one worker, paired by seed. A level change is timed on two workers, beside a
regroup of the same job.

A whole run takes minutes and all of them take hours, so `--keep` names a file that finished runs go on from.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pipetransformer.data.tokens import VOCABULARY
from pipetransformer_contract.spec import TrainerSpec
from tests.testkit import ROOT
from tests.testkit.results import RESULTS, print_table, write_result
from tests.testkit.trainer.harness import Ran, Scripted, run_job

LENGTH, BATCH = 64, 32
RATES = (1e-3, 2e-3, 4e-3)
SMALL_RATES = CYCLE_RATES = (2e-3, 4e-3, 8e-3)
#: The V-cycle's operations over the large model's.
BUDGET = 0.75
#: Most of a level change over a regroup.
CHANGE_FACTOR = 1.5
#: Most of a run.
RUN_SECONDS = 1800.0
LARGE, SMALL, CYCLE = "large model", "small model alone", "V-cycle"


@dataclass(frozen=True)
class Size:
    """A GPT of this many layers, heads and channels."""

    layers: int
    heads: int
    width: int

    @property
    def token_flops(self) -> int:
        """Operations of training one token: three times those of the forward's products of matrices.

        A layer has 12 d^2 weights. Attention multiplies with the keys and the values of all positions.
        """
        layer = 2 * 12 * self.width**2 + 2 * 2 * LENGTH * self.width
        return 3 * (self.layers * layer + 2 * self.width * VOCABULARY)

    @property
    def step_flops(self) -> int:
        """Operations of one step."""
        return BATCH * LENGTH * self.token_flops


BIG, LITTLE = Size(4, 4, 64), Size(2, 2, 32)


@dataclass(frozen=True)
class Plan:
    """Steps of each run. `descent` and `ascent` are the V-cycle's."""

    large: int
    descent: int
    ascent: int
    evaluations: int = 25

    @property
    def flops(self) -> float:
        """What V-cycle and small model may take."""
        return BUDGET * self.large * BIG.step_flops

    @property
    def cycle(self) -> int:
        """Steps of the whole V-cycle."""
        last = (self.flops - self.ascent * LITTLE.step_flops) / BIG.step_flops - self.descent
        return self.descent + self.ascent + int(last)

    @property
    def small(self) -> int:
        return int(self.flops / LITTLE.step_flops)


@dataclass(frozen=True)
class Curve:
    """Held-out loss by the operations up to it."""

    flops: list[float]
    losses: list[float]

    @property
    def final(self) -> float:
        return self.losses[-1]

    def flops_at(self, loss: float) -> float | None:
        """Operations until the loss is reached; None if it is not."""
        return next((flops for flops, here in zip(self.flops, self.losses, strict=True) if here <= loss), None)


def spec_of(size: Size, steps: int, rate: float, seed: int, plan: Plan, folder: Path, *, levels: bool) -> TrainerSpec:
    cycle = {"levels": 2, "alpha": 0.5, "descentSteps": plan.descent, "ascentSteps": plan.ascent}
    return TrainerSpec.model_validate(
        {
            "model": {
                "name": "huggingface",
                "numLayers": size.layers,
                "options": {
                    "model_type": "gpt2", "n_embd": size.width, "n_head": size.heads, "n_positions": LENGTH,
                    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
                },
            },
            "data": {"name": "text", "options": {"length": LENGTH}},
            "training": {
                "steps": steps,
                "globalBatchSize": BATCH,
                "optimizer": {"learningRate": rate, "weightDecay": 0.01},
                "learningRateSchedule": {"shape": "Cosine"},
                "maxGradientNorm": 1.0,
                "seed": seed,
            },
            "evaluation": {"everySteps": -(-steps // plan.evaluations)},
            "checkpoint": {"location": str(folder / "checkpoints")},
            **({"multiLevel": cycle} if levels else {}),
        }
    )  # fmt: skip


@dataclass(frozen=True)
class Whole:
    """A job of one worker, from its first step to its last."""

    size: Size
    steps: int
    rate: float
    seed: int
    plan: Plan
    levels: bool = False

    def curve(self) -> Curve:
        """Train the job and read its record."""
        with tempfile.TemporaryDirectory(prefix="bench-multilevel-") as temporary:
            folder = Path(temporary)
            spec = spec_of(self.size, self.steps, self.rate, self.seed, self.plan, folder, levels=self.levels)
            run = run_job(spec, [Scripted(1, 1, [0])], folder / "run", patience_seconds=RUN_SECONDS)
            spent, total = [0.0], 0.0
            for line in run.steps:
                total += (LITTLE if line["level"] else self.size).step_flops
                spent.append(total)
            found = evaluations(run)
        return Curve([spent[step] for step, _ in found], [loss for _, loss in found])


class Curves:
    """The curves of whole runs, `at_once` of them at a time. A file keeps those that finished."""

    def __init__(self, keep: Path | None, at_once: int) -> None:
        self._keep, self._at_once = keep, at_once
        self._known: dict[str, Curve] = {}
        if keep is not None and keep.exists():
            for line in keep.read_text().splitlines():
                entry = json.loads(line)
                self._known[json.dumps(entry["run"])] = Curve(**entry["curve"])

    def of(self, runs: Sequence[Whole]) -> list[Curve]:
        """The curve of each of `runs`, in their order; those that are not known are trained now."""
        with ThreadPoolExecutor(self._at_once) as threads:
            return list(threads.map(self._one, runs))

    def _one(self, run: Whole) -> Curve:
        key = json.dumps(asdict(run))
        if key not in self._known:
            self._known[key] = found = run.curve()
            print(f"{run}: final loss {found.final:.4f}", flush=True)
            if self._keep is not None:
                with self._keep.open("a") as file:
                    file.write(json.dumps({"run": asdict(run), "curve": asdict(found)}) + "\n")
        return self._known[key]


def evaluations(run: Ran) -> list[tuple[int, float]]:
    """Committed steps and held-out loss of each evaluation."""
    return [(event["step"], event["metrics"]["loss"]) for event in run.events("Evaluated")]


def best(runs: Sequence[Whole], known: Curves) -> Whole:
    """The run of the least final loss."""
    return min(zip(known.of(runs), runs, strict=True), key=lambda pair: pair[0].final)[1]


def level_changes(width: int, jobs: int) -> dict[str, Any]:
    """Time the level changes and the regroups of so many jobs.

    The slower kind of change counts, down or up. Its median and that of the regroups are compared, because single
    pauses differ by half.
    """
    ran = []
    for _ in range(jobs):
        with tempfile.TemporaryDirectory(prefix="bench-multilevel-") as temporary:
            ran.append(_change_in_one_job(Path(temporary), width))
    changed = [statistics.median(pauses) for pauses in zip(*(job["changes"] for job in ran), strict=True)]
    moved = statistics.median(pause for job in ran for pause in job["regroups"])
    return {
        "level_change_seconds": max(changed),
        "level_change_seconds_down": changed[0],
        "level_change_seconds_up": changed[1],
        "level_change_bytes": ran[-1]["change_bytes"],
        "level_change_phases": ran[-1]["phases"],
        "regroup_seconds": moved,
        "regroup_bytes": ran[-1]["regroup_bytes"],
        "level_change_over_regroup": max(changed) / moved,
        "level_change_jobs": jobs,
    }


def _change_in_one_job(folder: Path, width: int) -> dict[str, Any]:
    """Time level changes of 12 layers on two workers, and regroups of the same job that replace a worker.

    Both are from the end of the last step before to the end of the first one after, less a steady step.
    """
    visit = 8
    spec = TrainerSpec.model_validate(
        {
            "model": {"name": "vit", "numLayers": 12, "hiddenSize": width, "numHeads": 4, "mlpSize": 4 * width,
                      "patchSize": 8},
            "data": {"name": "digits"},
            "training": {"steps": 5 * visit, "globalBatchSize": 16},
            "pipeline": {"stages": 2, "microBatchSize": 4},
            "checkpoint": {"location": str(folder / "checkpoints"), "everySteps": 1000},
            "multiLevel": {"descentSteps": visit, "ascentSteps": visit},
            "workers": 2,
        }
    )  # fmt: skip
    script = [Scripted(2, 1, [0, 1]), Scripted(2, 1, [0, 2], at_step=3 * visit, leavers=[1]),
              Scripted(2, 1, [0, 3], at_step=4 * visit, leavers=[2])]  # fmt: skip
    run = run_job(spec, script, folder / "run")
    changes, regroups = run.events("LevelChanged"), run.events("GenerationCommitted")[1:]
    return {
        "changes": [_pause(run, line) for line in changes],
        "regroups": [_pause(run, line) for line in regroups],
        "change_bytes": [line["bytesMoved"] for line in changes],
        "regroup_bytes": [line["bytesMoved"] for line in regroups],
        "phases": [line["phases"] for line in changes],
    }


def _pause(run: Ran, event: dict[str, Any]) -> float:
    first = event["firstStep"]
    steady: float = statistics.median(16 / line["samplesPerSecond"] for line in run.steps[first + 2 : first + 7])
    return float(event["pauseSeconds"]) - steady


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    """Held-out loss by operations, one line a run."""
    figure = Figure(figsize=(6.4, 4))
    axes = figure.add_subplot()
    for (name, runs), colour in zip(curves.items(), ("#3b6ea5", "#b8860b", "#2e8b57"), strict=True):
        for number, run in enumerate(runs):
            label = name if number == 0 else None
            axes.plot([flops / 1e12 for flops in run.flops], run.losses, color=colour, linewidth=1.2, label=label)
    axes.set(xlabel="operations of training, 10^12", ylabel="held-out loss")
    axes.legend(fontsize=8, frameon=False)
    axes.grid(color="#dfe5ea", linewidth=0.6)
    axes.spines[:].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2500, help="of the large model; the others' follow")
    parser.add_argument("--width", type=int, default=256, help="of the model whose level change is timed; 256: 100 MB")
    parser.add_argument("--jobs", type=int, default=5, help="whose level changes are timed")
    parser.add_argument("--only-changes", action="store_true", help="time level changes, and write no result")
    parser.add_argument("--keep", type=Path, help="a file: its runs count, and new ones are added to it")
    parser.add_argument("--at-once", type=int, default=1, help="whole runs at a time, of a core each")
    parser.add_argument("--dry", action="store_true", help="write no result")
    arguments = parser.parse_args()
    plan = Plan(arguments.steps, descent=round(0.06 * arguments.steps), ascent=round(0.6 * arguments.steps))
    change = level_changes(arguments.width, arguments.jobs)
    print({name: value for name, value in change.items() if isinstance(value, float)}, flush=True)
    if arguments.only_changes:
        return 0 if change["level_change_over_regroup"] <= CHANGE_FACTOR else 1
    known = Curves(arguments.keep, arguments.at_once)
    chosen = [
        best([Whole(BIG, plan.large, rate, 0, plan) for rate in RATES], known),
        best([Whole(LITTLE, plan.small, rate, 0, plan) for rate in SMALL_RATES], known),
        best([Whole(BIG, plan.cycle, rate, 0, plan, levels=True) for rate in CYCLE_RATES], known),
    ]
    found = known.of([replace(run, seed=seed) for seed in range(arguments.seeds) for run in chosen])
    curves = {LARGE: found[0::3], SMALL: found[1::3], CYCLE: found[2::3]}
    figures = {
        **change,
        **compared(curves, plan),
        "learning_rates": dict(zip(curves, (run.rate for run in chosen), strict=True)),
    }
    print_table(
        f"{arguments.seeds} seeds: final held-out loss",
        ["", "operations, 10^12", *(f"seed {seed}" for seed in range(arguments.seeds))],
        [[name, runs[0].flops[-1] / 1e12, *(run.final for run in runs)] for name, runs in curves.items()],
    )
    print({name: value for name, value in figures.items() if not isinstance(value, (list, dict))})
    if not arguments.dry:
        draw(curves, RESULTS / "multilevel.png")
        path = write_result("multilevel", figures)
        print(f"written to {path.relative_to(ROOT)} and multilevel.png")
    met = figures["loss_difference_mean"] <= 0 and figures["flops_saving_median"] >= 1 - BUDGET
    return 0 if met and figures["beats_small_alone"] and change["level_change_over_regroup"] <= CHANGE_FACTOR else 1


def compared(curves: dict[str, list[Curve]], plan: Plan) -> dict[str, Any]:
    """The V-cycle's loss less the large model's, and what it saves until that loss. A loss that it never reaches saves
    nothing."""
    pairs = list(zip(curves[CYCLE], curves[LARGE], strict=True))
    savings = []
    for cycle, large in pairs:
        reached = cycle.flops_at(large.final)
        savings.append(0.0 if reached is None else 1 - reached / (plan.large * BIG.step_flops))
    return {
        "loss_difference_mean": statistics.mean(cycle.final - large.final for cycle, large in pairs),
        "loss_differences": [cycle.final - large.final for cycle, large in pairs],
        "flops_saving_median": statistics.median(savings),
        "flops_savings": savings,
        "loss_large": [run.final for run in curves[LARGE]],
        "loss_small_alone": [run.final for run in curves[SMALL]],
        "loss_vcycle": [run.final for run in curves[CYCLE]],
        "beats_small_alone": all(
            cycle.final < small.final for cycle, small in zip(curves[CYCLE], curves[SMALL], strict=True)
        ),
        "curves": {name: [{"flops": run.flops, "loss": run.losses} for run in runs] for name, runs in curves.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
