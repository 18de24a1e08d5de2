"""Draws a record: layers, width and GPUs, and loss, over one axis of time."""

from collections.abc import Iterable

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .record import Record

_INK, _GRID, _FROZEN, _REGROUP, _LOSS = "#22303c", "#dfe5ea", "#2a7fb8", "#c2452d", "#b36f17"
_SIZE = (12.0, 8.4)
_LEAST_LABELLED_SHARE = 0.03


def draw(record: Record) -> Figure:
    """A figure of three rows with a common axis of seconds."""
    figure = Figure(figsize=_SIZE, dpi=140, facecolor="white")
    layers, width, loss = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1.4, 1.4])
    _draw_layers(layers, record)
    _draw_width(width, record)
    _draw_loss(loss, record)
    for axes in (layers, width, loss):
        for regroup in record.regroups[1:]:
            axes.axvline(regroup.time, color=_REGROUP, linewidth=1.0)
        axes.set_xlim(0, record.seconds)
        _plain(axes)
    loss.set_xlabel("seconds since the start")
    figure.tight_layout()
    return figure


def _draw_layers(axes: Axes, record: Record) -> None:
    """Blocks upwards, coloured by the stage that holds them, frozen ones hatched."""
    colours = matplotlib.colormaps["Set2"]
    for span in record.spans:
        length = span.end - span.start
        for stage, (first, last) in enumerate(span.cuts):
            axes.broken_barh(
                [(span.start, length)],
                (first, last - first + 1),
                facecolor=colours(stage % colours.N),
                edgecolor="white",
                linewidth=0.6,
            )
        if span.frozen:
            axes.broken_barh(
                [(span.start, length)],
                (0, span.frozen),
                facecolor="#ffffff90",
                edgecolor=_FROZEN,
                hatch="////",
                linewidth=0,
            )
    ends = [*(regroup.time for regroup in record.regroups[1:]), record.seconds]
    for regroup, end in zip(record.regroups, ends, strict=True):
        if end - regroup.time >= _LEAST_LABELLED_SHARE * record.seconds:
            axes.annotate(
                f"{regroup.stages} x {regroup.pipelines}",
                ((regroup.time + end) / 2, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                color=_REGROUP,
                fontsize=9,
            )
    axes.set_ylim(0, record.num_layers)
    axes.set_ylabel("block")
    hatched = Patch(facecolor="white", edgecolor=_FROZEN, hatch="////", label="frozen")
    stages = max(span.stages for span in record.spans)
    shown = [Patch(facecolor=colours(stage % colours.N), label=f"stage {stage}") for stage in range(min(stages, 8))]
    axes.legend(handles=[*shown, hatched], fontsize=8, loc="upper left", framealpha=0.9)


def _draw_width(axes: Axes, record: Record) -> None:
    for label, values, style in (
        ("GPUs", [regroup.stages * regroup.pipelines for regroup in record.regroups], "-"),
        ("stages (K)", [regroup.stages for regroup in record.regroups], "--"),
        ("pipelines (R)", [regroup.pipelines for regroup in record.regroups], ":"),
    ):
        times = [*(regroup.time for regroup in record.regroups), record.seconds]
        axes.step(times, [*values, values[-1]], where="post", label=label, linestyle=style, linewidth=1.6)
    most = max(regroup.stages * regroup.pipelines for regroup in record.regroups)
    axes.set_ylim(0, 1.4 * most)
    axes.legend(fontsize=8, loc="upper left", ncols=3, framealpha=0.9)
    axes.set_ylabel("workers")


def _draw_loss(axes: Axes, record: Record) -> None:
    known = [(step.time, step.loss) for step in record.steps if step.loss is not None]
    axes.plot([time for time, _ in known], [loss for _, loss in known], color=_LOSS, linewidth=1.0)
    axes.set_ylabel("loss", color=_LOSS)
    axes.set_ylim(bottom=0)
    speed = axes.twinx()
    timed = [(step.time, step.samples_per_second) for step in record.steps if step.samples_per_second is not None]
    speed.plot([time for time, _ in timed], list(_medians([value for _, value in timed])), color=_INK, linewidth=1.2)
    speed.set_ylabel("samples/s")
    speed.set_ylim(bottom=0)
    _plain(speed)


def _medians(values: list[float], half_window: int = 4) -> Iterable[float]:
    """Running median: one step that waited for a regroup must not hide the others."""
    for place in range(len(values)):
        window = sorted(values[max(0, place - half_window) : place + half_window + 1])
        yield window[len(window) // 2]


def _plain(axes: Axes) -> None:
    axes.grid(axis="x", color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=_INK, length=0)
    axes.spines[:].set_visible(False)
