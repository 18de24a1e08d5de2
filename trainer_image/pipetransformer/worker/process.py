"""Runs a worker process, from its environment to its exit code.

A worker without a role waits for a generation that names it again, or for the operator to end it. It does not exit by
itself, because the exit of its pod gives its accelerator away before a checkpoint is durable.

Exit codes: 0 if the operator told the worker to leave or the job ended. 2 if the job cannot be trained, because its
spec, program, data or storage is at fault. 143 after a signal. 1 otherwise, and then another worker may replace it. The
termination log repeats the outcome, in case the channel is down.
"""

import datetime
import gc
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from pipetransformer.checkpoint.resume import in_order_of_checkpoint
from pipetransformer.elastic.generations.channel_client import ChannelClient
from pipetransformer.elastic.generations.channel_source import ChannelSource
from pipetransformer.elastic.generations.rendezvous import GenerationRendezvousHandler, GenerationSource, host_store
from pipetransformer.elastic.generations.senders import HeartbeatSender, ReportSender
from pipetransformer.elastic.generations.watcher import GenerationWatcher
from pipetransformer.elastic.transport.groups import Transport
from pipetransformer.errors import (
    CallbackError,
    DeviceError,
    DeviceMemoryError,
    ModelError,
    SpecError,
    StorageError,
    WorkersDifferError,
)
from pipetransformer.hooks import Hooks
from pipetransformer.job.checks import check_storage
from pipetransformer.job.job import Job
from pipetransformer.job.load import load_job
from pipetransformer.job.script_parts import Parts
from pipetransformer.metrics import Meter, Position, serve
from pipetransformer_contract import logs
from pipetransformer_contract.logs import LogFormat
from pipetransformer_contract.messages import MAX_LOST_PEERS, MAX_MESSAGE, Heartbeat
from pipetransformer_contract.spec import TrainerSpec
from pipetransformer_contract.wire import Env

from .torchrun_agent import OneGeneration
from .trainer import Ending, Trainer

logger = logging.getLogger(__name__)

EXIT_WORKER = 1
EXIT_SPEC = 2
EXIT_STOPPED = 143
#: How long a worker that was told to stop tries to send the report of its last checkpoint.
FLUSH_SECONDS = 5.0
#: Timeout of every rendezvous, and of every request to its store.
TIMEOUT = datetime.timedelta(seconds=300)


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Names of a worker, and how it reaches the operator."""

    job: str
    job_uid: str
    name: str
    address: str
    channel_url: str
    token_file: Path | None
    ca_file: Path | None
    run_dir: Path
    termination_log: Path | None
    metrics_port: int | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "WorkerIdentity":
        """Read the variables of `pipetransformer_contract.wire.Env`.

        Raises:
            KeyError: a required variable is missing.
        """
        env = os.environ if environment is None else environment

        def path(name: str) -> Path | None:
            return Path(env[name]) if env.get(name) else None

        return cls(
            job=f"{env[Env.JOB_NAMESPACE]}/{env[Env.JOB_NAME]}",
            job_uid=env[Env.JOB_UID],
            name=env[Env.WORKER_NAME],
            address=env[Env.WORKER_ADDRESS],
            channel_url=env[Env.CHANNEL_URL],
            token_file=path(Env.CHANNEL_TOKEN_FILE),
            ca_file=path(Env.CHANNEL_CA_FILE),
            run_dir=path(Env.RUN_DIR) or Path("run"),
            termination_log=path(Env.TERMINATION_LOG),
            metrics_port=int(env[Env.METRICS_PORT]) if env.get(Env.METRICS_PORT) else None,
        )

    def channel(self) -> ChannelClient:
        return ChannelClient(self.channel_url, self.job, self.name, self.token_file, self.ca_file)


def choose_device() -> torch.device:
    """Return this worker's accelerator, or the CPU. On the CPU, use one thread unless the environment says
    otherwise."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return torch.device("cpu")


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """How a worker ended. `trainer` is None when it never trained."""

    exit_code: int
    ending: Ending | None = None
    trainer: Trainer | None = None


