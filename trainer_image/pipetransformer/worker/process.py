"""The life of a worker process: from its environment to its exit code.

A worker that a generation left out waits for one that names it again, or for the operator to end it: its pod would give
its accelerator away by ending, and that is for the operator to do, once a checkpoint is durable.

Exit 0 means that the worker left as the operator told it or that the job has ended, 2 that the user's spec cannot be
trained, 143 that a signal ended it, 1 anything else. The outcome also stands in the termination log, where it is found
after any outage of the channel.
"""

import datetime
import gc
import json
import logging
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from pipetransformer.checkpoint.resume import in_order_of_checkpoint
from pipetransformer.elastic.generations.channel_source import ChannelSource
from pipetransformer.elastic.generations.operator_channel import Channel, HeartbeatSender, ReportSender
from pipetransformer.elastic.generations.rendezvous import GenerationRendezvousHandler, GenerationSource, host_store
from pipetransformer.elastic.generations.watcher import GenerationWatcher
from pipetransformer.elastic.transport.groups import Transport
from pipetransformer.errors import (
    CallbackError,
    DeviceError,
    DeviceMemoryError,
    SpecError,
    StorageError,
    WorkersDifferError,
)
from pipetransformer.hooks import Hooks
from pipetransformer.job.checks import check_storage
from pipetransformer.job.load import load_job
from pipetransformer.job.script_parts import Parts
from pipetransformer.metrics import Meter, serve
from pipetransformer.pipeline import ModelError
from pipetransformer_contract.messages import MAX_LOST_PEERS, MAX_MESSAGE, Heartbeat
from pipetransformer_contract.spec import TrainerSpec
from pipetransformer_contract.wire import Env

from .torchrun_agent import OneGeneration
from .trainer import Ending, Trainer

logger = logging.getLogger(__name__)

