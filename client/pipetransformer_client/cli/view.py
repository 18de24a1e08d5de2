"""The output of `run` and `watch`: on a terminal a picture of the layout that is redrawn, otherwise plain lines."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pipetransformer_contract.api import JobStatus
from pipetransformer_contract.messages import Report
from pipetransformer_contract.progress import Progress
from pipetransformer_contract.words import counted_are

FROZEN, ACTIVE = "▒", "█"
NUM_EVENTS = 6
#: Time between two progress lines while the layout and the frozen layers stay the same.
PROGRESS_SECONDS = 60.0


class PlainView:
    """Prints a line at each event, change of layout and freeze. Between these it prints the progress once a minute.

    Args:
        console: where to print.
        clock: returns seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._shown: tuple[int, int, bool] | None = None
        self._shown_at = 0.0

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show_status(self, name: str, status: JobStatus) -> None:
        """Shows a new status of the job."""
        report = status.last_report
        if report is None:
            return
        shown = report.layout_generation, report.boundary, report.outcome is not None
        if shown != self._shown or self._clock() >= self._shown_at + PROGRESS_SECONDS:
            self._shown, self._shown_at = shown, self._clock()
            self._console.print(f"{progress_line(status)}  {held_line(status)}", highlight=False, soft_wrap=True)

    def show_event(self, reason: str, message: str, *, warning: bool) -> None:
        """Shows an event of the operator."""
        self._console.print(f"{reason}: {message}", markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """Draws a table of pipelines and stages, with frozen layers shaded, and draws it again after each change."""

    def __init__(self, console: Console) -> None:
        self._live = Live(self, console=console, refresh_per_second=8)
        self._name = ""
        self._status: JobStatus | None = None
        self._events: list[Text] = []

    def __enter__(self) -> "LiveView":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the terminal is closed
            self._live.stop()

    def show_status(self, name: str, status: JobStatus) -> None:
        """Shows a new status of the job."""
        self._name, self._status = name, status
        self._live.refresh()

    def show_event(self, reason: str, message: str, *, warning: bool) -> None:
        """Shows an event of the operator."""
        event = Text(f"{reason}: {message}", style="yellow" if warning else "dim")
        self._events = [*self._events, event][-NUM_EVENTS:]
        self._live.refresh()

    def __rich__(self) -> RenderableType:
        if self._status is None:
            return Panel(Group(*self._events), title="starting", title_align="left")
        progressed = Text(f"{progress_line(self._status) or 'starting'}\n{held_line(self._status)}")
        title = f"{self._name} · {self._status.state.value}"
        return Panel(Group(draw_layout(self._status), progressed, *self._events), title=title, title_align="left")


def draw_layout(status: JobStatus) -> RenderableType:
    """A table with a row for each pipeline and a column for each stage. Cells show layers, with frozen layers shaded.

    Cells are empty until the leader has confirmed the layout, because only the trainer decides which stage holds which
    layers.
    """
    generation, report = status.generation, status.last_report
    if generation is None:
        workers = len(status.worker_ids)
        if status.finished or not workers:
            return Text("no layout")
        return Text(f"{counted_are(workers, 'worker')} starting")
    table = Table(show_edge=False, pad_edge=False)
    table.add_column(f"generation {generation.layout_generation}")
    for stage in range(generation.stages):
        table.add_column(f"stage {stage}")
    cells = [
        Text.assemble((FROZEN * frozen, "blue"), (ACTIVE * active, "green"))
        for frozen, active in _cells(report, generation.layout_generation)
    ]
    for pipeline in range(generation.pipelines):
        table.add_row(f"pipeline {pipeline}", *cells)
    return table


def _cells(report: Report | None, generation: int) -> Iterator[tuple[int, int]]:
    """Yields the numbers of frozen and of training layers of each stage; nothing before the layout is confirmed."""
    if report is None or report.layout_generation != generation:
        return
    for num_layers, frozen in zip(report.stage_layers, report.stage_frozen_layers, strict=False):
        yield frozen, num_layers - frozen


def progress_line(status: JobStatus) -> str:
    """The newest report in one line; empty before the first report."""
    report, generation = status.last_report, status.generation
    if report is None:
        return ""
    confirmed = (
        generation if generation is not None and generation.layout_generation == report.layout_generation else None
    )
    held_out = report.held_out
    return Progress(
        step=report.step,
        total_steps=report.total_steps,
        seconds_left=None if report.outcome else report.seconds_left,
        loss=report.loss,
        held_out=None if held_out is None else (held_out.metric, held_out.value),
        stages=None if confirmed is None else confirmed.stages,
        pipelines=None if confirmed is None else confirmed.pipelines,
        frozen_layers=report.boundary,
        num_layers=report.num_layers,
        samples_per_second=report.samples_per_second,
    ).line()


def held_line(status: JobStatus) -> str:
    """The numbers of held and of released workers in one line. On a cluster each worker is one GPU."""
    return f"workers held {status.gpus.held}, released {status.gpus.released}"