def run_worker(identity: WorkerIdentity, parts: Parts | None = None) -> WorkerEnd:
    """Run the worker that `identity` names; `parts` are what its spec calls `script`."""
    _stop_while_loading(identity)
    fields = {"job": identity.job, "worker": identity.name}
    try:
        logs.configure("INFO", LogFormat.from_environment(os.environ), fields=fields)
    except ValueError as error:
        logs.configure("INFO", LogFormat.TEXT)
        return refuse(identity, SpecError("spec.podTemplate", str(error)), "InvalidSpec")
    agent = OneGeneration.from_environment()
    if agent is not None and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":  # all would claim the same member
        words = "torchrun starts several processes here, but a worker is one process in one pod: use --nproc-per-node 1"
        return refuse(identity, SpecError("spec.podTemplate", words), "InvalidSpec")
    try:
        with _refusing_exits():
            spec = TrainerSpec.model_validate_json(os.environ[Env.JOB_SPEC])
            check_storage(spec)
            spec, num_shards = in_order_of_checkpoint(spec)
            job = load_job(spec, parts, num_shards=num_shards)
    except ValidationError as error:
        return refuse(identity, error, "InvalidSpec")
    except SpecError as error:
        return refuse(identity, error, error.reason)
    except StorageError as error:  # another worker may reach the storage, or this one later
        return _give_up(identity, error, error.reason)
    return WorkerProcess(identity, job, agent).run()


