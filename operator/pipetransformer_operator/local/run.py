"""A local run from its first worker to its last: wires controller, channel and processes, and waits for the end."""

import asyncio
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from ..api import JobStatus, PipeTrainingJob
from ..channel.app import Channel
from ..channel.authenticator import TokenTable
from ..controller.manager import Controller
from ..controller.ports import JobKey
from ..plan import PlanEvent
from .manifest import worker_command, worker_environment
from .memory import MemoryStore
from .processes import ADDRESS, ProcessPool


async def run_job(
    job: PipeTrainingJob,
    run_dir: Path,
    *,
    changed: Callable[[PipeTrainingJob], None] = lambda job: None,
    told: Callable[[PlanEvent], None] = lambda event: None,
) -> JobStatus:
    """Runs the job to its end and returns its last status. Workers are gone when this returns or raises.

    Args:
        job: as `read_job` gives it.
        run_dir: where the run's record and the workers' logs go.
        changed: called with the job after each change of its status.
        told: called with each decision.
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
        pool = ProcessPool(run_dir, Path(scratch), url, wake, worker_command(job), worker_environment(job))
        controller = Controller(store, pool)
        woken.append(lambda: controller.wake(key))
        runner = web.AppRunner(Channel(controller.boards, TokenTable(pool.tokens)).application(), shutdown_timeout=1)
        await runner.setup()
        await web.SockSite(runner, sock).start()
        try:
            controller.wake(key)
            await ended.wait()
            await pool.all_ended()
        finally:
            await controller.stop()
            await pool.stop()
            await runner.cleanup()
    return store.last.status
