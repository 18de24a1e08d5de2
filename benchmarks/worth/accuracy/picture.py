"""The picture: accuracy over work for each task, the rivals as lines and freeze policies as points."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .paired import difference
from .policies import FEWER_EPOCHS, LORA, NONE, TOP
from .report import Row, Table

#: Families that are a line, with the run that nothing is frozen in as their end.
_LINES = {FEWER_EPOCHS: ("nothing frozen, fewer steps", "ks-"), TOP: ("top layers from the start", "C1v--")}
_POINTS = {"freeze": ("freeze policies", "C0o"), "trial": ("the same on trial", "C2^"), LORA: ("LoRA", "C3D")}


def draw(tables: Mapping[str, Table], path: Path) -> None:
    """One panel for each task, accuracy as points above or below the whole run with nothing frozen."""
    figure = Figure(figsize=(3.9 * len(tables), 3.6), dpi=130, facecolor="white")
    panels = figure.subplots(1, len(tables), squeeze=False)[0]
    for (name, table), axes in zip(tables.items(), panels, strict=True):
        for family, (label, style) in (_LINES | _POINTS).items():
            _plot(axes, table, family, label, style)
        axes.set(title=name, xlabel="block forwards with cache, nothing frozen = 1")
        axes.grid(color="#dfe5ea", linewidth=0.6)
        axes.spines[:].set_visible(False)
    panels[0].set_ylabel("accuracy, difference in points")
    panels[0].legend(fontsize=7, frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(path)


def _plot(axes: Axes, table: Table, family: str, label: str, style: str) -> None:
    members = (family, NONE) if family in _LINES else (family,)
    rows: list[Row] = [row for row in table.rows.values() if row.policy.family in members]
    if not rows:
        return
    points = sorted((row.work_cached, difference(row.accuracy(), table.none.accuracy()).mean) for row in rows)
    axes.plot(*zip(*points, strict=True), style, label=label, markersize=4, linewidth=1.1)
