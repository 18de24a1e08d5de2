"""Pictures of the benchmarks' results: horizontal bars, beside the aim where there is one."""

import json
import math
from dataclasses import dataclass

from pipetransformer_client.timeline.drawing import ACTIVE, FAINT, FREED, MOVED, Drawing
from tools.docs.results import RESULTS, found_at

_WIDTH, _LEFT, _RIGHT, _ROW = 640, 210, 90, 22
_COLOURS = (ACTIVE, FREED)


@dataclass(frozen=True, slots=True)
class Chart:
    """What one picture shows.

    Attributes:
        title: what is measured, with its unit, and which end is better.
        series: names and paths as those of `results.found_at`; with a `*` each key is a row, and each series a colour.
        aim: a number to reach or to stay below; drawn as a line.
        logarithmic: whether the scale is.
    """

    title: str
    series: tuple[tuple[str, str], ...]
    aim: float | None = None
    logarithmic: bool = False


CHARTS = {
    "channel": Chart(
        "Seconds until all workers know of a generation; less is better",
        (
            ("1,500 workers", "seconds_all_told_1500"),
            ("4,096 workers", "seconds_all_told_4096"),
        ),
        aim=30,
    ),
    "kills": Chart(
        "Seconds from a death to the next new step; less is better",
        (("median", "median_seconds"), ("nine of ten", "p90_seconds"), ("longest", "max_seconds")),
        aim=2,
    ),
    "overhead": Chart(
        "Our throughput over the baseline's, lower 95 % bound; more is better",
        (("this trainer", "cases.*.*.lower_bound"),),
        aim=0.97,
    ),
    "regroup": Chart(
        "Seconds without training, logarithmic; less is better",
        (("regroup", "cases.*.*.pause_seconds.median"), ("torchrun's restart", "cases.*.*.torchrun_seconds.median")),
        logarithmic=True,
    ),
    "release": Chart(
        "Seconds from a freeze to a GPU for another pod, by phase; less is better",
        (("median", "phases.*.p50"), ("19 in 20", "phases.*.p95")),
    ),
    "scale": Chart(
        "Seconds until all run; less is better",
        (
            ("100 jobs", "seconds_all_running_100"),
            ("1,000 jobs", "seconds_all_running_1000"),
            ("1,000 plain Jobs", "seconds_all_running_1000_plain_jobs"),
        ),
        aim=120,
    ),
    "schedules": Chart(
        "Throughput over the baseline's, lower 95 % bound; more is better",
        (
            ("executor, K=2", "executor_over_stock_k2"),
            ("executor, K=4", "executor_over_stock_k4"),
            ("zero bubble", "zero_bubble_over_1f1b"),
            ("frozen ahead, M=4", "ahead_over_today_m4"),
            ("frozen ahead, M=8", "ahead_over_today_m8"),
            ("frozen ahead, best in place", "ahead_over_best"),
            ("slices over uniform, K=4", "terapipe_over_uniform_k4"),
            ("slices over uniform, K=8", "terapipe_over_uniform_k8"),
            ("slices over GPipe, batch 2", "terapipe_over_gpipe_batch2"),
            ("slices over GPipe, batch 1", "terapipe_over_gpipe_batch1"),
            ("slices over GPipe, K=16", "terapipe_over_gpipe_k16"),
        ),
        aim=1,
    ),
    "soak": Chart("Seconds until the job trains again, median; less is better", (("", "kinds.*.median_seconds"),)),
    "tuning": Chart("GPU time held, nothing frozen = 1; less is better", (("", "cases.*.gpu_time"),)),
}


def rendered() -> dict[str, str]:
    """Each picture by its file name, of the benchmarks that have written a result."""
    return {file_name(name): _drawn(name, chart) for name, chart in CHARTS.items() if _rows(name, chart)}


def file_name(name: str) -> str:
    """Of a benchmark's picture, below docs/images."""
    return f"bench-{name}.svg"


def _rows(name: str, chart: Chart) -> list[tuple[str, list[tuple[int, float]]]]:
    """Labels, and under each the bars: the number of the series, and the value."""
    file = RESULTS / f"{name}.json"
    if not file.exists():
        return []
    result = json.loads(file.read_text())
    rows: dict[str, list[tuple[int, float]]] = {}
    for number, (series, path) in enumerate(chart.series):
        for place, value, _ in found_at(path.split("."), result):
            if value is not None:
                rows.setdefault(", ".join(place).replace("_", " ") or series, []).append((number, float(value)))
    if not any("*" in path for _, path in chart.series):
        rows = {label: [(0, value) for _, value in bars] for label, bars in rows.items()}
    return list(rows.items())


def _drawn(name: str, chart: Chart) -> str:
    rows = _rows(name, chart)
    values = [value for _, bars in rows for _, value in bars] + ([] if chart.aim is None else [chart.aim])
    bars = sum(len(row) for _, row in rows)
    keys = [series for series, path in chart.series if "*" in path and series]
    height = 62 + _ROW * bars + 8 * len(rows) + (24 if len(keys) > 1 else 0)
    drawing = Drawing(f"{name}: {chart.title}", _WIDTH, height)
    drawing.words(16, 26, chart.title, bold=True)
    scale = _Scale(min(values), max(values), logarithmic=chart.logarithmic)
    top = 42.0
    for label, row in rows:
        drawing.words(16, top + 15, label)
        for number, value in row:
            drawing.box(_LEFT, top, scale.width(value), _ROW - 4, fill=_COLOURS[number], line="white")
            drawing.words(_LEFT + scale.width(value) + 6, top + 14, f"{value:.3g}", colour=FAINT)
            top += _ROW
        top += 8
    if chart.aim is not None:
        x = _LEFT + scale.width(chart.aim)
        drawing.polyline([(x, 36), (x, top)], colour=MOVED)
        drawing.words(x + 4, top + 8, f"aim {chart.aim:g}", colour=MOVED)
    if len(keys) > 1:
        for number, key in enumerate(keys):
            drawing.box(_LEFT + 160 * number, top + 2, 14, 14, fill=_COLOURS[number], line="white")
            drawing.words(_LEFT + 20 + 160 * number, top + 14, key, colour=FAINT)
    return drawing.text()


@dataclass(frozen=True, slots=True)
class _Scale:
    least: float
    most: float
    logarithmic: bool

    def width(self, value: float) -> float:
        """Pixels of a bar."""
        room = _WIDTH - _LEFT - _RIGHT
        if not self.logarithmic:
            return room * value / self.most
        floor = self.least / 2
        return room * math.log(value / floor) / math.log(self.most / floor)
