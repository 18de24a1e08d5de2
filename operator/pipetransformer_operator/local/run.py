"""A local run from start to end: puts controller, channel and processes together, and waits until the job ends."""

import asyncio
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

from pipetransformer_contract.api import JobStatus, PipeTrainingJob
from pipetransformer_contract.api.manifest import worker_command, worker_environment
from pipetransformer_contract.api.status import LastReport
from pipetransformer_contract.messages import Report
from pipetransformer_operator.channel.app import Channel
from pipetransformer_operator.channel.authenticator import TokenTable
from pipetransformer_operator.clocks import utc_now
from pipetransformer_operator.controller.manager import Controller
from pipetransformer_operator.controller.ports import JobKey
from pipetransformer_operator.plan import PlanEvent

from .memory import JobListener, MemoryStore
from .processes import ADDRESS, ProcessPool

#: How often the leader's newest report is shown.
SHOW_SECONDS = 1.0


async def run_job(
    job: PipeTrainingJob,
    run_dir: Path,
    *,
    on_status: Callable[[PipeTrainingJob], None] = lambda job: None,
    on_event: Callable[[PlanEvent], None] = lambda event: None,
    inherited: Sequence[int] = (),
) -> JobStatus:
    """Runs the job to its end and returns its last status. All workers have ended when this returns or raises.

    Args:
        job: from `local_job`.
        run_dir: folder for the run's record and the workers' logs.
        on_status: called with the job after each change of its status, and after each report of its leader.
        on_event: called with each decision.
        inherited: file descriptors that stay open in each worker.
    """
    key = JobKey.of(job)
    shown = _Shown(on_status, on_event)
    store = MemoryStore(job, shown)
    with _scratch(run_dir) as scratch:
        sock = socket.create_server((ADDRESS, 0))
        url = f"http://{ADDRESS}:{sock.getsockname()[1]}"
        command, own = worker_command(job), worker_environment(job)
        pool = ProcessPool(run_dir, scratch, url, command, own, inherited)
        controller = Controller(store, pool)
        pool.add(_Waker(controller, key))
        runner = web.AppRunner(Channel(controller.boards, TokenTable(pool.tokens)).application(), shutdown_timeout=1)
        await runner.setup()
        await web.SockSite(runner, sock).start()
        progress = asyncio.create_task(_follow_reports(controller, key, store, shown))
        try:
            controller.wake(key)
            await shown.finished.wait()
            await pool.all_ended()
        finally:
            progress.cancel()
            try:
                await controller.stop()
                await pool.stop()
            finally:  # also where a second signal comes in the middle of it
                await pool.kill()
            await runner.cleanup()
    return store.last.status


@contextmanager
def _scratch(run_dir: Path) -> Iterator[Path]:
    """A folder for what workers need only while they run. It is in the run's folder, so that the next run there removes
    it if this process is killed."""
    folder = run_dir / "workers"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Shown:
    """Shows the job to the user (`JobListener`), and notes when it has finished."""

    def __init__(self, on_status: Callable[[PipeTrainingJob], None], on_event: Callable[[PlanEvent], None]) -> None:
        self.finished = asyncio.Event()
        self._on_status = on_status
        self._on_event = on_event

    def on_status(self, job: PipeTrainingJob) -> None:
        if job.status.finished:
            self.finished.set()
        self._on_status(job)  # last, because it raises if the reader of its pipe is gone

    def on_event(self, event: PlanEvent) -> None:
        self._on_event(event)


class _Waker:
    """Wakes the job's loop when a process ends (`ProcessListener`)."""

    def __init__(self, controller: Controller, key: JobKey) -> None:
        self._controller = controller
        self._key = key

    def on_process_ended(self) -> None:
        self._controller.wake(self._key)


async def _follow_reports(controller: Controller, key: JobKey, store: MemoryStore, listener: JobListener) -> None:
    """Shows the newest report every `SHOW_SECONDS`. The status alone would show progress only now and then, because the
    operator spares an API server its writes."""
    shown: Report | None = None
    while True:
        await asyncio.sleep(SHOW_SECONDS)
        board = controller.boards.get(key)
        report = None if board is None else board.report
        if report is None or not report.newer_than(shown):
            continue
        shown, job = report, store.last
        if report.newer_than(job.status.last_report):
            reported = LastReport(**dict(report), time=utc_now())
            listener.on_status(
                job.model_copy(update={"status": job.status.model_copy(update={"last_report": reported})})
            )
