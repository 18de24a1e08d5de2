"""`python -m pipetransformer_operator.local run FILE --run-dir DIR`.

Exit codes: 0 the job completed, 1 it failed, 2 the file was refused, 130 interrupted.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path

from rich.console import Console

from ..api.status import ConditionType, JobStatus
from .manifest import InvalidManifest, read_job
from .run import run_job
from .summary import print_summary
from .view import LiveView, PlainView

EXIT_FAILED, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipetransformer_operator.local", description=__doc__)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="run a job with workers as local processes")
    run.add_argument("file", type=Path, help="YAML of one PipeTrainingJob")
    run.add_argument("--run-dir", type=Path, required=True, help="where the run's record goes")
    run.add_argument("--no-ui", action="store_true", help="plain lines even on a terminal")
    options = parser.parse_args(arguments)
    return _run(options.file, options.run_dir.absolute(), plain=options.no_ui)


def _run(file: Path, run_dir: Path, *, plain: bool) -> int:
    console, errors = Console(), Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        job = read_job(file, run_dir)
        if (run_dir / "steps.jsonl").exists():
            raise FileExistsError(f"--run-dir: {run_dir} holds the record of another run")
        run_dir.mkdir(parents=True, exist_ok=True)
    except (InvalidManifest, OSError) as error:
        errors.print(f"error: {error}", markup=False)
        return EXIT_REFUSED
    try:
        with PlainView(console) if plain or not console.is_terminal else LiveView(console) as view:
            status = asyncio.run(_until_told(run_job(job, run_dir, changed=view.changed, told=view.told)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        errors.print("interrupted; the workers were stopped")
        return EXIT_INTERRUPTED
    return _conclude(status, run_dir, console, errors)


async def _until_told(run: Coroutine[None, None, JobStatus]) -> JobStatus:
    """Ends the run, workers first, at SIGTERM as at Ctrl-C."""
    task = asyncio.create_task(run)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _conclude(status: JobStatus, run_dir: Path, console: Console, errors: Console) -> int:
    failed = status.condition(ConditionType.FAILED)
    if failed and status.is_true(ConditionType.FAILED):
        errors.print(f"Failed ({failed.reason}): {failed.message}", markup=False)
        errors.print(f"logs: {run_dir / 'logs'}", markup=False)
        return EXIT_FAILED
    print_summary(console, run_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
