"""`list` and `describe`."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from ..client import Client
from ..job import Event, Job
from . import app
from .options import Context, Format, JobName, Namespace, Output, console
from .view import draw_layout, held, progress

_UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


@app.command("list")
def list_jobs(
    all_namespaces: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Of all namespaces.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    output: Output = None,
) -> None:
    """List jobs."""
    jobs = Client.connect(context=context, namespace=namespace).jobs(all_namespaces=all_namespaces)
    if output is not None:
        print_object({"apiVersion": "v1", "kind": "List", "items": [job.manifest for job in jobs]}, output)
        return
    table = Table(box=None, pad_edge=False)
    titles = [*(["NAMESPACE"] if all_namespaces else []), "NAME", "STATE", "STAGES", "PIPELINES", "GPUS", "FROZEN"]
    for title in (*titles, "STEP", "SAVED", "AGE"):
        table.add_column(title, no_wrap=True)
    for job in jobs:
        table.add_row(*([job.namespace] if all_namespaces else []), *_row(job))
    console().print(table)


@app.command()
def describe(name: JobName, namespace: Namespace = None, context: Context = None, output: Output = None) -> None:
    """Show a job: its layout, its conditions, and what the operator decided."""
    client = Client.connect(context=context, namespace=namespace)
    job = client.get(name)
    if output is not None:
        print_object(job.manifest, output)
        return
    _print_job(console(), job, client.events(job))


def print_object(value: Mapping[str, Any], output: Format) -> None:
    """Prints a JSON-able object."""
    if output is Format.JSON:
        print(json.dumps(value, indent=2))
    else:
        print(yaml.safe_dump(value, sort_keys=False, allow_unicode=True), end="")


def _row(job: Job) -> list[str]:
    status = job.status
    stages, pipelines = (str(status.plan.stages), str(status.plan.pipelines)) if status.plan else ("-", "-")
    step = str(status.last_report.step) if status.last_report else "-"
    saved = f"{status.gpu_seconds_saved / 3600:.2f} GPUh"
    held = str(status.gpus.held)
    return [
        job.name, status.state.value, stages, pipelines, held, status.frozen or "-", step, saved, _age(job.created),
    ]  # fmt: skip


def _print_job(out: Console, job: Job, events: list[Event]) -> None:
    status = job.status
    out.print(f"{job.namespace}/{job.name}  {status.state.value}  {_age(job.created)} old\n", highlight=False)
    out.print(draw_layout(status))
    out.print(progress(status.last_report) if status.last_report else "no step yet", highlight=False)
    out.print(f"{held(status)}, {status.gpu_seconds_saved:.0f} GPU-seconds saved", highlight=False)
    if status.checkpoint:
        out.print(f"checkpoint at step {status.checkpoint.step}, {status.checkpoint.boundary} frozen", highlight=False)
    if job.results:
        out.print(f"results: {job.results}", highlight=False, soft_wrap=True)
    conditions = Table(box=box.SIMPLE, pad_edge=False)
    for title in ("condition", "status", "reason", "since", "message"):
        conditions.add_column(title)
    for condition in status.conditions:
        since = _age(condition.last_transition_time)
        conditions.add_row(condition.type.value, condition.status.value, condition.reason, since, condition.message)
    out.print(conditions)
    for event in events:
        out.print(f"{_age(event.time):>6}  {event.reason}: {event.message}", highlight=False, markup=False)


def _age(since: datetime) -> str:
    """How long ago, in two units at most: 3d4h, 12m5s."""
    left = max(0, int((datetime.now(UTC) - since).total_seconds()))
    parts: list[str] = []
    for unit, size in _UNITS:
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count}{unit}")
    return "".join(parts[:2])
