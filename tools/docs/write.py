"""Renders all generated files below docs/."""

from pathlib import Path

from tools.devcluster.layout import REPOSITORY
from tools.docs import api, benchmarks, charts, commandline, pictures, schedules, values

DOCS = REPOSITORY / "docs"


def rendered() -> dict[Path, str]:
    """The text of each file."""
    pages = {"api.md": api, "benchmarks.md": benchmarks, "commands.md": commandline, "values.md": values}
    drawn = pictures.rendered() | charts.rendered() | schedules.rendered()
    return {DOCS / name: page.rendered() for name, page in pages.items()} | {
        DOCS / "images" / name: text for name, text in drawn.items()
    }
