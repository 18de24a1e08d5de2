"""What `run` and `watch` show: a live picture of the layout on a terminal, plain lines elsewhere."""

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pipetransformer_contract.messages import Report
from pipetransformer_operator.api import JobStatus

FROZEN, ACTIVE = "▒", "█"
NUM_EVENTS = 6


class PlainView:
    """One line an event and one a report."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: tuple[int, int] | None = None

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def changed(self, name: str, status: JobStatus) -> None:
        """The job's status changed."""
        report = status.last_report
        if report and (report.layout_generation, report.step) != self._last:
            self._last = (report.layout_generation, report.step)
            self._console.print(f"{progress(report)}  {held(status)}", highlight=False, soft_wrap=True)

    def told(self, reason: str, message: str, *, warning: bool) -> None:
        """The operator decided something."""
        self._console.print(f"{reason}: {message}", markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """Stages by pipelines, frozen blocks shaded, redrawn at each change."""

    def __init__(self, console: Console) -> None:
        self._live = Live(self, console=console, refresh_per_second=8)
        self._name = ""
        self._status: JobStatus | None = None
        self._events: list[Text] = []

    def __enter__(self) -> "LiveView":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def changed(self, name: str, status: JobStatus) -> None:
        """The job's status changed."""
        self._name, self._status = name, status
        self._live.refresh()

    def told(self, reason: str, message: str, *, warning: bool) -> None:
        """The operator decided something."""
        event = Text(f"{reason}: {message}", style="yellow" if warning else "dim")
        self._events = [*self._events, event][-NUM_EVENTS:]
        self._live.refresh()

    def __rich__(self) -> RenderableType:
        if self._status is None:
            return Panel(Group(*self._events), title="starting", title_align="left")
        report = self._status.last_report
        progressed = Text(f"{progress(report) if report else 'starting'}\n{held(self._status)}")
        title = f"{self._name} · {self._status.state.value}"
        return Panel(Group(draw_layout(self._status), progressed, *self._events), title=title, title_align="left")


def draw_layout(status: JobStatus) -> RenderableType:
    """A table of pipelines (rows) by stages (columns); a cell shows the stage's blocks, frozen ones shaded.

    A layout that is published but not yet confirmed is drawn empty: only the trainer knows how it will be cut.
    """
    plan, report = status.plan, status.last_report
    if plan is None:
        return Text(f"{len(status.worker_ids)} workers are starting")
    table = Table(show_edge=False, pad_edge=False)
    table.add_column(f"generation {plan.layout_generation}")
    for stage in range(plan.stages):
        table.add_column(f"stage {stage}")
    cells = [
        Text.assemble((FROZEN * frozen, "blue"), (ACTIVE * active, "green"))
        for frozen, active in _cells(report, plan.layout_generation)
    ]
    for pipeline in range(plan.pipelines):
        table.add_row(f"pipeline {pipeline}", *cells)
    return table


def _cells(report: Report | None, generation: int) -> Iterator[tuple[int, int]]:
    """Frozen and active blocks of each stage."""
    if report is None or report.layout_generation != generation:
        return
    boundary = report.boundary
    for num_layers in report.stage_layers:
        frozen = min(boundary, num_layers)
        boundary -= frozen
        yield frozen, num_layers - frozen


def progress(report: Report) -> str:
    """The report in one line."""
    loss = f"loss {report.loss:.4f}  " if report.loss is not None else ""
    speed = f"{report.samples_per_second:.0f} samples/s  " if report.samples_per_second is not None else ""
    return f"epoch {report.epoch}  step {report.step}  {loss}{speed}frozen {report.boundary}/{report.num_layers}"


def held(status: JobStatus) -> str:
    """Workers held and released, in one line: each would be a GPU on a cluster."""
    gpus, plan = status.gpus, status.plan
    layout = f"{plan.pipelines} pipelines of {plan.stages} stages, " if plan else ""
    return f"{layout}workers held {gpus.held}, released {gpus.released}"
