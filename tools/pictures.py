"""The documentation's pictures of real runs and pages; `make pictures` makes them."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image, ImageChops
from rich.console import Console, RenderableType

from tools.devcluster import debian
from tools.devcluster.layout import REPOSITORY

TERMINAL_WIDTH = 100
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_PIXELS_A_POINT = 2
_LONGEST = 3000  #: points of a page that is shown whole
_MARGIN = 40  #: pixels below it


def terminal(shown: RenderableType, title: str) -> str:
    """What a terminal shows, as an SVG that loads nothing."""
    console = Console(width=TERMINAL_WIDTH, record=True, force_terminal=True, file=StringIO())
    console.print(shown)
    return _FONTS.sub("", console.export_svg(title=title, unique_id="terminal"))


def gpus_by_job(samples: Sequence[tuple[float, Mapping[str, int]]], capacity: int) -> Figure:
    """GPUs that each job holds, stacked, over the seconds since the first sample.

    Args:
        samples: seconds, and GPUs by the job's name; a job that is missing holds none.
        capacity: GPUs that there are for all of them.
    """
    start = samples[0][0]
    before = [None, *(held for _, held in samples)]
    changes = [one for one, held in zip(samples, before, strict=False) if one[1] != held]
    samples = [*changes, samples[-1]]
    times = [time - start for time, _ in samples]
    jobs = list(dict.fromkeys(job for _, held in samples for job in held))
    figure = Figure(figsize=(9.0, 3.2), facecolor="white")
    axes = figure.subplots()
    rows = [[held.get(job, 0) for _, held in samples] for job in jobs]
    axes.stackplot(times, rows, labels=jobs, step="post", colors=["#2a7fb8", "#e0902f", "#5a9e6f"], alpha=0.85)
    axes.axhline(capacity, color="#22303c", linewidth=1.0, linestyle="--")
    axes.annotate(f"{capacity} GPUs", (0, capacity), xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.set(xlim=(0, times[-1]), ylim=(0, capacity * 1.25), xlabel="seconds", ylabel="GPUs held")
    axes.set_yticks(range(capacity + 1))
    axes.legend(loc="upper right", ncols=len(jobs), fontsize=9, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


def browser(profile: Path) -> list[str]:
    """Chromium without a window and without a network; `profile` is its own folder. Runs in `debian.environment()`."""
    debian.obtain(debian.BROWSER)
    return [
        str(debian.program("chromium")), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr",
    ]  # fmt: skip


def screenshot(page: Path, picture: Path, *, width: int, height: int | None = None) -> None:
    """Writes what a browser shows of a file, in points, as a PNG; without a height all of it.

    Raises:
        ValueError: the page is longer than any that was thought of.
    """
    _shoot(page, picture, width, height or _LONGEST)
    if height is None:
        with Image.open(picture) as shown:
            whole = shown.convert("RGB")
        box = ImageChops.difference(
            whole, Image.new("RGB", whole.size, whole.getpixel((0, whole.height - 1)))
        ).getbbox()
        end = whole.height if box is None else box[3] + _MARGIN
        if end > whole.height:
            raise ValueError(f"{page}: longer than {_LONGEST} points")
        whole.crop((0, 0, whole.width, end)).save(picture, optimize=True)


def _shoot(page: Path, picture: Path, width: int, height: int) -> None:
    with tempfile.TemporaryDirectory() as profile:
        look = [
            f"--window-size={width},{height}", f"--force-device-scale-factor={_PIXELS_A_POINT}",
            f"--screenshot={picture.resolve()}", page.resolve().as_uri(),
        ]  # fmt: skip
        command = [*browser(Path(profile)), *look]
        subprocess.run(command, env=debian.environment(), check=True, capture_output=True)


def main() -> None:
    """Writes docs/images/front-page.png: the documentation as it is now, in a browser."""
    with tempfile.TemporaryDirectory() as site:
        build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", site]
        subprocess.run(build, cwd=REPOSITORY, check=True)
        screenshot(Path(site) / "index.html", REPOSITORY / "docs" / "images" / "front-page.png", width=1280, height=900)


if __name__ == "__main__":
    main()
