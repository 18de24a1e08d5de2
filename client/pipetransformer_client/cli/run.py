"""`run`: a job without a cluster, its workers as processes of this machine."""

import asyncio
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated

import typer

from pipetransformer_operator.api.status import ConditionType, JobStatus
from pipetransformer_operator.local.manifest import read_job
from pipetransformer_operator.plan import EventType

from . import app
from .options import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED, console, errors
from .summary import print_summary
from .view import LiveView, PlainView


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="YAML of one PipeTrainingJob.")],
    run_dir: Annotated[Path, typer.Option(help="Where the run's record, model and checkpoints go.")],
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines even on a terminal.")] = False,
) -> None:
    """Run a job on this machine, its workers as local processes."""
    from pipetransformer_operator.local.run import run_job  # no other command needs a server

    run_dir = run_dir.absolute()
    try:
        job = read_job(file, run_dir)
        if (run_dir / "steps.jsonl").exists():
            raise FileExistsError(f"--run-dir: {run_dir} holds the record of another run")
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        errors().print(f"error: {error}")
        raise typer.Exit(EXIT_REFUSED) from error
    out = console()
    try:
        with PlainView(out) if plain or not out.is_terminal else LiveView(out) as view:
            running = run_job(
                job,
                run_dir,
                changed=lambda job: view.changed(job.metadata.name, job.status),
                told=lambda event: view.told(
                    event.reason.value, event.message, warning=event.type is EventType.WARNING
                ),
            )
            status = asyncio.run(_until_told(running))
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        errors().print("interrupted; the workers were stopped")
        raise typer.Exit(EXIT_INTERRUPTED) from error
    failed = status.condition(ConditionType.FAILED)
    if failed and status.is_true(ConditionType.FAILED):
        errors().print(f"Failed ({failed.reason}): {failed.message}\nlogs: {run_dir / 'logs'}")
        raise typer.Exit(EXIT_FAILED)
    print_summary(out, run_dir)


async def _until_told(run: Coroutine[None, None, JobStatus]) -> JobStatus:
    """Ends the run, workers first, at SIGTERM as at Ctrl-C."""
    task = asyncio.create_task(run)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task
