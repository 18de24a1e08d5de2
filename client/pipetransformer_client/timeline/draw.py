"""Draws a record as an SVG: layers by stage, GPUs, speed, loss and held-out metrics over one axis of time.

A drawing is made for a width. Its text is as large as a page's, so a phone gets a drawing of its own. Labels are left
out where they would touch another one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from .drawing import ACTIVE, FAINT, FONT_SIZE, FROZEN, INK, MOVED, Drawing, text_width
from .record import Record, Regroup, Span
from .scale import Scale, rounded, short, ticks, time_ticks

#: Reasons of a generation after a failure: a member was lost or taken away, or a layout did not work.
FAILURES = frozenset({"Failure", "Drain", "Undo"})
LOSS = "loss"

_HELD, _SPEED, _LOSS, _METRIC, _FAILED, _FREE, _RULE = (
    "#b9c7d4", "#3d5a80", "#b5651d", "#2a7fb8", "#c2452d", "#8f9ba6", "#e3e9ee",
)  # fmt: skip
_LEFT, _RIGHT = 44.0, 12.0  #: beside the charts
_TITLE, _LANE, _AXIS, _LEGEND = 32.0, 42.0, 32.0, 22.0  #: heights
_GPUS, _CURVE = 56.0, 64.0
_LAYER, _LAYERS = 11.0, (96.0, 200.0)  #: height of a layer, and the least and most of all
_LEGENDS = (
    (ACTIVE, "trains"), (FROZEN, "frozen"), (_HELD, "GPU held"), (_FREE, "given back"), (MOVED, "regroup"),
    (_FAILED, "after a failure"),
)  # fmt: skip


@dataclass(frozen=True)
class _Curve:
    """A value over time, with the points of evaluations beside it."""

    title: str
    colour: str
    line: tuple[tuple[float, float], ...]
    points: tuple[tuple[float, float], ...] = ()
    from_zero: bool = True


def draw(record: Record, title: str, width: float) -> str:
    """The text of an SVG that is `width` pixels wide."""
    curves = _curves(record)
    layers = min(max(_LAYER * record.num_layers, _LAYERS[0]), _LAYERS[1])
    rows = _legend_rows(width)
    heights = [_LANE + layers, _GPUS, *(_CURVE for _ in curves)]
    height = _LEGEND * len(rows) + sum(_TITLE + one for one in heights) + _AXIS
    chart = _Chart(record, Drawing(title, width, height))
    chart.legend(rows)
    top = _LEGEND * len(rows) + _TITLE
    chart.layers(top, layers)
    top += heights[0] + _TITLE
    chart.gpus(top)
    for curve in curves:
        top += _TITLE + (_GPUS if curve is curves[0] else _CURVE)
        chart.curve(curve, top)
    chart.time(height - _AXIS)
    return chart.drawing.text()


def _curves(record: Record) -> list[_Curve]:
    """Speed, loss, and each further metric of the evaluations; what the record does not know is left out."""
    speeds = [(step.time, step.samples_per_second) for step in record.steps if step.samples_per_second is not None]
    losses = tuple((step.time, step.loss) for step in record.steps if step.loss is not None)
    metrics = {
        name: tuple((one.time, one.metrics[name]) for one in record.evaluations if name in one.metrics)
        for name in dict.fromkeys(name for one in record.evaluations for name in one.metrics)
    }
    held_out = metrics.pop(LOSS, ())
    found = [
        _Curve("samples/s", _SPEED, tuple(zip([time for time, _ in speeds], _medians(speeds), strict=True))),
        _Curve("loss (dots: held-out)" if held_out else "loss", _LOSS, losses, held_out),
        *(_Curve(f"held-out {name}", _METRIC, points, points, False) for name, points in metrics.items()),
    ]
    return [curve for curve in found if curve.line or curve.points]


def _medians(points: Sequence[tuple[float, float]], half_window: int = 4) -> list[float]:
    """Running median: one step that waited for a regroup must not hide the others."""
    values = [value for _, value in points]
    windows = [sorted(values[max(0, at - half_window) : at + half_window + 1]) for at in range(len(values))]
    return [window[len(window) // 2] for window in windows]


def _legend_rows(width: float) -> list[list[tuple[str, str, float]]]:
    """Colour, word and place of each entry, in as many rows as they need."""
    rows: list[list[tuple[str, str, float]]] = [[]]
    x = _RIGHT
    for colour, word in _LEGENDS:
        wide = 22 + text_width(word)
        if x + wide > width - _RIGHT and rows[-1]:
            rows.append([])
            x = _RIGHT
        rows[-1].append((colour, word, x))
        x += wide
    return rows


class _Chart:
    """Charts below each other over one axis of time."""

    def __init__(self, record: Record, drawing: Drawing) -> None:
        self.drawing = drawing
        self._record = record
        self._x = Scale(0, record.seconds, _LEFT, drawing.width - _RIGHT)
        ends = [*(regroup.time for regroup in record.regroups[1:]), record.seconds]
        self._held = list(zip(record.regroups, ends, strict=True))

    def legend(self, rows: Sequence[Sequence[tuple[str, str, float]]]) -> None:
        """What the colours mean."""
        for number, row in enumerate(rows):
            for colour, word, x in row:
                middle = 16 + _LEGEND * number
                tall = 2 if colour in (MOVED, _FAILED) else 12
                place = (x, middle - tall / 2, 12, tall)
                if colour == _FREE:
                    self.drawing.box(*place, fill="none", line=colour, dashed=True, radius=3)
                else:
                    self.drawing.box(*place, fill=colour, line="none", radius=min(tall / 2, 3))
                self.drawing.label(x + 17, middle + 4.5, word, colour=FAINT)

    def layers(self, top: float, height: float) -> None:
        """Layers upwards by stage, frozen ones in their colour; on top the layout and why it came."""
        self._title(top, "layers by stage")
        top += _LANE
        y = Scale(0, self._record.num_layers, top + height, top)
        for value in ticks(0, self._record.num_layers, 4):
            self._tick(y, value)
        for span in self._record.spans:
            self._span(span, y)
        self._marks(top, top + height)
        self._layouts(top - 9)
        for cuts, run in groupby(self._record.spans, key=lambda span: span.cuts):
            spans = list(run)
            for stage, (first, last) in enumerate(cuts):
                upper, lower = y.at(last + 1), y.at(first)
                self._inside(spans[0].start, spans[-1].end, upper, lower, f"stage {stage}")

    def _span(self, span: Span, y: Scale) -> None:
        """One rectangle a stage, and one more where its lower layers are frozen; then a rule between layers."""
        left, right = self._x.at(span.start), self._x.at(span.end)
        for first, last in span.cuts:
            frozen = min(max(span.frozen, first), last + 1)
            for low, high, colour in ((first, frozen, FROZEN), (frozen, last + 1, ACTIVE)):
                if low < high:
                    tall = y.at(low) - y.at(high)
                    self.drawing.box(left, y.at(high), right - left, tall, fill=colour, line="none", radius=0)
        if abs(y.at(1) - y.at(0)) >= 7:
            for layer in range(1, self._record.num_layers):
                rule = [(left, y.at(layer)), (right, y.at(layer))]
                self.drawing.polyline(rule, colour="white", width=0.6, opacity=0.5)
        for first, _ in span.cuts[1:]:
            self.drawing.polyline([(left, y.at(first)), (right, y.at(first))], colour="white", width=2.5)
        self.drawing.polyline([(left, y.end), (left, y.start)], colour="white", width=1)

    def _layouts(self, bottom: float) -> None:
        """Above each time its layout, those after a failure and the longest first; where there is room, why it came."""
        runs = [list(run) for _, run in groupby(self._held, key=lambda one: _named(one[0]))]
        by_length = sorted(runs, key=lambda run: (run[0][0].reason not in FAILURES, run[0][0].time - run[-1][1]))
        for run in by_length:
            regroup, end = run[0][0], run[-1][1]
            middle = self._x.at((regroup.time + end) / 2)
            colour = _FAILED if regroup.reason in FAILURES else INK
            words = f"{regroup.stages} × {regroup.pipelines}"  # noqa: RUF001 - it is read, not typed
            for line in (bottom - 18, bottom):
                if self.drawing.label(middle, line, words, colour=colour, anchor="middle", bold=True):
                    break
        for regroup, end in self._held:
            middle = self._x.at((regroup.time + end) / 2)
            reason = regroup.reason.lower()
            if text_width(reason) <= self._x.at(end) - self._x.at(regroup.time):
                colour = _FAILED if regroup.reason in FAILURES else FAINT
                self.drawing.label(middle, bottom, reason, colour=colour, anchor="middle")

    def gpus(self, top: float) -> None:
        """What each generation held, one GPU a worker; a dashed frame is what has been given back."""
        most = max(_gpus(regroup) for regroup in self._record.regroups)
        self._title(top, "GPUs held, one a worker")
        y = Scale(0, most, top + _GPUS, top)
        for value in {0, most}:
            self._tick(y, value)
        before = 0
        for regroup, end in self._held:
            left, right = self._x.at(regroup.time), self._x.at(end)
            held = y.at(_gpus(regroup))
            self.drawing.box(left, held, right - left, y.start - held, fill=_HELD, line="none", radius=0)
            if _gpus(regroup) < (before := max(before, _gpus(regroup))):
                frame = [(left, y.at(before)), (right, y.at(before)), (right, held), (left, held), (left, y.at(before))]
                self.drawing.polyline(frame, colour=_FREE, width=1, dashes="4 3")
                free = before - _gpus(regroup)
                self._inside(regroup.time, end, y.at(before), held, f"{free} given back", colour=FAINT)
        self._marks(top, y.start)
        for _, run in groupby(self._held, key=lambda one: _gpus(one[0])):
            same = list(run)
            count = _gpus(same[0][0])
            words = "1 GPU" if count == 1 else f"{count} GPUs"
            self._inside(same[0][0].time, same[-1][1], y.at(count), y.start, words)

    def curve(self, curve: _Curve, top: float) -> None:
        """A line; of many values in one pixel the range in pale and the mean."""
        values = [value for _, value in (*curve.line, *curve.points)]
        low, high = rounded(min(0, *values) if curve.from_zero else min(values), max(values))
        y = Scale(low, high, top + _CURVE, top)
        self._title(top, curve.title, f"last {short((curve.points or curve.line)[-1][1])}", curve.colour)
        for value in ticks(low, high, 3):
            self._tick(y, value)
        self._marks(top, y.start)
        columns = [
            (x, [value for _, value in points])
            for x, points in groupby(curve.line, key=lambda point: round(self._x.at(point[0])))
        ]
        upper = [(x, y.at(max(held))) for x, held in columns]
        lower = [(x, y.at(min(held))) for x, held in reversed(columns)]
        self.drawing.polyline([*upper, *lower], colour="none", fill=curve.colour, opacity=0.25)
        self.drawing.polyline([(x, y.at(sum(held) / len(held))) for x, held in columns], colour=curve.colour)
        for time, value in curve.points:
            self.drawing.add(
                f'<circle cx="{self._x.at(time):.5g}" cy="{y.at(value):.5g}" r="2.2" fill="{curve.colour}"/>'
            )

    def time(self, bottom: float) -> None:
        """The axis that all charts share."""
        for seconds, words in time_ticks(self._record.seconds, int(self.drawing.width / 75)):
            x = self._x.at(seconds)
            self.drawing.polyline([(x, bottom), (x, bottom + 4)], colour=FAINT, width=1)
            self.drawing.label(x, bottom + 22, words, colour=FAINT, anchor="middle")

    def _marks(self, top: float, bottom: float) -> None:
        """A line for each regroup, and a dashed one for each move of the boundary."""
        for freeze in self._record.freezes:
            x = self._x.at(freeze.time)
            self.drawing.polyline([(x, top), (x, bottom)], colour=FROZEN, width=1, dashes="3 3")
        for regroup in self._record.regroups[1:]:
            x = self._x.at(regroup.time)
            colour = _FAILED if regroup.reason in FAILURES else MOVED
            self.drawing.polyline([(x, top - 3), (x, bottom)], colour=colour, width=1.2)

    def _title(self, top: float, words: str, at_end: str = "", colour: str = INK) -> None:
        room = self._x.end - _LEFT
        while text_width(words, bold=True) > room:
            words = words[:-2] + "…"
        self.drawing.label(_LEFT, top - 9, words, colour=colour, bold=True)
        if at_end:
            self.drawing.label(self._x.end, top - 9, at_end, colour=colour, anchor="end")

    def _tick(self, y: Scale, value: float) -> None:
        """A rule over the chart, and its value beside it."""
        rule = [(self._x.start, y.at(value)), (self._x.end, y.at(value))]
        self.drawing.polyline(rule, colour=_RULE, width=1)
        self.drawing.label(_LEFT - 6, y.at(value) + 4.5, short(value), colour=FAINT, anchor="end")

    def _inside(self, start: float, end: float, upper: float, lower: float, words: str, *, colour: str = INK) -> None:
        """Words in the middle of a rectangle that has room for them."""
        left, right = self._x.at(start), self._x.at(end)
        if text_width(words) + 4 <= right - left and lower - upper >= FONT_SIZE + 2:
            middle = (upper + lower) / 2 + 0.35 * FONT_SIZE
            self.drawing.label((left + right) / 2, middle, words, colour=colour, anchor="middle")


def _named(regroup: Regroup) -> tuple[int, int, bool]:
    """Neighbours that are alike in this share a label."""
    return regroup.stages, regroup.pipelines, regroup.reason in FAILURES


def _gpus(regroup: Regroup) -> int:
    return regroup.stages * regroup.pipelines
