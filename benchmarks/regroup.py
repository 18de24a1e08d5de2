"""The pause of a change of size: our regroup in process against torchrun's restart from a checkpoint.

Same model, data, cut, micro-batches and machine, one after the other in one run: two pipelines become one, and one
becomes two again. A pause runs from the end of the last old step to the end of the first new one, less the median
steady new step, on both sides. torchrun runs at its best settings, and only where it is compared.
Ours is held against the machine, too: what the same bytes take between the same pairs by bare P2P, in the same run.
`--quick` runs one case without torchrun, and writes nothing: for a change that is to be measured in a minute.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bare_transfer import bare_seconds
from benchmarks.torchrun import BEST, TorchrunJob
from pipetransformer_contract.spec import TrainerSpec
from tests.testkit import ROOT
from tests.testkit.results import RESULTS, print_table, spread, write_result
from tests.testkit.trainer.harness import Ran, Scripted, run_job

#: Width of the model by the size of its active state: parameters and moments of 12 blocks.
WIDTHS = {"10mb": 80, "100mb": 256, "1gb": 768}
#: Least of torchrun's pause over ours with two workers.
BARS = {"10mb": 15.0, "100mb": 15.0, "1gb": 40.0}
#: The same with four workers and 100 MB.
BAR = 10.0
#: Most of our pause over bare P2P, and besides it.
BARE_FACTOR, BARE_SECONDS = 1.5, 0.15
#: Steps that a pause is held against, in seconds, by size.
STEP_SECONDS = {"100mb": 0.25, "1gb": 2.0}
#: Most of a shrink in seconds, by workers.
SHRINK_BARS = {2: 0.05, 8: 0.08}
#: Most of growing by 1 GB over bare P2P.
BARE_BAR = 0.5
BATCH = 16
#: How often each case is measured.
ROUNDS = 3
SHRINK, GROW = "shrink", "grow"


@dataclass(frozen=True)
class Case:
    """A model on `workers` workers, which halve and double."""

    size: str
    workers: int

    @property
    def name(self) -> str:
        return f"{self.size}, {self.workers} workers"

    @property
    def stages(self) -> int:
        return self.workers // 2

    @property
    def steps(self) -> int:
        """Steps a layout, enough for a median of the steady ones."""
        return 6 if self.size == "1gb" else 12

    @property
    def torchrun_rounds(self) -> int:
        """How often torchrun is: its pauses are 20 times as long, and vary less."""
        return 1 if self.workers == 2 or (self.workers == 4 and self.size == "100mb") else 0

    def spec(self, steps: int) -> TrainerSpec:
        width = WIDTHS[self.size]
        return TrainerSpec.model_validate(
            {
                "model": {
                    "name": "vit",
                    "numLayers": 12,
                    "hiddenSize": width,
                    "numHeads": 4,
                    "mlpSize": 4 * width,
                    "patchSize": 8,  # few tokens: steps are short, so that what they vary by does not hide the pause
                },
                "data": {"name": "digits"},
                "training": {"steps": steps, "globalBatchSize": BATCH},
                "freeze": {"policy": "None"},
                "pipeline": {"stages": self.stages, "microBatchSize": 4},
                "numShards": 2,
                "workers": self.workers,
            }
        )

    def script(self) -> list[Scripted]:
        """Joiners are processes that wait, warm, as the operator's prepared pods do."""
        half = self.workers // 2
        first, rest, joiners = range(half), range(half, self.workers), range(self.workers, self.workers + half)
        return [
            Scripted(self.stages, 2, [*first, *rest]),
            Scripted(self.stages, 1, [*first], at_step=self.steps, leavers=[*rest]),
            Scripted(self.stages, 2, [*first, *joiners], at_step=2 * self.steps),
        ]


@dataclass
class Measured:
    """Seconds of each pause by change, one entry a round; `phases` are the leader's."""

    ours: dict[str, list[float]] = field(default_factory=lambda: {SHRINK: [], GROW: []})
    bare: dict[str, list[float]] = field(default_factory=lambda: {SHRINK: [], GROW: []})
    phases: dict[str, list[dict[str, float]]] = field(default_factory=lambda: {SHRINK: [], GROW: []})
    moved: dict[str, int] = field(default_factory=dict)
    torchrun: dict[str, list[float]] = field(default_factory=lambda: {SHRINK: [], GROW: []})

    def bound(self, change: str) -> float:
        """The longest pause that bare P2P allows."""
        return BARE_FACTOR * statistics.median(self.bare[change]) + BARE_SECONDS

    def pause(self, change: str) -> float:
        """The median pause in seconds."""
        return statistics.median(self.ours[change])

    def ratio(self) -> float:
        """torchrun's median pause over ours, of the worse change."""
        return min(statistics.median(self.torchrun[c]) / statistics.median(self.ours[c]) for c in (SHRINK, GROW))


