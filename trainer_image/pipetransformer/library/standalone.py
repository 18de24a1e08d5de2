"""Trains without an operator: in this process alone, or on all ranks that torchrun started."""

import datetime
import itertools
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from pipetransformer.checkpoint.checkpointer import Checkpointer
from pipetransformer.checkpoint.resume import newest_checkpoint
from pipetransformer.elastic.generations.rendezvous import GenerationRendezvousHandler, host_store
from pipetransformer.elastic.generations.standalone_world import Chooser, Follower, World, run_uid, worker_name
from pipetransformer.elastic.generations.watcher import GenerationWatcher
from pipetransformer.elastic.transport.groups import (
    PrefixStore,
    Store,
    TCPStore,
    Transport,
    default_group_until_end,
)
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
from pipetransformer.record import newest_generation, set_aside
from pipetransformer.state.control import Control
from pipetransformer.storage import CheckpointInfo
from pipetransformer.worker.process import choose_device
from pipetransformer.worker.trainer import Ending, Trainer
from pipetransformer_contract.choose import Bounds
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.spec import TrainerSpec

logger = logging.getLogger(__name__)

_TIMEOUT = datetime.timedelta(seconds=300)
_LOOPBACK = "127.0.0.1"
#: Numbers the runs of this process. All ranks have the same numbers, because they make the same calls.
_run_numbers = itertools.count()


class _StopOnSignal(Hooks):
    """Makes a rank leave after the current round once its process got SIGTERM."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def stop_requested(self) -> bool:
        return self._stop.is_set()


def run_standalone(spec: TrainerSpec, parts: Parts, run_dir: Path) -> tuple[Ending, Control]:
    """Train the job of `spec` to its end on a fixed number of processes. Resumes a checkpoint if there is one.

    Args:
        spec: the trainer's spec.
        parts: the objects that the program passed to `train`.
        run_dir: folder of the run's record.

    Returns:
        How the run ended, and its control state. Ranks that were idle in the last layout get both from rank 0.

    Raises:
        SpecError: the job cannot be trained as specified.
        ModelError: the model failed.
        DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
        CallbackError: a callback failed.
        StorageError: a checkpoint or the model cannot be written.
        SystemExit: this rank was idle in the last layout, and the run failed on the others.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise SpecError("train", "creates its own process groups: do not call init_process_group before it")
    shared, rank, size = _meeting_point(os.environ)
    check_storage(spec)
    resumed = newest_checkpoint(spec)
    spec = _in_world(spec, size, resumed)
    job = load_job(spec, parts, num_shards=None if resumed is None else resumed.num_shards)
    address = _own_address(os.environ)
    own_store, listens_at = host_store(address, _TIMEOUT)
    world = World.meet(own_store if shared is None else shared, rank, size, listens_at)
    world.compare(_same_on_all_ranks(spec))
    source = _chooser(world, job, resumed, run_dir) if rank == 0 else Follower(world)
    watcher = GenerationWatcher(source.watch if isinstance(source, Chooser) else source.next_generation)
    stop = threading.Event()
    device = _device_alone() if shared is None else choose_device()
    handler = GenerationRendezvousHandler(worker_name(rank), own_store, source, timeout=_TIMEOUT)
    with default_group_until_end(), _stopping(stop, source), ExitStack() as at_end:
        at_end.callback(handler.shutdown)  # otherwise the watcher's thread keeps the store open after a failed run
        at_end.enter_context(_telling(world))
        ending, warm = Ending.LEFT, False
        while ending is Ending.LEFT:  # a rank that is not in the layout waits for a layout that includes it
            trainer = Trainer(
                job, worker_name(rank), handler, watcher, Transport(address, device=device), source, run_dir,
                _StopOnSignal(stop),
            )  # fmt: skip
            ending, warm = _run(trainer, warm=warm), True
    control = trainer.control
    if stop.is_set():
        return Ending.STOPPED, control
    if rank == 0:
        world.tell_end({"ending": ending.value, "control": control.to_dict()})
    elif ending is Ending.CLOSED:
        ending, control = _told(world)
    world.leave()
    return ending, control


def _in_world(spec: TrainerSpec, size: int, resumed: CheckpointInfo | None) -> TrainerSpec:
    """Adapt `spec` to `size` processes: set `workers` to `size`, and limit stages and pipelines to `size`.

    `resumed` is the checkpoint that the run resumes, or None. It also limits the pipelines, to its shards.
    """
    return spec.model_copy(
        update={
            "workers": size,
            "num_shards": size if resumed is None else min(size, resumed.num_shards),
            "pipeline": spec.pipeline.model_copy(update={"stages": min(spec.pipeline.stages, size)}),
        }
    )