EXIT_WORKER = 1
EXIT_SPEC = 2
EXIT_STOPPED = 143
#: For the report of the checkpoint that a worker leaves when it is told to stop.
FLUSH_SECONDS = 5.0
#: Of every rendezvous and what is asked of its store.
TIMEOUT = datetime.timedelta(seconds=300)


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Who this worker is and how it reaches the operator."""

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
            KeyError: one that is needed is missing.
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

    def channel(self) -> Channel:
        return Channel(self.channel_url, self.job, self.name, self.token_file, self.ca_file)


def choose_device() -> torch.device:
    """The accelerator of this worker, or the CPU. On the CPU one thread, unless the environment says otherwise."""
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
    """Live as the worker that `identity` describes, with the parts that its spec calls `script`."""
    agent = OneGeneration.from_environment()
    if agent is not None and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":  # they would all be one member
        words = "its torchrun starts several processes, but a worker is one process, one pod: say --nproc-per-node 1"
        return refuse(identity, SpecError("spec.podTemplate", words))
    try:
        spec = TrainerSpec.model_validate_json(os.environ[Env.JOB_SPEC])
        check_storage(spec)
        spec, num_shards = in_order_of_checkpoint(spec)
        job = load_job(spec, parts, num_shards=num_shards)
    except ValidationError as error:
        return _refuse(identity, error, "InvalidSpec")
    except SpecError as error:
        return refuse(identity, error)
    except StorageError as error:  # maybe here and now only: another worker may be able to
        return _give_up(identity, error, error.reason)

    stop = threading.Event()

    transport = Transport(identity.address, device=choose_device())
    channel = identity.channel()
    store, address = host_store(identity.address, TIMEOUT)
    operator = ChannelSource(channel, address, store)
    source: GenerationSource = operator if agent is None else agent
    handler = GenerationRendezvousHandler(identity.name, store, source, timeout=TIMEOUT)
    #: The generation that this worker left with; until it meets a newer one it holds nothing.
    left = 0

    def stop_soon(*_: object) -> None:
        stop.set()
        if agent is not None:
            agent.close()
        elif left and handler.current == left:
            _terminate(identity, "Left", Ending.LEFT.value, "")
            raise SystemExit(0)
        elif handler.generation is None or handler.waiting_after is not None:
            # It holds nothing yet; or its group broke, and no plan will name a pod that is being deleted.
            _end_as_told(identity, "Failed", trainers[-1].saved_step if trainers else 0)
            raise SystemExit(EXIT_STOPPED)

    trainers: list[Trainer] = []
    signal.signal(signal.SIGTERM, stop_soon)
    ended = threading.Event()
    #: Told by the operator, which gives time for a checkpoint before it has the process killed.
    asked = threading.Event()

    def leave_with_job() -> None:
        ended.set()
        handler.set_closed()

    def stop_in_time() -> None:
        """The operator says so with each answer. A worker that waits for a generation leaves if all is durable that it
        holds, because its peers were told earlier and have left."""
        asked.set()
        if handler.waiting_after is not None and trainers[-1].has_left:
            handler.set_closed()

    reports = ReportSender(channel, operator)
    watcher = GenerationWatcher(operator.watched() if agent is None else agent)
    meter = Meter()
    hooks = Hooks(
        on_broken=lambda: heartbeats.beat_now(),
        stop_requested=lambda: asked.is_set() or stop.is_set() or ended.is_set(),
        ends_soon=lambda: stop.is_set() or ended.is_set(),
        out_of_time=lambda: (asked.is_set() and stop.is_set()) or ended.is_set(),
    )

    def make_trainer() -> Trainer:
        new = Trainer(job, identity.name, handler, watcher, transport, reports, identity.run_dir, hooks, meter=meter)
        trainers[:] = [new]
        return new

    try:
        trainer = make_trainer()
    except (SpecError, StorageError) as error:  # it looks at the data, and begins its ledger
        return _refuse(identity, error, error.reason)

    def heartbeat() -> Heartbeat:
        return Heartbeat(
            layout_generation=max(left, trainer.committed_generation),
            step=trainer.step,
            waiting_after=handler.waiting_after,
            lost_peers=trainer.lost_peers[:MAX_LOST_PEERS],
            because=trainer.why_broken[:MAX_MESSAGE],
            unsaved=trainer.why_unsaved[:MAX_MESSAGE],
        )

    # Also while it is between generations: that is when it learns of one that makes its attempt void.
    heartbeats = HeartbeatSender(channel, operator, heartbeat, leave_with_job, stop_in_time)
    reports.start()
    heartbeats.start()
    try:
        with serve(meter, lambda: trainer.position, transport.device, identity.address, identity.metrics_port):
            ending = trainer.run()
            while ending is Ending.LEFT and agent is None:
                left = handler.current
                reports.forget()
                trainer = make_trainer()  # all that the one before it had is free
                _give_back_memory(transport.device)
                if hooks.stop_requested():  # before it had left, or in a collection of garbage, which drops exceptions
                    break
                logger.info("%s left with generation %d, and waits", identity.name, left)
                heartbeats.beat_now()
                try:
                    handler.await_next()
                except RendezvousClosedError:
                    ending = Ending.CLOSED
                else:
                    ending = trainer.run(warm=True)
            if ending is Ending.CLOSED and asked.is_set() and not ended.is_set():
                ending = Ending.STOPPED
            if ending is Ending.STOPPED:
                reports.flush(FLUSH_SECONDS)
    except WorkersDifferError as error:
        return _refuse(identity, error, "DataUnreadable", f"spec.data: {error}")
    except (ModelError, CallbackError, SpecError, StorageError) as error:
        message = f"spec.model: {error}" if isinstance(error, ModelError) else str(error)
        trainer.fail(error.reason, message)
        return _refuse(identity, error, error.reason, message)
    except DeviceError as error:
        return _give_up(identity, error, error.reason)
    except DeviceMemoryError as error:
        return _give_up(identity, error, error.reason, stages=trainer.stages_too_few)
    finally:
        heartbeats.stop()
        reports.stop()
        handler.shutdown()
    if ending is Ending.STOPPED and not (stop.is_set() or asked.is_set()):
        ending = Ending.CLOSED
    logger.info("%s: %s", identity.name, ending.value)
    if ending is Ending.STOPPED and stop.is_set():
        _end_as_told(identity, "Failed", trainer.saved_step)
        return WorkerEnd(EXIT_STOPPED, ending, trainer)
    if ending is Ending.STOPPED:
        _end_as_told(identity, "Left", trainer.saved_step)
    else:
        _terminate(identity, "Succeeded" if ending is Ending.FINISHED else "Left", ending.value, "")
    return WorkerEnd(0, ending, trainer)


def refuse(identity: WorkerIdentity, error: SpecError) -> WorkerEnd:
    """End as a worker whose job cannot be trained."""
    return _refuse(identity, error, error.reason)


def _give_back_memory(device: torch.device) -> None:
    """What is not in use any more goes back to the accelerator, and does not wait for the next allocation."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _refuse(identity: WorkerIdentity, error: Exception, reason: str, message: str = "") -> WorkerEnd:
    """The job cannot be trained."""
    _give_up(identity, error, reason, message)
    return WorkerEnd(EXIT_SPEC)


def _give_up(
    identity: WorkerIdentity, error: Exception, reason: str, message: str = "", *, stages: int | None = None
) -> WorkerEnd:
    """Not by this worker, or not in pipelines of so few stages. Where code of the user's failed is in the log alone."""
    message = message or str(error)
    # What a process that reads samples raised comes from there as a note.
    origin = error if hasattr(error, "__notes__") else error.__cause__
    logger.error("%s: %s", reason, message, exc_info=origin)
    _terminate(identity, "Failed", reason, message, **({} if stages is None else {"stages": stages}))
    return WorkerEnd(EXIT_WORKER)


def _end_as_told(identity: WorkerIdentity, outcome: str, saved: int) -> None:
    """Say that the worker ends because it was told to, and of which step it left a durable checkpoint; 0 for none."""
    words = f"told to stop; a checkpoint of step {saved} is durable" if saved else "told to stop"
    _terminate(identity, outcome, "Stopped", words, **({"savedStep": saved} if saved else {}))


def _terminate(identity: WorkerIdentity, outcome: str, reason: str, message: str, **more: int) -> None:
    if identity.termination_log is None:
        return
    line: dict[str, str | int] = {"outcome": outcome, "reason": reason, "message": message[:MAX_MESSAGE]} | more
    identity.termination_log.write_text(json.dumps(line) + "\n", encoding="utf-8")