def measure_ours(case: Case, measured: Measured, run: Ran) -> None:
    """Add the pauses of one run, and what bare P2P takes for each."""
    for change, generation in zip((SHRINK, GROW), run.summary["generations"][1:], strict=True):
        first = generation["first_step"]
        steady = [BATCH / step["samplesPerSecond"] for step in run.steps[first + 1 : first + case.steps]]
        step_seconds = statistics.median(steady)
        measured.ours[change].append(generation["pause_seconds"] - step_seconds)
        phases = dict(generation["phases"])
        phases["first step"] = max(0.0, phases["first step"] - step_seconds)
        measured.phases[change].append(phases)
        measured.moved[change] = generation["bytes_moved"]
        transfers = [(source, target, count) for source, target, count in generation["transfers"]]
        measured.bare[change].append(bare_seconds(case.workers, transfers))


def measure_torchrun(case: Case, measured: Measured, folder: Path) -> None:
    """Add the pauses of one elastic torchrun job."""
    spec = folder.with_suffix(".json")
    spec.write_text(json.dumps(case.spec(1_000_000).to_wire()))
    half = case.workers // 2
    job = TorchrunJob(folder, spec, case.stages, (half, case.workers), BEST, 0.1)
    try:
        job.start(case.workers)
        job.wait_steps(case.workers, case.steps, 0.0, 300)
        begun = time.time()
        job.leave(half)
        measured.torchrun[SHRINK].append(job.pause(case.workers, half, begun, steady_steps=case.steps, timeout=300))
        begun = time.time()
        job.start(half)
        measured.torchrun[GROW].append(job.pause(half, case.workers, begun, steady_steps=case.steps, timeout=300))
    finally:
        job.stop()


def figures(measured: Mapping[Case, Measured]) -> dict[str, float]:
    """The figures with a bar, each of the worst of the cases that it is about. Those without a case are left out."""
    found: dict[str, float] = {}
    for size, seconds in STEP_SECONDS.items():
        pauses = [one.pause(change) for case, one in measured.items() if case.size == size for change in (SHRINK, GROW)]
        if pauses:
            found[f"pause_over_step_{size}"] = max(pauses) / seconds
    if over_bare := [
        one.pause(GROW) / statistics.median(one.bare[GROW]) for case, one in measured.items() if case.size == "1gb"
    ]:
        found["pause_over_bare_p2p_1gb"] = max(over_bare)
    for workers in SHRINK_BARS:
        if shrinks := [one.pause(SHRINK) for case, one in measured.items() if case.workers == workers]:
            found[f"shrink_seconds_{workers}"] = max(shrinks)
    for case, one in measured.items():
        if one.torchrun[GROW]:
            found[f"ratio_{case.size}" if case.workers == 2 else "ratio"] = one.ratio()
    return found


def is_met(name: str, value: float) -> bool:
    """Whether a figure of `figures` meets its bar."""
    if name.startswith("ratio"):
        return value >= (BARS[name.removeprefix("ratio_")] if name != "ratio" else BAR)
    if name.startswith("shrink"):
        return value <= SHRINK_BARS[int(name.removeprefix("shrink_seconds_"))]
    return value <= BARE_BAR if name.startswith("pause_over_bare") else value < 1