def _same_on_all_ranks(spec: TrainerSpec) -> dict[str, Any]:
    """What a spec must say on all ranks, by field. Paths of the model and the data may differ between machines."""
    parts = {"training": spec.training, "pipeline": spec.pipeline, "freeze": spec.freeze, "evaluation": spec.evaluation}
    return {
        f"spec.{name}.{field}": value
        for name, part in parts.items()
        for field, value in part.model_dump(mode="json", by_alias=True).items()
    }


def _chooser(world: World, job: Job, resumed: CheckpointInfo | None, run_dir: Path) -> Chooser:
    """Make the object that chooses layouts on rank 0."""
    if resumed is None:
        set_aside(run_dir)
    spec, size = job.spec, job.spec.workers
    stages = spec.pipeline.stages
    initial = Layout(stages, min(size // stages, spec.num_shards))
    _warn_of_idle(initial, size, resumed)
    bounds = Bounds(initial, 1, size, 1, spec.num_shards, job.layouts.bytes_budget)
    first = 1
    if resumed is not None:  # later generations than the checkpoint's may be in the record only
        first += max(Checkpointer(job).newest_generation(), newest_generation(run_dir))
    uid = run_uid("" if resumed is None else str(resumed.state.get("jobUid", "")))
    return Chooser(world, bounds, spec.pipeline.packing, first=first, run_uid=uid)


def _run(trainer: Trainer, *, warm: bool) -> Ending:
    """Train until this rank leaves or the run ends. A failure is reported to the source of generations, then raised.
    `warm` is as for `Trainer.run`."""
    try:
        return trainer.run(warm=warm)
    except (ModelError, DeviceError, DeviceMemoryError, CallbackError, SpecError, StorageError) as error:
        trainer.report_failure(error.reason, str(error))
        raise
    except WorkersDifferError as error:
        raise SpecError("data", str(error), reason="DataUnreadable") from error
    finally:
        trainer.close()


def _warn_of_idle(initial: Layout, size: int, resumed: CheckpointInfo | None) -> None:
    if initial.workers == size:
        return
    why = f"a pipeline has {initial.stages} stages"
    if resumed is not None and initial.pipelines == resumed.num_shards:
        why = f"the data of the checkpoint {resumed.folder} allow no more pipelines"
    logger.warning("%d of %d processes are idle in the first layout: %s", size - initial.workers, size, why)


@contextmanager
def _telling(world: World) -> Iterator[None]:
    """A context for the training. On rank 0 it tells idle ranks the error, if one is raised."""
    try:
        yield
    except BaseException as error:
        if world.rank == 0:
            with suppress(dist.DistError):
                world.tell_end({"error": str(error) or type(error).__name__})
        raise


def _told(world: World) -> tuple[Ending, Control]:
    """Wait until rank 0 tells how the run ended. A rank that is idle in the last layout calls this.

    Raises:
        SystemExit: the run failed on rank 0, or rank 0 is gone.
    """
    try:
        end = world.end()
    except dist.DistError as error:
        raise SystemExit("rank 0 is gone") from error
    if "error" in end:
        raise SystemExit(f"rank 0 failed: {end['error']}")
    return Ending(end["ending"]), Control.from_dict(end["control"])


def _meeting_point(environment: Mapping[str, str]) -> tuple[Store | None, int, int]:
    """The store that torchrun's ranks share, this rank, and the number of ranks; (None, 0, 1) without torchrun."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None, 0, 1
    store, rank, size = next(rendezvous("env://", timeout=_TIMEOUT))
    assert isinstance(store, TCPStore)
    # The prefix separates this run's keys from those of earlier attempts by torchrun, and of earlier runs here.
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"pipetransformer/{attempt}/{next(_run_numbers)}", store), rank, size


def _own_address(environment: Mapping[str, str]) -> str:
    """The address of this machine on the network that leads to rank 0; loopback if all ranks are on this machine."""
    host = environment.get("MASTER_ADDR")
    if host is None or environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE"):
        return _LOOPBACK
    family, kind, _, _, target = socket.getaddrinfo(host, int(environment["MASTER_PORT"]), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _device_alone() -> torch.device:
    """The device of a run in one process. Unlike `choose_device`, this does not change torch's number of threads."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def _stopping(stop: threading.Event, source: Chooser | Follower) -> Iterator[None]:
    """A context that lets SIGTERM end the run after the current round. Does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop_soon(*_: object) -> None:
        stop.set()
        if isinstance(source, Follower):
            source.close()

    before = signal.signal(signal.SIGTERM, stop_soon)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
