"""What all benchmarks share: where results go, which machine and commit they came from, and a table to read.

A result names the command that made it, so that a number in a document can be traced.
"""

import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.testkit import ROOT
from tools.docs import benchmarks, charts, worth
from tools.machine import processor

RESULTS = ROOT / "benchmarks" / "results"
#: Changes that are not of the code: what benchmarks write.
_OUR_OUTPUT = (
    ":!benchmarks/results", ":!docs/benchmarks.md", ":!docs/images/bench-*.svg", ":!README.md", ":!docs/worth.md",
)  # fmt: skip


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes and number of `values`.

    Raises:
        ValueError: `values` is empty.
    """
    if not values:
        raise ValueError("a spread needs at least one value")
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)}


def write_result(name: str, figures: Mapping[str, object], command: str = "") -> Path:
    """Write `benchmarks/results/<name>.json`: the figures, the machine, the commit, and `make bench-<name>` as the
    command, if it is no other. Then write the pages that show results: benchmarks and their pictures, README, worth."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    document = {
        "command": command or f"make bench-{name}",
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no", "--", ".", *_OUR_OUTPUT)),
        "machine": machine(),
        **figures,
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
    (ROOT / "docs" / "benchmarks.md").write_text(benchmarks.rendered())
    for picture, drawn in charts.rendered().items():
        (ROOT / "docs" / "images" / picture).write_text(drawn)
    for page, text in worth.pages().items():
        page.write_text(text)
    return path


def commit() -> str:
    """The checkout's commit."""
    return _git("rev-parse", "HEAD")


def machine() -> dict[str, object]:
    """What results say about this machine."""
    return {
        "cores": os.cpu_count(),
        "processor": processor(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": _torch_version(),
    }


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print `rows` under `columns`; floats get three digits."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=120).print(table)


def _git(*arguments: str) -> str:
    """What git says about this checkout, which any user may own; empty if it is no checkout."""
    if not (ROOT / ".git").exists():
        return ""
    command = ["git", "-c", "safe.directory=*", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _torch_version() -> str:
    import torch

    return torch.__version__
