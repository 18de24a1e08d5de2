"""The picture of `make demo`: both runs over one axis of time, the GPUs that they hold, and their accuracy."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pipetransformer_client.timeline.drawing import ACTIVE, FROZEN, INK

from .lines import ACCURACY
from .measured import Measured

UNFROZEN, FREEZING, SAVED = "#8f9ba6", "#2a7fb8", "#c3ccd4"
#: Width in inches and size of the text by the end of the file's name. The second fits a phone.
_SHAPES = {"": (9.0, 9.0), "-narrow": (3.6, 8.0)}
_HEIGHT, _DPI = 7.2, 120
#: Pixels of the smallest text in any of them.
LEAST_TEXT_PIXELS = min(size for _, size in _SHAPES.values()) * _DPI / 72


def draw(unfrozen: Measured, freezing: Measured, folder: Path) -> list[Path]:
    """Writes `demo.png`, and `demo-narrow.png` for a phone. Returns their paths."""
    drawn = []
    for suffix, (width, size) in _SHAPES.items():
        with pyplot.rc_context({"font.size": size, "axes.spines.top": False, "axes.spines.right": False}):
            figure, (first, second, gpus, accuracy) = pyplot.subplots(
                4, 1, sharex=True, figsize=(width, _HEIGHT), height_ratios=(3, 3, 2, 3), layout="constrained"
            )
            _layers(first, unfrozen, "unfrozen")
            _layers(second, freezing, "freezing")
            _gpus(gpus, unfrozen, freezing)
            _accuracy(accuracy, unfrozen, freezing)
            accuracy.set_xlabel("seconds of training")
            accuracy.set_xlim(0, 1.02 * max(unfrozen.record.seconds, freezing.record.seconds))
            path = folder / f"demo{suffix}.png"
            figure.savefig(path, dpi=_DPI)
            pyplot.close(figure)
            drawn.append(path)
    return drawn


def _layers(axes: Axes, measured: Measured, name: str) -> None:
    """Layers by stage, the first at the bottom; frozen ones in their colour. Layouts stand above."""
    record = measured.record
    for span in record.spans:
        place = (span.start, span.end - span.start)
        axes.broken_barh([place], (0, span.frozen), facecolors=FROZEN)
        axes.broken_barh([place], (span.frozen, record.num_layers - span.frozen), facecolors=ACTIVE)
        for held in span.cuts[1:]:
            axes.plot((span.start, span.end), (held.first, held.first), color="white", linewidth=1.5)
    shown = ""
    for regroup in record.regroups:
        words = f"{regroup.stages} × {regroup.pipelines}"  # noqa: RUF001 - it is read, not typed
        if regroup.time > 0:
            axes.axvline(regroup.time, color=INK, linewidth=0.6)
        if words != shown:
            axes.text(regroup.time, record.num_layers + 0.3, words, color=INK)
        shown = words
    axes.set_ylim(0, record.num_layers)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.set_title(f"{name}: layers by stage (blue: frozen)", loc="left", pad=16, fontweight="bold")


def _gpus(axes: Axes, unfrozen: Measured, freezing: Measured) -> None:
    """GPUs held over time. The area under a line is that run's bill."""
    for measured, colour, name in ((unfrozen, SAVED, "unfrozen"), (freezing, FREEZING, "freezing")):
        regroups = measured.record.regroups
        edges = [*(one.time for one in regroups), measured.record.seconds]
        label = f"{name}: {measured.record.gpu_seconds:.0f} GPU-seconds"
        axes.stairs([one.gpus for one in regroups], edges, fill=True, color=colour, label=label)
    axes.set_ylim(0, None)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.set_title("GPUs held (the area is the bill)", loc="left", fontweight="bold")
    axes.legend(loc="lower right")


def _accuracy(axes: Axes, unfrozen: Measured, freezing: Measured) -> None:
    """Held-out accuracy over time. The last point has its standard error."""
    for measured, colour, name in ((unfrozen, UNFROZEN, "unfrozen"), (freezing, FREEZING, "freezing")):
        points = [(one.time, 100 * one.metrics[ACCURACY]) for one in measured.record.evaluations]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour)
        axes.errorbar(
            measured.record.seconds,
            100 * measured.accuracy,
            yerr=100 * measured.standard_error,
            marker="o",
            capsize=3,
            color=colour,
            label=f"{name}: {measured.accuracy:.1%}",
        )
    axes.set_title("held-out accuracy in %", loc="left", fontweight="bold")
    axes.legend(loc="lower right")
