"""Workers as processes of this machine (`WorkerPool`).

As a pod would, a process that has ended stays in the list, with its exit code and termination message, until it is
deleted.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from pipetransformer_contract.api import JobStatus, PipeTrainingJob, trainer_spec
from pipetransformer_contract.api.manifest import search_path
from pipetransformer_contract.wire import Env
from pipetransformer_operator.channel.authenticator import Identity
from pipetransformer_operator.controller.ports import Refused, Room
from pipetransformer_operator.plan import UNSEEN, DisruptionBudget, NodeFacts, Worker, WorkerPhase, worker_name
from pipetransformer_operator.plan.last_words import last_words

ADDRESS = "127.0.0.1"
#: How long a worker that the job no longer needs may take to end.
TERM_SECONDS = 5.0
#: How long the workers of an interrupted run may take to write a checkpoint and end.
STOP_SECONDS = 60.0
#: The program that becomes the worker.
_CHILD = str(Path(__file__).with_name("child.py"))
#: How much of the end of a log a kubelet keeps.
LOG_BYTES = 2048


@dataclass
class _Process:
    worker_id: int
    name: str
    uid: str
    folder: Path
    log: Path
    #: Offset of its part of the log: an earlier run may have written before it.
    log_start: int
    process: asyncio.subprocess.Process
    deleted: bool = False


class ProcessListener(Protocol):
    """Is told of processes that end."""

    def on_process_ended(self) -> None:
        """A process ended, or was removed from the list."""
        ...


class ProcessPool:
    """Starts, lists and ends the processes of one job's workers.

    Args:
        run_dir: folder for the run's record; logs go to its `logs/`.
        scratch: folder for tokens and termination messages.
        channel_url: base URL of the channel.
        command: starts a worker.
        own: environment variables of each worker, in addition to those of this process.
        inherited: file descriptors that stay open in each worker.
    """

    def __init__(
        self,
        run_dir: Path,
        scratch: Path,
        channel_url: str,
        command: Sequence[str],
        own: Mapping[str, str],
        inherited: Sequence[int],
    ) -> None:
        self.tokens: dict[str, Identity] = {}
        self._run_dir = run_dir
        self._scratch = scratch
        self._channel_url = channel_url
        self._listeners: list[ProcessListener] = []
        self._command = command
        self._own = own
        self._inherited = inherited
        self._processes: dict[str, _Process] = {}
        self._watchers: set[asyncio.Task[None]] = set()

    def add(self, listener: ProcessListener) -> None:
        """Adds a listener, which is told of every process that ends."""
        self._listeners.append(listener)

    def list(self, job: PipeTrainingJob) -> tuple[Worker, ...]:
        """See `WorkerPool`."""
        return tuple(sorted(map(_observe, self._processes.values()), key=lambda worker: worker.id))

    def room(self, job: PipeTrainingJob) -> Room:
        """See `WorkerPool`. A machine runs any number of processes."""
        return Room(None, None)

    def reserve_room(self, job: PipeTrainingJob, status: JobStatus) -> None:
        """See `WorkerPool`. There is no other job."""

    async def prepare(self, job: PipeTrainingJob, status: JobStatus, new: Sequence[int]) -> None:
        """See `WorkerPool`. Processes need nothing."""

    async def create(self, job: PipeTrainingJob, worker_id: int, status: JobStatus) -> None:
        """See `WorkerPool`."""
        name = worker_name(job.metadata.name, worker_id)
        if name in self._processes:
            return
        try:
            process = await self._start(job, worker_id, name, status)
        except OSError as error:  # too many processes, or a disk is full
            raise Refused(f"cannot start {name}: {error}") from error
        self._processes[name] = process
        watcher = asyncio.create_task(self._watch(process))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _start(self, job: PipeTrainingJob, worker_id: int, name: str, status: JobStatus) -> _Process:
        uid = str(uuid.uuid4())
        folder = self._scratch / name
        folder.mkdir(exist_ok=True)  # an attempt may have failed
        token = secrets.token_urlsafe(32)
        token_file = folder / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(token)
        self.tokens[token] = Identity(job.metadata.namespace, name, uid)
        logs = self._run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        log_file = logs / f"{name}.log"
        with log_file.open("ab") as log:
            start = log.tell()
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-IS",
                _CHILD,
                str(os.getpid()),
                *self._command,
                env=self._environment(job, status, name, uid, folder),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=self._inherited,
                start_new_session=True,  # Ctrl-C must reach only the controller, which ends the workers in order
            )
        return _Process(worker_id, name, uid, folder, log_file, start, process)

    @property
    def sees_drains(self) -> bool:
        """See `WorkerPool`. Only this pool ends processes."""
        return True

    @property
    def nodes(self) -> NodeFacts:
        """See `WorkerPool`. There is no other machine."""
        return UNSEEN

    async def protect(self, job: PipeTrainingJob, budget: DisruptionBudget | None) -> None:
        """See `WorkerPool`."""

    def doubt(self, job: PipeTrainingJob, silent: Mapping[str, datetime], unfit: Mapping[str, datetime]) -> None:
        """See `WorkerPool`. There is no other machine."""

    def blame(self, failed_devices: Mapping[str, str]) -> None:
        """See `WorkerPool`. There is no other machine."""

    async def delete(self, job: PipeTrainingJob, name: str, uid: str) -> None:
        """See `WorkerPool`."""
        process = self._processes.get(name)
        if process is None or process.uid != uid:
            return
        process.deleted = True
        if process.process.returncode is None:
            process.process.terminate()
            asyncio.get_running_loop().call_later(TERM_SECONDS, _kill, process)
        else:
            self._forget(process)

    async def all_ended(self) -> None:
        """Waits until no process runs."""
        while self._watchers:
            await asyncio.wait(self._watchers)

    async def stop(self) -> None:
        """Tells all processes to end, and waits until they are gone or had time for a checkpoint."""
        for process in list(self._processes.values()):
            if process.process.returncode is None:
                process.process.terminate()
        if self._watchers:
            await asyncio.wait(self._watchers, timeout=STOP_SECONDS)

    async def kill(self) -> None:
        """Ends the processes that still run, and waits until they are gone."""
        for process in list(self._processes.values()):
            _kill(process)
        await asyncio.gather(*self._watchers)

    async def _watch(self, process: _Process) -> None:
        await process.process.wait()
        if process.deleted:
            self._forget(process)
        self._tell()

    def _forget(self, process: _Process) -> None:
        self._processes.pop(process.name, None)
        for token in [token for token, identity in self.tokens.items() if identity.uid == process.uid]:
            del self.tokens[token]
        shutil.rmtree(process.folder, ignore_errors=True)
        self._tell()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener.on_process_ended()

    def _environment(
        self, job: PipeTrainingJob, status: JobStatus, name: str, uid: str, folder: Path
    ) -> Mapping[str, str]:
        return {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            **self._own,
            "PATH": search_path(),
            "PYTHONUNBUFFERED": "1",
            Env.JOB_NAMESPACE: job.metadata.namespace,
            Env.JOB_NAME: job.metadata.name,
            Env.JOB_UID: job.metadata.uid,
            Env.JOB_SPEC: trainer_spec(
                job.spec, num_shards=status.num_shards, workers=status.initial_workers
            ).to_environment(),
            Env.WORKER_NAME: name,
            Env.WORKER_UID: uid,
            Env.WORKER_ADDRESS: ADDRESS,
            Env.NODE_NAME: "local",
            Env.CHANNEL_URL: self._channel_url,
            Env.CHANNEL_TOKEN_FILE: str(folder / "token"),
            Env.RUN_DIR: str(self._run_dir),
            Env.TERMINATION_LOG: str(folder / "termination-log"),
        }


def _observe(process: _Process) -> Worker:
    code = process.process.returncode
    phase = WorkerPhase.RUNNING if code is None else WorkerPhase.SUCCEEDED if code == 0 else WorkerPhase.FAILED
    return Worker(
        id=process.worker_id,
        name=process.name,
        uid=process.uid,
        phase=phase,
        terminating=process.deleted,
        address=ADDRESS,
        exit_code=code,
        message="" if code is None else _last_words(process, code),
        scheduled=True,
    )


def _last_words(process: _Process, code: int) -> str:
    """Its termination message, or the end of its log if it failed without one, as a kubelet reports them."""
    said = process.folder / "termination-log"
    left = said.read_text() if said.exists() else ""
    if not left and code:
        with process.log.open("rb") as log:
            log.seek(max(process.log_start, process.log.stat().st_size - LOG_BYTES))
            left = log.read().decode(errors="replace")
    return last_words(left, code)


def _kill(process: _Process) -> None:
    if process.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it may just have ended
            os.killpg(process.process.pid, signal.SIGKILL)