class WorkerProcess(Hooks):
    """One worker, from its loaded job to its end. Signals, heartbeats and the trainer's hooks arrive here.

    Args:
        identity: names this worker.
        job: the job to train.
        agent: the generation that torchrun's agent has met; None if the worker takes generations from the channel.
    """

    def __init__(self, identity: WorkerIdentity, job: Job, agent: OneGeneration | None) -> None:
        self._identity, self._job, self._agent = identity, job, agent
        self._transport = Transport(identity.address, device=choose_device())
        channel = identity.channel()
        store, address = host_store(identity.address, TIMEOUT)
        operator = ChannelSource(channel, address, store)
        source: GenerationSource = operator if agent is None else agent
        self._handler = GenerationRendezvousHandler(identity.name, store, source, timeout=TIMEOUT)
        self._watcher = GenerationWatcher(operator.watch if agent is None else agent.next_generation)
        self._reports = ReportSender(channel, operator, self)
        self._heartbeats = HeartbeatSender(channel, operator, self)
        self._meter = Meter()
        self._trainer: Trainer | None = None
        #: The generation that this worker left with, 0 for none. The worker holds nothing until it joins a newer one.
        self._left = 0
        #: The process got SIGTERM.
        self._signalled = threading.Event()
        #: The operator asked for a last checkpoint, and allows time for it before it has the process killed.
        self._asked = threading.Event()
        self._job_ended = threading.Event()
        #: The token under which the operator asks for a checkpoint.
        self._checkpoint_request = ""

    @property
    def trainer(self) -> Trainer:
        """The present trainer. A worker that has left and waits has a new one."""
        assert self._trainer is not None
        return self._trainer

    @property
    def position(self) -> Position:
        """Where the present trainer stands."""
        return self.trainer.position

    def run(self) -> WorkerEnd:
        """Train until this worker's part ends, and write the outcome to the termination log."""
        signal.signal(signal.SIGTERM, self._on_signal)
        try:
            with _refusing_exits(self._signalled):
                self._make_trainer()
        except (SpecError, StorageError) as error:  # from reading the data and beginning the ledger
            return refuse(self._identity, error, error.reason)
        # Heartbeats continue between generations, because an answer may tell that the present attempt is void.
        self._reports.start()
        self._heartbeats.start()
        try:
            with _refusing_exits(self._signalled):
                ending = self._train()
        except WorkersDifferError as error:
            return refuse(self._identity, error, "DataUnreadable", f"spec.data: {error}")
        except (ModelError, CallbackError, SpecError, StorageError) as error:
            message = f"spec.model: {error}" if isinstance(error, ModelError) else str(error)
            self.trainer.report_failure(error.reason, message)
            return refuse(self._identity, error, error.reason, message)
        except DeviceError as error:
            return _give_up(self._identity, error, error.reason)
        except DeviceMemoryError as error:
            return _give_up(self._identity, error, error.reason, stages=self.trainer.stages_too_few)
        finally:
            self._heartbeats.stop()
            self._reports.stop()
            self._handler.shutdown()
        return self._end(ending)

    def _train(self) -> Ending:
        """Train. Each time a generation is committed without this worker, wait for one that names it again."""
        device, identity = self._transport.device, self._identity
        with serve(self._meter, self, device, identity.address, identity.metrics_port):
            ending = self.trainer.run()
            while ending is Ending.LEFT and self._agent is None:
                self._become_fresh()
                # The signal came earlier, or in a garbage collection, which drops exceptions. If the job has ended, the
                # wait returns at once and says so.
                if self._asked.is_set() or self._signalled.is_set():
                    break
                ending = self._wait_and_train()
            if ending is Ending.CLOSED and self._asked.is_set() and not self._job_ended.is_set():
                ending = Ending.STOPPED
            if ending is Ending.STOPPED:
                self._reports.flush(FLUSH_SECONDS)
        return ending

    def _become_fresh(self) -> None:
        """Replace the trainer and free all that it held, because a generation was committed without this worker."""
        self._left = self._handler.current
        self._reports.forget()
        self._make_trainer()
        _give_back_memory(self._transport.device)

    def _wait_and_train(self) -> Ending:
        logger.info("%s left with generation %d and waits for another", self._identity.name, self._left)
        self._heartbeats.beat_now()
        try:
            self._handler.await_next()
        except RendezvousClosedError:
            return Ending.CLOSED
        return self.trainer.run(warm=True)

    def _make_trainer(self) -> None:
        identity = self._identity
        self._trainer = Trainer(
            self._job, identity.name, self._handler, self._watcher, self._transport, self._reports, identity.run_dir,
            self, meter=self._meter,
        )  # fmt: skip

    def _end(self, ending: Ending) -> WorkerEnd:
        """Write how this worker ended, and return its exit code."""
        signalled = self._signalled.is_set()
        if ending is Ending.STOPPED and not (signalled or self._asked.is_set()):
            ending = Ending.CLOSED
        logger.info("%s: %s", self._identity.name, ending.value)
        if ending is Ending.STOPPED:
            _end_as_told(self._identity, "Failed" if signalled else "Left", self.trainer.saved_step)
        else:
            _terminate(self._identity, "Succeeded" if ending is Ending.FINISHED else "Left", ending.value, "")
        return WorkerEnd(EXIT_STOPPED if ending is Ending.STOPPED and signalled else 0, ending, self._trainer)

    def _on_signal(self, *_: object) -> None:
        """On SIGTERM, leave at the end of the round, or at once if this worker holds nothing."""
        self._signalled.set()
        handler = self._handler
        if self._agent is not None:
            self._agent.close()
        elif self._left and handler.current == self._left:
            _terminate(self._identity, "Left", Ending.LEFT.value, "")
            raise SystemExit(0)
        elif handler.generation is None or handler.waiting_after is not None:
            # It holds nothing yet. Or its group broke, and no generation will name a pod that is being deleted.
            _end_as_told(self._identity, "Failed", 0 if self._trainer is None else self._trainer.saved_step)
            raise SystemExit(EXIT_STOPPED)

    def heartbeat(self) -> Heartbeat:
        trainer = self.trainer
        return Heartbeat(
            layout_generation=max(self._left, trainer.committed_generation),
            waiting_after=self._handler.waiting_after,
            lost_peers=trainer.lost_peers[:MAX_LOST_PEERS],
            why_broken=trainer.why_broken[:MAX_MESSAGE],
            unsaved=trainer.why_unsaved[:MAX_MESSAGE],
        )

    def on_job_ended(self) -> None:
        self._job_ended.set()
        self._handler.set_closed()

    def on_stop_asked(self) -> None:
        """Stop soon. A worker that waits for a generation leaves at once if all that it holds is durable, because its
        peers were told earlier and have left."""
        self._asked.set()
        if self._handler.waiting_after is not None and self.trainer.is_saved:
            self._handler.set_closed()

    def on_checkpoint_asked(self, token: str) -> None:
        self._checkpoint_request = token

    def checkpoint_request(self) -> str:
        return self._checkpoint_request

    def on_broken(self) -> None:
        self._heartbeats.beat_now()

    def stop_requested(self) -> bool:
        return self._asked.is_set() or self._signalled.is_set() or self._job_ended.is_set()

    def ends_soon(self) -> bool:
        return self._signalled.is_set() or self._job_ended.is_set()

    def out_of_time(self) -> bool:
        return (self._asked.is_set() and self._signalled.is_set()) or self._job_ended.is_set()


