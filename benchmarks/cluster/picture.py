"""Draws the benchmark: GPU-hours by the share of jobs that freeze, and times by load."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

#: Policy: colour and style.
_STYLES = {
    "static": ("#8a97a3", "--"),
    "shortest_first": ("#b8c2cb", ":"),
    "pollux": ("#d08a2e", "--"),
    "pollux_freeze": ("#d08a2e", "-"),
    "freeze": ("#5b6b78", "-"),
    "widen": ("#3a7ca5", "-"),
    "release": ("#8e6bbf", "--"),
    "release_starting": ("#8e6bbf", "-"),
    "auto": ("#2a9d5c", "-"),
}


def draw(
    cells: Mapping[str, Any], shares: Sequence[float], loads: Sequence[float], at: tuple[str, str], path: Path
) -> None:
    """Draw the picture.

    Args:
        cells: figures by share, load and policy, as in the result.
        shares: shares of the elastic jobs that freeze.
        loads: loads.
        at: the share at which loads are compared, and the load at which shares are.
        path: where to write it.
    """
    share, load = at
    figure = Figure(figsize=(11.0, 3.6), dpi=140, facecolor="white")
    hours, completion, queue = figure.subplots(1, 3)
    for policy, (colour, style) in _STYLES.items():
        along_shares = [cells[f"share{round(100 * one)}"][load][policy] for one in shares]
        along_loads = [cells[share][f"load{round(10 * one):02}"][policy] for one in loads]
        lines = (
            (hours, [100 * one for one in shares], [(one["gpu_hours_ratio"], 0.0) for one in along_shares]),
            (completion, loads, [_mean(one["jct_hours_elastic"]) for one in along_loads]),
            (queue, loads, [_mean(one["queue_hours_all"]) for one in along_loads]),
        )
        for axes, places, values in lines:
            means, bars = zip(*values, strict=True)
            axes.errorbar(
                places, means, yerr=bars, color=colour, linestyle=style, capsize=2, linewidth=1.4, label=policy
            )
    hours.set(xlabel="elastic jobs that freeze, %", ylabel="GPU-hours, static = 1", title=f"load {_words(load)}")
    completion.set(
        xlabel="load", ylabel="hours to the end, elastic jobs", title=f"{share.removeprefix('share')} % freeze"
    )
    queue.set(
        xlabel="load", ylabel="hours in the queue, mean of all jobs", title=f"{share.removeprefix('share')} % freeze"
    )
    for axes in (hours, completion, queue):
        axes.grid(color="#dfe5ea", linewidth=0.6)
        axes.spines[:].set_visible(False)
        axes.title.set_size(9)
    figure.legend(*hours.get_legend_handles_labels(), fontsize=7, frameon=False, loc="outside lower center", ncols=9)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path)


def _mean(figure: Mapping[str, float]) -> tuple[float, float]:
    return figure["mean"], figure["std"]


def _words(load: str) -> str:
    return f"{int(load.removeprefix('load')) / 10:.1f}"


def scatter(each: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw the seconds that jobs took against those that the simulator says, by policy."""
    figure = Figure(figsize=(5.0, 4.6), dpi=140, facecolor="white")
    axes = figure.subplots()
    longest = max(max(one["real"], one["simulated"]) for found in each.values() for one in found)
    axes.plot([0, longest], [0, longest], color="#8a97a3", linewidth=0.8)
    axes.fill_between([0, longest], [0, 0.9 * longest], [0, 1.1 * longest], color="#eef2f5", label="within 10 %")
    for policy, found in each.items():
        places = [one["simulated"] for one in found], [one["real"] for one in found]
        axes.scatter(*places, s=14, color=_STYLES[policy][0], label=policy)
    axes.set(xlabel="seconds from arrival to end, simulated", ylabel="the same, on real kubelets")
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    axes.grid(color="#dfe5ea", linewidth=0.6)
    axes.spines[:].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
