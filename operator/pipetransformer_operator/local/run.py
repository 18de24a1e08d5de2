"""A local run from its first worker to its last: wires controller, channel and processes, and waits for the end."""

import asyncio
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from aiohttp import web

from pipetransformer_contract.api import JobStatus, PipeTrainingJob
from pipetransformer_contract.api.manifest import worker_command, worker_environment
from pipetransformer_contract.api.status import LastReport
from pipetransformer_contract.messages import Report
from pipetransformer_operator.channel.app import Channel
from pipetransformer_operator.channel.authenticator import TokenTable
from pipetransformer_operator.controller.manager import Controller, utc_now
from pipetransformer_operator.controller.ports import JobKey
from pipetransformer_operator.plan import PlanEvent

from .memory import MemoryStore
from .processes import ADDRESS, ProcessPool

#: Between two looks at what the leader has reported.
SHOW_SECONDS = 1.0


async def run_job(
    job: PipeTrainingJob,
    run_dir: Path,
    *,
    changed: Callable[[PipeTrainingJob], None] = lambda job: None,
    told: Callable[[PlanEvent], None] = lambda event: None,
    inherited: Sequence[int] = (),
) -> JobStatus:
    """Runs the job to its end and returns its last status. Workers are gone when this returns or raises.

    Args:
        job: as `local_job` gives it.
        run_dir: where the run's record and the workers' logs go.
        changed: called with the job after each change of its status, and with what its leader reports in between.
        told: called with each decision.
        inherited: file descriptors that stay open in each worker.
    """
    key = JobKey(job.metadata.namespace, job.metadata.name)
    ended = asyncio.Event()
    woken: list[Callable[[], None]] = []

    def note(job: PipeTrainingJob) -> None:
        changed(job)
        if job.status.finished:
            ended.set()

    def wake() -> None:
        for call in woken:
            call()

    store = MemoryStore(job, note, told)
    with tempfile.TemporaryDirectory(prefix="pipetransformer-") as scratch:
        sock = socket.create_server((ADDRESS, 0))
        url = f"http://{ADDRESS}:{sock.getsockname()[1]}"
        command, own = worker_command(job), worker_environment(job)
        pool = ProcessPool(run_dir, Path(scratch), url, wake, command, own, inherited)
        controller = Controller(store, pool)
        woken.append(lambda: controller.wake(key))
        runner = web.AppRunner(Channel(controller.boards, TokenTable(pool.tokens)).application(), shutdown_timeout=1)
        await runner.setup()
        await web.SockSite(runner, sock).start()
        progress = asyncio.create_task(_follow_reports(controller, key, store, changed))
        try:
            controller.wake(key)
            await ended.wait()
            await pool.all_ended()
        finally:
            progress.cancel()
            await controller.stop()
            await pool.stop()
            await runner.cleanup()
    return store.last.status


async def _follow_reports(
    controller: Controller, key: JobKey, store: MemoryStore, changed: Callable[[PipeTrainingJob], None]
) -> None:
    """Shows each report at once: the status, made for an API server, takes mere progress now and then only."""
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
            changed(job.model_copy(update={"status": job.status.model_copy(update={"last_report": reported})}))
