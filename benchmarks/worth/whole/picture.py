"""A picture of a case's runs: GPUs held over time. The area is the bill."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from .case import Case
from .took import Took


def draw(case: Case, runs: Mapping[str, Took], about: Mapping[str, str], path: Path) -> None:
    """One panel for each run, on one axis of time.

    Args:
        case: of the runs.
        runs: one run of each way.
        about: what each way is.
        path: of the PNG file.
    """
    figure = Figure(figsize=(7.2, 0.55 * len(runs) + 0.9), dpi=140, facecolor="white")
    panels: Any = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(run.seconds for run in runs.values())
    for axes, (name, run) in zip(panels, runs.items(), strict=True):
        times = [*(begun for begun, _ in run.held), run.seconds]
        gpus = [held for _, held in run.held]
        axes.stairs(gpus, times, fill=True, color="#3b7dd8")
        axes.set(xlim=(0, 1.45 * longest), ylim=(0, 1.1 * case.gpus), yticks=[0, case.gpus])
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        label = f"{about[name]}\n{run.seconds:.0f} s, {run.gpu_seconds:.0f} GPU-seconds, {run.layout_names}"
        axes.text(run.seconds + 0.01 * longest, 0.5 * case.gpus, label, fontsize=7, va="center")
    panels[-1].set_xlabel("seconds; height: GPUs held", fontsize=8)
    figure.tight_layout(h_pad=0.2)
    figure.savefig(path)
