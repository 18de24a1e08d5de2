"""`list` and `describe`: show jobs of the cluster."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console

from pipetransformer_client.client import Client
from pipetransformer_client.errors import ClientError
from pipetransformer_client.job import Event, Job
from pipetransformer_contract.messages import Report
from pipetransformer_contract.progress import duration

from .app import app
from .options import Context, JobName, Namespace, Output, console, error_console
from .output import print_jobs, print_object
from .view import draw_layout, held_line, progress_line

_TITLES = ("NAME", "STATE", "STAGES", "PIPELINES", "GPUS", "FROZEN", "STEP", "ETA", "SAVED", "AGE")


@app.command("list")
def list_jobs(
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="List jobs in all namespaces.")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    output: Output = None,
) -> None:
    """List jobs."""
    jobs = Client.connect(context=context, namespace=namespace).jobs(all_namespaces=all_namespaces)
    if output is not None:
        print_jobs(jobs, output)
        return
    rows = [["NAMESPACE", *_TITLES]]
    for job in jobs:
        try:
            rows.append([job.namespace, *_row(job)])
        except ClientError as error:  # it hides no other job
            error_console().print(f"warning: {error}")
            rows.append([job.namespace, job.name, *["?"] * (len(_TITLES) - 2), _age(job.created)])
    _print_columns(rows if all_namespaces else [row[1:] for row in rows])


@app.command()
def describe(name: JobName, namespace: Namespace = None, context: Context = None, output: Output = None) -> None:
    """Show a job: its layout, conditions and events."""
    client = Client.connect(context=context, namespace=namespace)
    job = client.get(name)
    if output is not None:
        print_object(job.manifest, output)
        return
    _print_job(console(), job, client.events(job))


def _print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Prints one line for each row. Lines are not cut to the terminal, so that users can search for names."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(job: Job) -> list[str]:
    status = job.status
    stages, pipelines = (
        (str(status.generation.stages), str(status.generation.pipelines)) if status.generation else ("-", "-")
    )
    step, left = _step(status.last_report)
    saved = f"{status.gpu_seconds_saved_at(datetime.now(UTC)) / 3600:.2f} GPUh"
    return [
        job.name, status.state.value, stages, pipelines, str(status.gpus.held), status.frozen or "-", step, left, saved,
        _age(job.created),
    ]  # fmt: skip


def _step(report: Report | None) -> tuple[str, str]:
    """The step and the number of all steps, such as `120/400`, and the remaining time; `-` for what is unknown."""
    if report is None:
        return "-", "-"
    total = "" if report.total_steps is None else f"/{report.total_steps}"
    left = None if report.outcome else report.seconds_left
    return f"{report.step}{total}", "-" if left is None else duration(left)


def _print_job(out: Console, job: Job, events: list[Event]) -> None:
    status = job.status
    out.print(f"{job.namespace}/{job.name}  {status.state.value}  {_age(job.created)} old\n", highlight=False)
    out.print(draw_layout(status))
    out.print(progress_line(status) or "no step yet", highlight=False)
    saved = status.gpu_seconds_saved_at(datetime.now(UTC))
    out.print(f"{held_line(status)}, {saved:.0f} GPU-seconds saved", highlight=False)
    if status.checkpoint:
        out.print(f"checkpoint at step {status.checkpoint.step}, {status.checkpoint.boundary} frozen", highlight=False)
    if job.results:
        out.print(f"results: {job.results}", highlight=False, soft_wrap=True)
    conditions = [
        (one.type.value, one.status.value, one.reason, _age(one.last_transition_time), one.message)
        for one in status.conditions
    ]
    out.print()
    _print_columns([("CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE"), *conditions])
    out.print()
    for event in events:
        out.print(f"{_age(event.time):>6}  {event.reason}: {event.message}", highlight=False, soft_wrap=True)


def _age(since: datetime) -> str:
    """The time from `since` until now, in at most two units, such as `3d4h`."""
    return duration((datetime.now(UTC) - since).total_seconds())
