"""Draws a record as an SVG: layers by stage, GPUs, speed, loss and held-out metrics over one axis of time.

Text has the same size in a drawing of any width, so narrow screens get a drawing of their own. A label that would touch
another label is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from pipetransformer_contract.words import counted

from .drawing import ACTIVE, FAINT, FONT_SIZE, FROZEN, INK, MOVED, Drawing, text_width
from .record import Record, Span
from .scale import Scale, rounded, short, ticks, time_ticks

#: The metric that shares the chart of the training loss.
LOSS = "loss"

_HELD, _SPEED, _LOSS, _METRIC, _FAILED, _FREE, _RULE = (
    "#b9c7d4", "#3d5a80", "#b5651d", "#2a7fb8", "#c2452d", "#8f9ba6", "#e3e9ee",
)  # fmt: skip
_LEFT, _RIGHT = 44.0, 12.0  #: beside the charts
_TITLE, _LANE, _AXIS, _LEGEND = 32.0, 42.0, 32.0, 22.0  #: heights
_GPUS, _CURVE = 56.0, 64.0
_LAYER, _LAYERS = 11.0, (96.0, 200.0)  #: height of one layer; minimum and maximum height of all layers
_HALF_WINDOW = 4  #: values on each side in a running median
_LEGENDS = (
    (ACTIVE, "trains"), (FROZEN, "frozen"), (_HELD, "GPU held"), (_FREE, "released"), (MOVED, "regroup"),
    (_FAILED, "after a failure"),
)  # fmt: skip


@dataclass(frozen=True)
class _Curve:
    """A chart of a value over time.

    Attributes:
        title: title of the chart.
        colour: colour of line and dots.
        line: (seconds, value) points of the line.
        points: (seconds, value) of evaluations, drawn as dots.
        from_zero: whether the value axis includes 0.
    """

    title: str
    colour: str
    line: tuple[tuple[float, float], ...]
    points: tuple[tuple[float, float], ...] = ()
    from_zero: bool = True


def draw(record: Record, title: str, width: float) -> str:
    """Returns an SVG that is `width` pixels wide."""
    curves = _curves(record)
    layers = min(max(_LAYER * record.num_layers, _LAYERS[0]), _LAYERS[1])
    rows = _legend_rows(width)
    height = _LEGEND * len(rows) + 2 * _TITLE + _LANE + layers + _GPUS + (_TITLE + _CURVE) * len(curves) + _AXIS
    chart = _Chart(record, Drawing(title, width, height))
    chart.legend(rows)
    top = _LEGEND * len(rows) + _TITLE
    chart.layers(top, layers)
    top += _LANE + layers + _TITLE
    chart.gpus(top)
    top += _GPUS + _TITLE
    for curve in curves:
        chart.curve(curve, top)
        top += _CURVE + _TITLE
    chart.time(height - _AXIS)
    return chart.drawing.text()


def _curves(record: Record) -> list[_Curve]:
    """The charts of speed, loss, and each metric of the evaluations. Charts without any value are left out."""
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


def _medians(points: Sequence[tuple[float, float]]) -> list[float]:
    """The running median of the values. So a single slow step, such as one with a regroup, does not hide the others."""
    values = [value for _, value in points]
    windows = [sorted(values[max(0, at - _HALF_WINDOW) : at + _HALF_WINDOW + 1]) for at in range(len(values))]
    return [window[len(window) // 2] for window in windows]


def _legend_rows(width: float) -> list[list[tuple[str, str, float]]]:
    """The legend in rows that fit the width: for each entry its colour, its word and its left edge in pixels."""
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
    """Charts below each other that share one time axis."""

    def __init__(self, record: Record, drawing: Drawing) -> None:
        self.drawing = drawing
        self._record = record
        self._x = Scale(0, record.seconds, _LEFT, drawing.width - _RIGHT)

    def legend(self, rows: Sequence[Sequence[tuple[str, str, float]]]) -> None:
        """Explains the colours."""
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
        """Draws the layers of each stage over time. The first layer is at the bottom, and frozen layers have their own
        colour. Above are the layouts."""
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
            for held in cuts:
                upper, lower = y.at(held.last + 1), y.at(held.first)
                self._inside(spans[0].start, spans[-1].end, upper, lower, f"stage {held.stage}")

    def _span(self, span: Span, y: Scale) -> None:
        """Draws the stages in one period: frozen and training layers in their colours, then lines between layers and
        between stages."""
        left, right = self._x.at(span.start), self._x.at(span.end)
        for held in span.cuts:
            frozen = min(max(span.frozen, held.first), held.last + 1)
            for low, high, colour in ((held.first, frozen, FROZEN), (frozen, held.last + 1, ACTIVE)):
                if low < high:
                    tall = y.at(low) - y.at(high)
                    self.drawing.box(left, y.at(high), right - left, tall, fill=colour, line="none", radius=0)
        if abs(y.at(1) - y.at(0)) >= 7:
            for layer in range(1, self._record.num_layers):
                rule = [(left, y.at(layer)), (right, y.at(layer))]
                self.drawing.polyline(rule, colour="white", width=0.6, opacity=0.5)
        for held in span.cuts[1:]:
            rule = [(left, y.at(held.first)), (right, y.at(held.first))]
            self.drawing.polyline(rule, colour="white", width=2.5)
        self.drawing.polyline([(left, y.end), (left, y.start)], colour="white", width=1)

    def _layouts(self, bottom: float) -> None:
        """Writes each layout above its period, and the reason of each regroup where it fits.

        Consecutive periods with the same layout share a label. Labels that do not fit are left out. Layouts after a
        failure get theirs first, then layouts of long periods.
        """
        runs = [
            list(run)
            for _, run in groupby(self._record.regroups, key=lambda one: (one.stages, one.pipelines, one.after_failure))
        ]
        for run in sorted(runs, key=lambda run: (not run[0].after_failure, run[0].time - run[-1].end)):
            middle = self._x.at((run[0].time + run[-1].end) / 2)
            colour = _FAILED if run[0].after_failure else INK
            words = f"{run[0].stages} × {run[0].pipelines}"  # noqa: RUF001 - it is read, not typed
            for line in (bottom - 18, bottom):
                if self.drawing.label(middle, line, words, colour=colour, anchor="middle", bold=True):
                    break
        for regroup in self._record.regroups:
            middle = self._x.at((regroup.time + regroup.end) / 2)
            reason = regroup.reason.lower()
            if text_width(reason) <= self._x.at(regroup.end) - self._x.at(regroup.time):
                colour = _FAILED if regroup.after_failure else FAINT
                self.drawing.label(middle, bottom, reason, colour=colour, anchor="middle")

    def gpus(self, top: float) -> None:
        """Draws the GPUs that each generation holds. A dashed frame shows the GPUs that the job has released."""
        most = max(regroup.gpus for regroup in self._record.regroups)
        self._title(top, "GPUs held, one a worker")
        y = Scale(0, most, top + _GPUS, top)
        for value in {0, most}:
            self._tick(y, value)
        before = 0
        for regroup in self._record.regroups:
            left, right = self._x.at(regroup.time), self._x.at(regroup.end)
            held = y.at(regroup.gpus)
            self.drawing.box(left, held, right - left, y.start - held, fill=_HELD, line="none", radius=0)
            before = max(before, regroup.gpus)
            if regroup.gpus < before:
                frame = [(left, y.at(before)), (right, y.at(before)), (right, held), (left, held), (left, y.at(before))]
                self.drawing.polyline(frame, colour=_FREE, width=1, dashes="4 3")
                words = f"{before - regroup.gpus} released"
                self._inside(regroup.time, regroup.end, y.at(before), held, words, colour=FAINT)
        self._marks(top, y.start)
        for count, run in groupby(self._record.regroups, key=lambda one: one.gpus):
            same = list(run)
            self._inside(same[0].time, same[-1].end, y.at(count), y.start, counted(count, "GPU"))

    def curve(self, curve: _Curve, top: float) -> None:
        """Draws a value over time. Values in one column of pixels are drawn as their mean, and their range is pale."""
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
        """Draws the time axis."""
        for seconds, words in time_ticks(self._record.seconds, int(self.drawing.width / 75)):
            x = self._x.at(seconds)
            self.drawing.polyline([(x, bottom), (x, bottom + 4)], colour=FAINT, width=1)
            self.drawing.label(x, bottom + 22, words, colour=FAINT, anchor="middle")

    def _marks(self, top: float, bottom: float) -> None:
        """Draws a vertical line at each regroup, a dashed line at each freeze, and a dotted line where a failed trial
        thawed layers."""
        for freeze in self._record.freezes:
            x = self._x.at(freeze.time)
            colour, dashes = (_FAILED, "1 3") if freeze.why_thawed else (FROZEN, "3 3")
            self.drawing.polyline([(x, top), (x, bottom)], colour=colour, width=1, dashes=dashes)
        for regroup in self._record.regroups[1:]:
            x = self._x.at(regroup.time)
            colour = _FAILED if regroup.after_failure else MOVED
            self.drawing.polyline([(x, top - 3), (x, bottom)], colour=colour, width=1.2)

    def _title(self, top: float, words: str, at_end: str = "", colour: str = INK) -> None:
        room = self._x.end - _LEFT
        while text_width(words, bold=True) > room:
            words = words[:-2] + "…"
        self.drawing.label(_LEFT, top - 9, words, colour=colour, bold=True)
        if at_end:
            self.drawing.label(self._x.end, top - 9, at_end, colour=colour, anchor="end")

    def _tick(self, y: Scale, value: float) -> None:
        """Draws a horizontal line at a value, with the value on the left."""
        rule = [(self._x.start, y.at(value)), (self._x.end, y.at(value))]
        self.drawing.polyline(rule, colour=_RULE, width=1)
        self.drawing.label(_LEFT - 6, y.at(value) + 4.5, short(value), colour=FAINT, anchor="end")

    def _inside(self, start: float, end: float, upper: float, lower: float, words: str, *, colour: str = INK) -> None:
        """Writes words in the middle of a rectangle if they fit. The rectangle reaches from `start` to `end` in
        seconds, and from `upper` to `lower` in pixels."""
        left, right = self._x.at(start), self._x.at(end)
        if text_width(words) + 4 <= right - left and lower - upper >= FONT_SIZE + 2:
            middle = (upper + lower) / 2 + 0.35 * FONT_SIZE
            self.drawing.label((left + right) / 2, middle, words, colour=colour, anchor="middle")
