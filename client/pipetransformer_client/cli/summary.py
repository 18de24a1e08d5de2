"""Prints the summary of a local run that has ended, and the paths of the timeline and the model."""

import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

COLUMNS = (
    ("generation", "generation"),
    ("stages", "stages"),
    ("pipelines", "pipelines"),
    ("frozen_layers", "frozen"),
    ("first_step", "first step"),
    ("pause_seconds", "pause s"),
    ("total_seconds", "total s"),
    ("bytes_moved", "bytes"),
)


def print_summary(console: Console, run_dir: Path) -> None:
    """Prints `summary.json` of the run's record. Prints nothing if it does not exist, as after an early failure."""
    file = run_dir / "summary.json"
    if not file.exists():
        return
    summary: dict[str, Any] = json.loads(file.read_text())
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for _, title in COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for generation in summary["generations"]:
        table.add_row(*(_cell(generation.get(key)) for key, _ in COLUMNS))
    console.print(table)
    console.print(
        f"test accuracy {_cell(summary['test_accuracy'])}, {_cell(summary['wall_seconds'])} s, {_audited(summary)}",
        highlight=False,
    )
    for name in ("timeline.html", "model"):
        if (run_dir / name).exists():
            console.print(f"{name}: {run_dir / name}", highlight=False, soft_wrap=True)


def _audited(summary: dict[str, Any]) -> str:
    """Words that say how many samples were lost and repeated. A number is unknown if it depends on ledgers that are not
    in this record."""
    lost, repeated = (
        "unknown" if count is None else count for count in (summary["samples_lost"], summary["samples_repeated"])
    )
    since = f" since step {summary['audited_from_step']}" if summary["audited_from_step"] else ""
    missing = summary["samples_unaudited"]
    elsewhere = f" (the ledgers of {missing} samples are not in this record)" if missing else ""
    return f"samples lost {lost}, repeated {repeated}{since}{elsewhere}"


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "-" if value is None else str(value)
