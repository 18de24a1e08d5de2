"""Writes the timeline of a record as an HTML page and as an SVG file."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

from .draw import draw
from .record import Record

#: Widths of the page's drawings in pixels. The page shows the widest one that fits.
WIDTHS = (340, 500, 740, 1100)
_MARGIN = 16
_STYLE = """
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: #22303c; background: white; max-width: 1132px; margin: 0 auto;
  padding: 16px; overflow-wrap: anywhere }
h1 { font-size: 1.4em; margin: .3em 0 } h2 { font-size: 1.1em; margin: 1.6em 0 .4em }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(100px, 1fr)); gap: 8px; margin: 0 0 16px }
.facts div { background: #f7f9fb; border-radius: 8px; padding: 6px 12px }
dt { font-size: 12px; color: #5d6b78 } dd { margin: 0; font-size: 17px; font-weight: 600 }
figure { margin: 0 } figure svg { display: none; width: 100%; height: auto }
figcaption { font-size: 13px; color: #5d6b78; margin-top: 6px }
.wide { overflow-x: auto } table { border-collapse: collapse; white-space: nowrap; font-size: 14px }
th, td { padding: .3em .8em; text-align: right; border-bottom: 1px solid #dfe5ea }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
"""
_CAPTION = (
    "Layers by the stage that holds them, the first at the bottom. On top: stages × pipelines"  # noqa: RUF001
    " of each layout, and the reason for it. A dashed line is a freeze,"
    " a dotted red one the end of a failed trial."
)


def write_timeline(record: Record, name: str, folder: Path) -> tuple[Path, Path]:
    """Writes `timeline.html`, which needs no other file, and `timeline.svg`. Returns both paths.

    Args:
        record: the record of the run.
        name: name of the run, for titles.
        folder: folder for both files. It is made if it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page, picture = folder / "timeline.html", folder / "timeline.svg"
    drawings = {width: draw(record, f"Timeline of {name}", width) for width in WIDTHS}
    page.write_text(_page(record, name, drawings), encoding="utf-8")
    picture.write_text(drawings[WIDTHS[-1]], encoding="utf-8")
    return page, picture


def _page(record: Record, name: str, drawings: dict[int, str]) -> str:
    figures = "".join(svg.replace("<svg ", f'<svg class="w{width}" ', 1) for width, svg in drawings.items())
    facts = "".join(f"<div><dt>{escape(title)}</dt><dd>{escape(value)}</dd></div>" for title, value in _facts(record))
    regroups = _table(
        "regroups",
        "Layouts",
        (
            "reason", "generation", "at s", "stages", "pipelines", "frozen", "first step", "pause s", "bytes moved",
        ),
        (
            (one.reason, one.generation, f"{one.time:.1f}", one.stages, one.pipelines, one.frozen, one.first_step,
             f"{one.pause_seconds:.3f}", f"{one.bytes_moved:,}")
            for one in record.regroups
        ),
    )  # fmt: skip
    schedules = _table(
        "schedules",
        "Schedules",
        ("schedule", "generation", "idle", "frozen ahead", "why not the spec's"),
        (
            (
                one.schedule,
                one.generation,
                _optional(one.idle_share, ".0%"),
                _optional(one.ahead_share, ".0%"),
                one.why_schedule,
            )
            for one in record.regroups
        ),
    )
    freezes = _table(
        "freezes",
        "Freezes",
        ("at s", "step", "frozen layers", "why"),
        (
            (f"{one.time:.1f}", one.step, f"{one.frozen} of {record.num_layers}", one.why_thawed)
            for one in record.freezes
        ),
    )
    levels = "" if len(record.visits) < 2 else _table(
        "levels",
        "Levels",
        ("level", "at s", "first step", "pause s", "bytes moved"),
        (
            (one.level, f"{one.time:.1f}", one.first_step, _optional(one.pause_seconds, ".3f"),
             _optional(one.bytes_moved, ","))
            for one in record.visits
        ),
    )  # fmt: skip
    title = escape(name)
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Timeline of {title}</title><style>{_STYLE}{_shown()}</style></head>
<body>
<h1>{title}</h1>
<p>{escape(record.outcome)}</p>
<dl class="facts">{facts}</dl>
<figure>{figures}<figcaption>{escape(_CAPTION)}</figcaption></figure>
{regroups}
{schedules}
{freezes}
{levels}
</body>
</html>
"""


def _optional(value: float | None, form: str) -> str:
    """The value in this form; empty if it is unknown."""
    return "" if value is None else f"{value:{form}}"


def _facts(record: Record) -> list[tuple[str, str]]:
    """Titles and values of the figures at the top of the page."""
    first = record.regroups[0]
    whole = first.gpus * sum(one.end - one.time for one in record.regroups)
    saved = 1 - record.gpu_seconds / whole if whole else 0.0
    paused = sum(one.pause_seconds for one in record.regroups[1:]) + sum(
        one.pause_seconds or 0 for one in record.visits
    )
    return [
        ("seconds", f"{record.seconds:,.0f}"),
        ("steps", f"{len(record.steps):,}"),
        ("regroups", f"{len(record.regroups) - 1}"),
        ("paused for", f"{paused:.2f} s"),
        ("GPU-seconds", f"{record.gpu_seconds:,.0f}"),
        ("GPU time saved", f"{round(100 * saved)}%"),
    ]


def _shown() -> str:
    """CSS that shows only the widest drawing that fits the screen, or the narrowest drawing if none fits."""
    bounds = [0, *(width + 2 * _MARGIN for width in WIDTHS[1:]), 10**6]
    return "".join(
        f"@media (min-width: {low}px) and (max-width: {high - 0.02}px) {{ figure .w{width} {{ display: block }} }}\n"
        for width, (low, high) in zip(WIDTHS, pairwise(bounds), strict=True)
    )


def _table(name: str, caption: str, titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    table = f'<table id="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<h2>{escape(caption)}</h2><div class="wide">{table}</div>'
