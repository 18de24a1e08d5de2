"""One picture of a run: which worker held which layers when, and what that did to throughput and loss."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import lines

_INK, _GRID, _FREEZE, _REGROUP = "#22303c", "#dfe5ea", "#2a7fb8", "#c2452d"
_ROW, _WIDTH, _LOWER, _MARGIN = 0.34, 12.0, 2.2, 1.5
_LEAST_LABELLED_SHARE = 0.055


@dataclass(frozen=True)
class _Bar:
    worker: str
    start: float
    end: float
    pipeline: int
    first_layer: int
    last_layer: int
    frozen_layers: int


def draw(run_dir: Path) -> Path:
    """Draw `timeline.png` from a run directory's events and steps, and return its path."""
    events = list(lines.read(run_dir / "events.jsonl"))
    steps = list(lines.read(run_dir / "steps.jsonl"))
    origin, end = events[0]["time"], events[-1]["time"] - events[0]["time"]
    bars = _bars(events, origin, end)
    workers = sorted({bar.worker for bar in bars}, key=lambda name: (len(name), name))
    upper = max(1.2, _ROW * len(workers))
    figure = Figure(figsize=(_WIDTH, upper + _LOWER + _MARGIN), dpi=140, facecolor="white")
    layers, speed = figure.subplots(2, 1, sharex=True, height_ratios=[upper, _LOWER])
    _draw_bars(layers, bars, workers, end)
    _draw_curves(speed, steps, origin)
    _mark(layers, speed, events, origin)
    figure.suptitle(_title(events, end), x=0.012, y=0.985, ha="left", va="top", color=_INK, fontsize=12, weight="bold")
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    path = run_dir / "timeline.png"
    figure.savefig(path)
    return path


def _bars(events: list[dict[str, Any]], origin: float, end: float) -> list[_Bar]:
    """One bar for each worker between two changes of who holds what; touching bars that say the same are joined.

    A freeze that moved no layer brings no roles: those before it still hold.
    """
    changes = [event for event in events if event["kind"] in ("GenerationCommitted", "Frozen")]
    roles: list[dict[str, Any]] = []
    bars: list[_Bar] = []
    open_bars: dict[str, _Bar] = {}
    for number, event in enumerate(changes):
        start = event["time"] - origin
        stop = changes[number + 1]["time"] - origin if number + 1 < len(changes) else end
        held: dict[str, _Bar] = {}
        roles = event.get("roles", roles)
        for role in roles:
            bar = _Bar(
                role["worker"],
                start,
                stop,
                role["pipeline"],
                role["first_layer"],
                role["last_layer"],
                event["frozenLayers"],
            )
            before = open_bars.get(bar.worker)
            if before is not None and _same(before, bar):
                bar = _Bar(**{**vars(bar), "start": before.start})
                bars.remove(before)
            bars.append(bar)
            held[bar.worker] = bar
        open_bars = held
    return bars


def _same(one: _Bar, other: _Bar) -> bool:
    return (one.pipeline, one.first_layer, one.last_layer, one.frozen_layers) == (
        other.pipeline,
        other.first_layer,
        other.last_layer,
        other.frozen_layers,
    )


def _draw_bars(axes: Axes, bars: list[_Bar], workers: list[str], end: float) -> None:
    colours = matplotlib.colormaps["Set2"]
    for bar in bars:
        row, length = workers.index(bar.worker), bar.end - bar.start
        count = bar.last_layer - bar.first_layer + 1
        frozen = min(max(bar.frozen_layers - bar.first_layer, 0), count) / count
        colour = colours(bar.pipeline % colours.N)
        axes.barh(row, length, left=bar.start, height=0.82, color=colour, edgecolor="white", linewidth=0.8)
        if frozen:
            # The lower part of the bar, as high as the frozen share of its layers, is hatched.
            axes.barh(
                row + 0.41 - 0.41 * frozen,
                length,
                left=bar.start,
                height=0.82 * frozen,
                facecolor="#ffffff70",
                edgecolor=_FREEZE,
                hatch="////",
                linewidth=0,
            )
        if length >= _LEAST_LABELLED_SHARE * end:
            axes.text(
                bar.start + length / 2,
                row,
                f"layers {bar.first_layer}-{bar.last_layer}",
                ha="center",
                va="center",
                color=_INK,
                fontsize=8,
                bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.2, "boxstyle": "round,pad=0.15"},
            )
    axes.set_yticks(range(len(workers)), workers, fontsize=8)
    axes.set_ylim(len(workers) - 0.5, -0.5)
    axes.set_ylabel("worker")
    _plain(axes)


def _draw_curves(axes: Axes, steps: list[dict[str, Any]], origin: float) -> None:
    times = [step["time"] - origin for step in steps]
    timed = [step for step in steps if step["samplesPerSecond"] is not None]
    speeds = _smooth([step["samplesPerSecond"] for step in timed])
    axes.plot([step["time"] - origin for step in timed], speeds, color=_INK, linewidth=1.4)
    axes.set_ylabel("samples/s")
    axes.set_xlabel("seconds since the start")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    _plain(axes)
    losses = axes.twinx()
    with_loss = [(time, step["loss"]) for time, step in zip(times, steps, strict=True) if step["loss"] is not None]
    losses.plot([time for time, _ in with_loss], [loss for _, loss in with_loss], color="#d98c2b", linewidth=1.0)
    losses.set_ylabel("loss", color="#b36f17")
    losses.set_ylim(bottom=0)
    losses.tick_params(colors="#b36f17", labelsize=8)
    losses.spines[:].set_visible(False)


def _smooth(values: list[float], half_window: int = 4) -> list[float]:
    """Running median: one step that waited for a regroup must not hide the others."""
    windows = [sorted(values[max(0, i - half_window) : i + half_window + 1]) for i in range(len(values))]
    return [window[len(window) // 2] for window in windows]


def _mark(layers: Axes, speed: Axes, events: list[dict[str, Any]], origin: float) -> None:
    """Vertical lines: a freeze says how many layers it left frozen, a regroup its stages x pipelines."""
    for event in events:
        time = event["time"] - origin
        if event["kind"] == "Frozen":
            colour, text = _FREEZE, f"{event['frozenLayers']} frozen"
        elif event["kind"] == "GenerationCommitted":
            colour, text = _REGROUP, f"{event['stages']}x{event['pipelines']}"
        else:
            continue
        for axes in (layers, speed):
            axes.axvline(time, color=colour, linewidth=1.0, linestyle="-" if colour == _REGROUP else "--", alpha=0.8)
        layers.annotate(
            text,
            (time, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(2, 12 if colour == _REGROUP else 2),
            textcoords="offset points",
            color=colour,
            fontsize=8,
        )


def _title(events: list[dict[str, Any]], end: float) -> str:
    accuracy = events[-1]["metrics"].get("accuracy") if events[-1]["kind"] == "Finished" else None
    outcome = "" if accuracy is None else f", test accuracy {accuracy:.1%}"
    return f"Who trained what: {end:.0f} s{outcome}   (K x R at each regroup; colour: pipeline; hatched: frozen)"


def _plain(axes: Axes) -> None:
    axes.grid(axis="x", color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=_INK, length=0)
    axes.spines[:].set_visible(False)
