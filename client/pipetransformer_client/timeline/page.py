"""Writes a record's picture and the page around it."""

import io
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from .draw import draw
from .record import Record

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22303c; max-width: 1180px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.4em } svg { width: 100%; height: auto }
table { border-collapse: collapse; margin: 1em 0 } caption { text-align: left; font-weight: 600; padding: .3em 0 }
th, td { padding: .25em .9em; text-align: right; border-bottom: 1px solid #dfe5ea } td:first-child { text-align: left }
"""


def write(record: Record, name: str, folder: Path) -> tuple[Path, Path]:
    """Writes `timeline.html`, which loads nothing, and `timeline.png`; returns both paths."""
    figure = draw(record)
    picture = io.StringIO()
    figure.savefig(picture, format="svg", metadata={"Date": None})
    svg = picture.getvalue()
    folder.mkdir(parents=True, exist_ok=True)
    page, png = folder / "timeline.html", folder / "timeline.png"
    page.write_text(_page(record, name, svg[svg.index("<svg") :]), encoding="utf-8")
    figure.savefig(png)
    return page, png


def _page(record: Record, name: str, svg: str) -> str:
    first = record.regroups[0]
    whole = first.stages * first.pipelines * (record.seconds - first.time)
    paused = sum(one.pause_seconds for one in record.regroups[1:])
    facts = (
        f"{record.seconds:.0f} s, {len(record.steps)} steps, {record.outcome}."
        f" {len(record.regroups) - 1} regroups, which paused it for {paused:.2f} s."
        f" It held {record.gpu_seconds:.0f} GPU-seconds, {1 - record.gpu_seconds / whole:.0%} fewer than its first"
        " layout would have in that time."
    )
    regroups = _table(
        "regroups",
        "Layouts",
        ("why", "generation", "at s", "stages", "pipelines", "frozen", "first step", "pause s", "bytes moved"),
        (
            (one.reason, one.generation, f"{one.time:.1f}", one.stages, one.pipelines, one.frozen, one.first_step,
             f"{one.pause_seconds:.3f}", f"{one.bytes_moved:,}")
            for one in record.regroups
        ),
    )  # fmt: skip
    freezes = _table(
        "freezes",
        "Moves of the frozen boundary",
        ("at s", "step", "frozen blocks"),
        ((f"{one.time:.1f}", one.step, f"{one.frozen} of {record.num_layers}") for one in record.freezes),
    )
    title = f"{escape(name)}: who trained what"
    legend = (
        "Each block by the stage that holds it, frozen ones hatched; the numbers on top are stages x pipelines. A red"
        " line is a regroup."
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>
<body>
<h1>{title}</h1>
<p>{escape(facts)}</p>
{svg}
<p>{legend}</p>
{regroups}
{freezes}
</body>
</html>
"""


def _table(name: str, caption: str, titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    caption = f"<caption>{escape(caption)}</caption>"
    return f'<table id="{name}">{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
