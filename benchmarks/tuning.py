"""What freezing costs and what it saves: accuracy and GPU time by `alpha`, and by when freezing begins.

The model and data of examples/vit-digits.yaml, for fewer epochs. Accuracy is that of runs in this process, because
layouts change no number (docs/rules.md). GPU time is that of the layouts which the operator would choose with
`onPack: Release`, by the times of the layers as measured here and without pauses, as `pipetransformer plan --measure`
gives it.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from pipetransformer import Evaluation, train
from pipetransformer.job.load import load_job
from pipetransformer.library.forecast import Forecast, measure_here
from pipetransformer.partition import ModelCosts
from pipetransformer_client.phases import phases, savings
from pipetransformer_contract.api import JobSpec, PipeTrainingJob, trainer_spec
from tests.testkit import ROOT
from tests.testkit.results import RESULTS, print_table, spread, write_result

MANIFEST = ROOT / "examples" / "vit-digits.yaml"
EPOCHS = 8
ALPHAS = (0.2, 1 / 3, 0.5)
#: Epochs before the first decision; one epoch lies between decisions.
STARTS = (1, 4)
NOTHING_FROZEN = "nothing frozen"


def job_spec(freeze: dict[str, Any], seed: int) -> JobSpec:
    """The example's job with another policy, seed and length."""
    manifest = yaml.safe_load(MANIFEST.read_text())
    manifest["spec"]["training"] |= {"epochs": EPOCHS, "seed": seed}
    manifest["spec"]["freeze"] = freeze
    manifest["spec"]["elasticPolicy"]["onPack"] = "Release"
    return PipeTrainingJob.from_manifest(manifest).spec


def accuracy(spec: JobSpec) -> float:
    """Of the held-out samples, after training in this process."""
    with tempfile.TemporaryDirectory() as folder:
        result = train(
            model=spec.model,
            data=spec.data,
            training=spec.training,
            freeze=spec.freeze,
            evaluation=Evaluation(every_epochs=EPOCHS),
            run_dir=folder,
        )
    return result.metrics["accuracy"]


def gpu_time(spec: JobSpec, costs: ModelCosts) -> float:
    """GPU time that the job holds, as a share of what it would hold with nothing frozen."""
    forecast = Forecast.of(trainer_spec(spec), costs)
    saved = savings(phases(spec, forecast), spec, forecast)
    assert saved is not None, "the schedule does not depend on gradients"
    return 1 - saved.gpu_time


def draw(cases: dict[str, Any], path: Path) -> None:
    """Accuracy over GPU time; a line for each start, a point for each alpha, bars from the worst seed to the best."""
    figure = Figure(figsize=(7.2, 4.0), dpi=140, facecolor="white")
    axes = figure.subplots()
    series = dict.fromkeys(case["series"] for case in cases.values())
    for name, style in zip(series, ("ks", "o-", "o--"), strict=True):
        found = sorted((case for case in cases.values() if case["series"] == name), key=lambda case: case["gpu_time"])
        times, means = [case["gpu_time"] for case in found], [case["mean_accuracy"] for case in found]
        bars = [
            [mean - case["accuracy"]["min"] for mean, case in zip(means, found, strict=True)],
            [case["accuracy"]["max"] - mean for mean, case in zip(means, found, strict=True)],
        ]
        axes.errorbar(times, means, yerr=bars, fmt=style, label=name, capsize=3, linewidth=1.4)
        for case in found:
            if "alpha" in case:
                place = (case["gpu_time"], case["mean_accuracy"])
                axes.annotate(f"{case['alpha']:.2g}", place, xytext=(6, -11), textcoords="offset points", fontsize=8)
    axes.set(xlabel="GPU time held, nothing frozen = 1", ylabel="accuracy")
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    axes.grid(color="#dfe5ea", linewidth=0.6)
    axes.spines[:].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    seeds: list[int] = parser.parse_args().seeds
    policies: dict[str, dict[str, Any]] = {NOTHING_FROZEN: {"policy": "None"}}
    for epochs in STARTS:
        for alpha in ALPHAS:
            freeze = {"policy": "PaperSchedule", "alpha": alpha, "startAfterEpochs": epochs, "intervalEpochs": 1}
            policies[f"alpha {alpha:.2g} after {epochs} epochs"] = freeze
    costs = measure_here(load_job(trainer_spec(job_spec({"policy": "None"}, 0), num_shards=1)))
    cases: dict[str, Any] = {}
    for name, freeze in policies.items():
        found = [accuracy(job_spec(freeze, seed)) for seed in seeds]
        start = freeze.get("startAfterEpochs")
        cases[name] = {
            "series": NOTHING_FROZEN if start is None else f"decisions each epoch after epoch {start}",
            "mean_accuracy": statistics.mean(found),
            "accuracy": spread(found),
            "gpu_time": gpu_time(job_spec(freeze, 0), costs),
            **({"alpha": freeze["alpha"]} if "alpha" in freeze else {}),
        }
        print(
            f"{name}: accuracy {cases[name]['mean_accuracy']:.3f}, GPU time {cases[name]['gpu_time']:.2f}", flush=True
        )
    print_table(
        f"examples/vit-digits.yaml, {EPOCHS} epochs, {len(seeds)} seeds",
        ["", "accuracy", "worst seed", "best seed", "GPU time"],
        [
            [name, case["mean_accuracy"], case["accuracy"]["min"], case["accuracy"]["max"], case["gpu_time"]]
            for name, case in cases.items()
        ],
    )
    draw(cases, RESULTS / "tuning.png")
    path = write_result("tuning", {"epochs": EPOCHS, "seeds": seeds, "cases": cases})
    print(f"written to {path.relative_to(ROOT)} and tuning.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
