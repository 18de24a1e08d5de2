"""Draws the documentation's pictures of real runs (`make pictures`), each also narrow for a phone."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path

from rich.console import Console, RenderableType

from pipetransformer_client.timeline import draw, read_record
from pipetransformer_client.timeline.drawing import FAINT, INK, Drawing
from pipetransformer_client.timeline.scale import Scale, time_ticks
from tools.devcluster.layout import REPOSITORY

TERMINAL_WIDTH = 100
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_WIDTHS = {"": 860.0, "-narrow": 340.0}
_COLOURS = ("#2a7fb8", "#e0902f", "#5a9e6f")
_LEFT, _RIGHT, _TOP, _TALL, _AXIS = 28.0, 12.0, 44.0, 120.0, 32.0


def write(folder: Path, name: str, drawn: Callable[[float], str]) -> None:
    """Writes the drawing `drawn(width)` as NAME.svg and, for phones, as NAME-narrow.svg."""
    for suffix, width in _WIDTHS.items():
        (folder / f"{name}{suffix}.svg").write_text(drawn(width), encoding="utf-8")


def terminal(shown: RenderableType, title: str) -> str:
    """The output of a terminal as a self-contained SVG."""
    console = Console(width=TERMINAL_WIDTH, record=True, force_terminal=True, file=StringIO())
    console.print(shown)
    return _FONTS.sub("", console.export_svg(title=title, unique_id="terminal"))


def gpus_by_job(samples: Sequence[tuple[float, Mapping[str, int]]], capacity: int, width: float) -> str:
    """An SVG of the GPUs that each job holds, stacked, over the seconds since the first sample.

    Args:
        samples: time in seconds, and GPUs by the job's name. A job that is not listed holds none.
        capacity: number of GPUs of the cluster.
        width: width of the drawing in pixels.
    """
    start, end = samples[0][0], samples[-1][0]
    before = [None, *(held for _, held in samples)]
    changes = [one for one, held in zip(samples, before, strict=False) if one[1] != held]
    colours = dict(zip(dict.fromkeys(job for _, held in samples for job in held), _COLOURS, strict=False))
    drawing = Drawing("GPUs held by job", width, _TOP + _TALL + _AXIS)
    x, y = Scale(0, end - start, _LEFT, width - _RIGHT), Scale(0, capacity, _TOP + _TALL, _TOP)
    drawing.label(_LEFT, 22, "GPUs held by", bold=True)
    for place, (job, colour) in enumerate(colours.items()):
        left = _LEFT + 110 + 80 * place
        drawing.box(left, 12, 12, 12, fill=colour, line="none", radius=3)
        drawing.label(left + 17, 22, job)
    for (time, held), (until, _) in zip(changes, [*changes[1:], samples[-1]], strict=True):
        below = 0
        for job, colour in colours.items():
            count = held.get(job, 0)
            left, top = x.at(time - start), y.at(below + count)
            tall = y.at(below) - top
            drawing.box(left, top, x.at(until - start) - left, tall, fill=colour, line="none", radius=0)
            below += count
    drawing.polyline([(_LEFT, _TOP), (width - _RIGHT, _TOP)], colour=INK, width=1, dashes="5 4")
    for count in range(capacity + 1):
        drawing.label(_LEFT - 6, y.at(count) + 4.5, str(count), colour=FAINT, anchor="end")
    for seconds, words in time_ticks(end - start, int(width / 75)):
        drawing.polyline([(x.at(seconds), y.start), (x.at(seconds), y.start + 4)], colour=FAINT, width=1)
        drawing.label(x.at(seconds), y.start + 22, words, colour=FAINT, anchor="middle")
    return drawing.text()


def main(folder: Path) -> None:
    """Writes the pictures of `make demo` in docs/images: demo.png, and timeline.svg of the freezing run.

    Args:
        folder: what `make demo` wrote.
    """
    images = REPOSITORY / "docs" / "images"
    record = read_record(folder / "freezing")
    write(images, "timeline", lambda width: draw(record, "Timeline of the freezing run", width))
    for picture in ("demo.png", "demo-narrow.png"):
        shutil.copyfile(folder / picture, images / picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
