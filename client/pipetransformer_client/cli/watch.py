"""`watch`: shows a job's layout and events as they change."""

from collections.abc import Iterator
from typing import Annotated

import typer

from pipetransformer_client.client import Client
from pipetransformer_client.errors import Unavailable
from pipetransformer_client.job import Job

from .app import app
from .options import EXIT_FAILED, Context, JobName, Namespace, console, error_console
from .view import LiveView, PlainView


@app.command()
def watch(
    name: JobName,
    plain: Annotated[bool, typer.Option("--plain", help="Print plain lines even on a terminal.")] = False,
    timeout: Annotated[float | None, typer.Option(help="Maximum time to wait in seconds. Default: no limit.")] = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Show a job's layout and events live until the job ends."""
    watch_job(Client.connect(context=context, namespace=namespace), name, plain=plain, timeout=timeout)


def watch_job(client: Client, name: str, *, plain: bool = False, timeout: float | None = None) -> None:
    """Shows the job until it ends. A failed job ends the command with exit code 1."""
    out = console()
    with PlainView(out) if plain or not out.is_terminal else LiveView(out) as view:
        for job in follow(client, name, view, timeout=timeout):
            failure = job.failure
    if failure:
        error_console().print(f"Failed ({failure})")
        raise typer.Exit(EXIT_FAILED)
    out.print(f"{job.namespace}/{job.name} is complete", highlight=False)


def follow(client: Client, name: str, view: PlainView | LiveView, *, timeout: float | None = None) -> Iterator[Job]:
    """Shows the job and new events after each change, then yields the job. Raises as `Client.stream` does."""
    told: set[str] = set()
    for job in client.stream(name, timeout=timeout):
        _tell(client, job, view, told)
        view.show_status(job.name, job.status)
        yield job


def _tell(client: Client, job: Job, view: PlainView | LiveView, told: set[str]) -> None:
    try:
        events = client.events(job)
    except Unavailable:  # the next change shows the events
        return
    for event in events:
        if event.uid not in told:
            told.add(event.uid)
            view.show_event(event.reason, event.message, warning=event.warning)
