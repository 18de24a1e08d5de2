"""Renders all generated files below docs/, and the table in README.md."""

from pathlib import Path

from tools.devcluster.layout import REPOSITORY
from tools.docs import api, benchmarks, charts, commandline, pictures, schedules, values, worth

DOCS = REPOSITORY / "docs"


def rendered() -> dict[Path, str]:
    """The text of each file."""
    pages = {"api.md": api, "benchmarks.md": benchmarks, "commands.md": commandline, "values.md": values}
    drawn = pictures.rendered() | charts.rendered() | schedules.rendered()
    images = {DOCS / "images" / name: text for name, text in drawn.items()}
    return {DOCS / name: page.rendered() for name, page in pages.items()} | images | worth.pages()