def draw(measured: Mapping[Case, Measured], path: Path) -> None:
    """Bars of the phases of each pause, with what bare P2P allows."""
    from matplotlib import pyplot

    bars = [(case, change) for case in measured for change in (SHRINK, GROW)]
    names = list(dict.fromkeys(name for m in measured.values() for c in m.phases.values() for p in c for name in p))
    figure, axes = pyplot.subplots(figsize=(9, 0.42 * len(bars) + 1.4), layout="constrained")
    left = [0.0] * len(bars)
    for name in names:
        widths = [
            statistics.median(phases.get(name, 0.0) for phases in measured[case].phases[change])
            for case, change in bars
        ]
        axes.barh(range(len(bars)), widths, left=left, label=name, height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    bounds = [measured[case].bound(change) for case, change in bars]
    axes.plot(bounds, range(len(bars)), "k|", markersize=14, label=f"{BARE_FACTOR:g} x bare P2P + {BARE_SECONDS:g} s")
    axes.set_yticks(range(len(bars)), [f"{case.name}, {change}" for case, change in bars])
    axes.invert_yaxis()
    axes.set_xlabel("seconds of pause on the leader, without a steady step")
    figure.legend(loc="outside right upper", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)


def show(values: Sequence[float]) -> str:
    if not values:
        return ""
    found = spread(values)
    return f"{found['median']:.2f} ({found['min']:.2f} to {found['max']:.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each case")
    parser.add_argument("--quick", action="store_true", help="one case of ours alone, and write nothing")
    arguments = parser.parse_args()
    if arguments.quick:
        whole = len(arguments.sizes) == len(WIDTHS)
        sizes, workers = ["100mb"] if whole else arguments.sizes[:1], arguments.workers[:1]
    else:
        sizes, workers = arguments.sizes, arguments.workers
    cases = [Case(size, count) for count in workers for size in sizes]
    measured = {case: Measured() for case in cases}
    with tempfile.TemporaryDirectory(prefix="bench-regroup-") as temporary:
        folder = Path(temporary)
        for number, case in itertools.product(range(arguments.rounds), cases):
            place = f"{case.size}-{case.workers}-{number}"
            print(f"{case.name}, round {number + 1}: ours ...", flush=True)
            run = run_job(case.spec(3 * case.steps), case.script(), folder / f"ours-{place}")
            measure_ours(case, measured[case], run)
            if number < case.torchrun_rounds and not arguments.quick:
                print(f"{case.name}, round {number + 1}: torchrun ...", flush=True)
                measure_torchrun(case, measured[case], folder / f"torchrun-{place}")
    met = _show(measured)
    if not arguments.quick:
        _write(measured, met)
    return 0 if all(met.values()) else 1


def _show(measured: Mapping[Case, Measured]) -> dict[str, bool]:
    """Print all pauses and figures. Returns which bars are met."""
    print_table(
        "Pause of a change of size, seconds: median (least to most)",
        ["", "moved, MB", "ours", "bare P2P", "allowed", "torchrun, best"],
        [
            [
                f"{case.name}, {change}",
                f"{found.moved[change] / 1e6:.0f}",
                show(found.ours[change]),
                show(found.bare[change]),
                f"{found.bound(change):.2f}",
                show(found.torchrun[change]),
            ]
            for case, found in measured.items()
            for change in (SHRINK, GROW)
        ],
    )
    for case, found in measured.items():
        for change in (SHRINK, GROW):
            names = dict.fromkeys(name for phases in found.phases[change] for name in phases)
            medians = {name: statistics.median(p.get(name, 0.0) for p in found.phases[change]) for name in names}
            print(f"{case.name}, {change}: " + ", ".join(f"{name} {value:.3f}" for name, value in medians.items()))
    met = {name: is_met(name, value) for name, value in figures(measured).items()}
    for name, value in figures(measured).items():
        print(f"{name}: {value:.3f}{'' if met[name] else ', its bar is missed'}")
    for case, found in measured.items():
        for change in (SHRINK, GROW):
            within = found.pause(change) <= found.bound(change)
            met[f"{case.name}, {change}"] = within
            if not within:
                print(f"{case.name}, {change}: the pause is longer than bare P2P allows")
    return met


def _write(measured: Mapping[Case, Measured], met: Mapping[str, bool]) -> None:
    draw(measured, RESULTS / "regroup.png")
    path = write_result(
        "regroup",
        {
            "cases": {
                case.name: {
                    change: {
                        "bytes_moved": found.moved[change],
                        "pause_seconds": spread(found.ours[change]),
                        "bare_seconds": spread(found.bare[change]),
                        "allowed_seconds": found.bound(change),
                        "torchrun_seconds": spread(found.torchrun[change]) if found.torchrun[change] else None,
                        "phases": found.phases[change],
                    }
                    for change in (SHRINK, GROW)
                }
                for case, found in measured.items()
            },
            "met": met,
            **figures(measured),
        },
    )
    print(f"written to {path.relative_to(ROOT)} and regroup.png")


if __name__ == "__main__":
    sys.exit(main())