def _stop_while_loading(identity: WorkerIdentity) -> None:
    """On SIGTERM, end at once, until `WorkerProcess.run` takes over. Loading may take minutes, and in a container Linux
    drops the signal, because a process with the id 1 has no default action."""

    own = os.getpid()

    def end(*_: object) -> None:
        if os.getpid() == own:  # and not a process that reading the data has forked
            _end_as_told(identity, "Failed", 0)
            logging.shutdown()
        os._exit(EXIT_STOPPED)  # code that loads could catch an exception, or make it wait for its threads

    signal.signal(signal.SIGTERM, end)


@contextmanager
def _refusing_exits(signalled: threading.Event | None = None) -> Iterator[None]:
    """A context for the user's code. Its `sys.exit` ends the job as its exceptions do. Otherwise the operator would
    replace this worker, and the next one would exit too.

    Args:
        signalled: set before `_on_signal` exits; None while signals do not raise.
    """
    try:
        yield
    except SystemExit as error:
        if signalled is not None and signalled.is_set():
            raise
        words = f"the program of the job ended itself, as by sys.exit({error.code!r}); the log says where"
        raise SpecError("spec.podTemplate", words, reason=ModelError.reason) from error


def _give_back_memory(device: torch.device) -> None:
    """Return unused memory to the accelerator now instead of at the next allocation."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def refuse(identity: WorkerIdentity, error: Exception, reason: str, message: str = "") -> WorkerEnd:
    """End this worker because its job cannot be trained, by this or another worker. Log why."""
    return _give_up(identity, error, reason, message, exit_code=EXIT_SPEC)


def _give_up(
    identity: WorkerIdentity,
    error: Exception,
    reason: str,
    message: str = "",
    *,
    stages: int | None = None,
    exit_code: int = EXIT_WORKER,
) -> WorkerEnd:
    """End this worker because it cannot train, or not in pipelines of `stages` stages. Only the log shows where the
    user's code failed."""
    message = message or str(error)
    # An error of a process that reads samples carries its traceback as a note.
    origin = error if hasattr(error, "__notes__") else error.__cause__
    logger.error("%s: %s", reason, message, exc_info=origin)
    _terminate(identity, "Failed", reason, message, **({} if stages is None else {"stages": stages}))
    return WorkerEnd(exit_code)


def _end_as_told(identity: WorkerIdentity, outcome: str, saved: int) -> None:
    """Write that the worker ends because it was told to. `saved` is the step of its durable checkpoint, 0 for none."""
    words = f"told to stop; a checkpoint of step {saved} is durable" if saved else "told to stop"
    _terminate(identity, outcome, "Stopped", words, **({"savedStep": saved} if saved else {}))


def _terminate(identity: WorkerIdentity, outcome: str, reason: str, message: str, **more: int) -> None:
    if identity.termination_log is None:
        return
    line: dict[str, str | int] = {"outcome": outcome, "reason": reason, "message": message[:MAX_MESSAGE]} | more
    identity.termination_log.write_text(json.dumps(line) + "\n", encoding="utf-8")
