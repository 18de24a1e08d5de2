"""`run`: trains a job without a cluster, with workers as local processes."""

import asyncio
import signal
from collections.abc import Coroutine
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pipetransformer_client.run_folder import RunFolder, RunFolderError
from pipetransformer_client.timeline import read_record, write_timeline
from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_contract.api.manifest import local_job, local_manifest
from pipetransformer_contract.api.status import ConditionType, JobStatus

from .app import app
from .manifests import File, Name, Settings, one_job
from .options import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_INVALID, console, error_console
from .summary import print_summary
from .view import LiveView, PlainView

#: Signals that stop a run. A terminal that is closed sends SIGHUP.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@app.command()
def run(
    file: File,
    run_dir: Annotated[Path, typer.Option(help="Folder for the run's record, model and checkpoints.", file_okay=False)],
    name: Name = None,
    settings: Settings = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print plain lines even on a terminal.")] = False,
) -> None:
    """Run a job on this machine, with workers as local processes. The same command resumes an interrupted run."""
    out = console()
    if find_spec("pipetransformer_operator") is None:  # only this command needs it
        error_console().print("error: a local run needs the operator: pip install ./operator")
        raise typer.Exit(EXIT_INVALID)
    try:
        manifest = local_manifest(one_job(file, name, settings))
        run_dir = run_dir.absolute()
        local_job(manifest, run_dir)  # refuses a job that cannot run here before anything is written
        with RunFolder.open(run_dir) as folder:
            job = local_job(folder.claim(manifest), run_dir)
            if folder.finished:
                _print_finished(out, job, run_dir)
                return
            try:
                with PlainView(out) if plain or not out.is_terminal else LiveView(out) as view:
                    status = _train(job, folder, view)
            except (KeyboardInterrupt, asyncio.CancelledError) as error:
                error_console().print(_interrupted(folder))
                raise typer.Exit(EXIT_INTERRUPTED) from error
            _print_end(out, status, folder)
    except (RunFolderError, OSError) as error:
        error_console().print(f"error: {error}")
        raise typer.Exit(EXIT_INVALID) from error


def _train(job: PipeTrainingJob, folder: RunFolder, view: PlainView | LiveView) -> JobStatus:
    """Trains the job and returns its last status.

    Raises:
        asyncio.CancelledError: a signal interrupted the run.
    """
    from pipetransformer_operator.local.run import run_job
    from pipetransformer_operator.plan import EventType, PlanEvent

    if (step := folder.checkpoint_step()) is not None:
        view.show_event("Resuming", f"from the checkpoint at step {step}", warning=False)
    elif folder.trained:
        view.show_event("StartingOver", f"because {folder.path / 'checkpoints'} has no checkpoint", warning=True)

    # The run continues if it cannot be shown, such as on a terminal that is closed, or in a file on a full disk.
    def on_status(job: PipeTrainingJob) -> None:
        with suppress(OSError):
            view.show_status(job.metadata.name, job.status)

    def on_event(event: PlanEvent) -> None:
        with suppress(OSError):
            view.show_event(event.reason.value, event.message, warning=event.type is EventType.WARNING)

    running = run_job(
        job,
        folder.path,
        on_status=on_status,
        on_event=on_event,
        inherited=[folder.lock],
    )
    return asyncio.run(_until_signal(running, view))


def _interrupted(folder: RunFolder) -> str:
    step = folder.checkpoint_step()
    continues = "starts over, because there is no checkpoint yet" if step is None else f"resumes at step {step}"
    return f"interrupted; the workers were stopped. The same command {continues}"


def _print_end(out: Console, status: JobStatus, folder: RunFolder) -> None:
    with suppress(ValueError, OSError):  # the run ended before it trained, or because its disk is full
        write_timeline(read_record(folder.path), folder.path.name, folder.path)
    failed = status.condition(ConditionType.FAILED)
    if failed and status.is_true(ConditionType.FAILED):
        error_console().print(f"Failed ({failed.reason}): {failed.message}\nlogs: {folder.path / 'logs'}")
        raise typer.Exit(EXIT_FAILED)
    folder.finish()
    print_summary(out, folder.path)


def _print_finished(out: Console, job: PipeTrainingJob, run_dir: Path) -> None:
    print_summary(out, run_dir)
    words = f"{job.metadata.name} has already finished in {run_dir}"
    if (run_dir / "model").exists():
        words += f", and its model is {run_dir / 'model'}"
    out.print(
        f"{words}. To train it again, name another --run-dir or remove {run_dir}", highlight=False, soft_wrap=True
    )


async def _until_signal(run: Coroutine[None, None, JobStatus], view: PlainView | LiveView) -> JobStatus:
    """Waits for a run, and stops it at a signal.

    At the first signal workers write a checkpoint and end. At the second signal they end at once, but not at another
    SIGHUP: kernel and shell both send one when a terminal is closed. A signal that this process ignores, such as SIGHUP
    under `nohup`, stays ignored.
    """
    task = asyncio.create_task(run)
    signalled = False

    def stop(number: signal.Signals) -> None:
        nonlocal signalled
        if signalled:
            if number is not signal.SIGHUP:
                task.cancel()
            return
        signalled = True
        task.cancel()
        with suppress(OSError):  # the terminal is closed
            words = "The workers write a checkpoint. Press Ctrl-C again to end them at once"
            view.show_event("Stopping", words, warning=True)

    for number in (one for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    return await task
