"""A run without an operator: this process alone, or the ranks that torchrun started."""

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

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from pipetransformer.checkpoint.checkpointer import Checkpointer
from pipetransformer.checkpoint.resume import newest_checkpoint
from pipetransformer.elastic.generations.rendezvous import GenerationRendezvousHandler, host_store
from pipetransformer.elastic.generations.standalone_world import Chooser, Follower, World, run_uid, worker_name
from pipetransformer.elastic.generations.watcher import GenerationWatcher
from pipetransformer.elastic.transport.groups import PrefixStore, Store, TCPStore, Transport
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
from pipetransformer.job.load import load_job
from pipetransformer.job.script_parts import Parts
from pipetransformer.record import newest_generation, set_aside
from pipetransformer.state.control import Control
from pipetransformer.storage import CheckpointInfo
from pipetransformer.worker.process import choose_device
from pipetransformer.worker.trainer import Ending, Trainer
from pipetransformer_contract.choose import Bounds, Layout
from pipetransformer_contract.spec import TrainerSpec

logger = logging.getLogger(__name__)

_TIMEOUT = datetime.timedelta(seconds=300)
_LOOPBACK = "127.0.0.1"
#: Of this process, as every rank counts them.
_run_numbers = itertools.count()


def run_fixed(spec: TrainerSpec, parts: Parts, run_dir: Path) -> tuple[Ending, Control]:
    """Train `spec` in a world of fixed size until it ends. A checkpoint at its location is resumed.

    Returns:
        How it ended, and what all ranks know of it: also those that the last layout left over.

    Raises:
        SpecError: what the user asked for cannot be trained.
        ModelError: the model failed.
        DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
        CallbackError: a callback failed.
        StorageError: a checkpoint or the model cannot be written.
        SystemExit: this rank had no part in the last layout, and the run has failed.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise SpecError("train", "makes the process groups that it needs: do not call init_process_group before it")
    shared, rank, size = _meeting_point(os.environ)
    check_storage(spec)
    resumed = newest_checkpoint(spec)
    stages, num_shards = min(spec.pipeline.stages, size), None if resumed is None else resumed.num_shards
    spec = spec.model_copy(
        update={
            "workers": size,
            "num_shards": size if num_shards is None else min(size, num_shards),
            "pipeline": spec.pipeline.model_copy(update={"stages": stages}),
        }
    )
    job = load_job(spec, parts, num_shards=num_shards)
    address = _own_address(os.environ)
    own_store, listens_at = host_store(address, _TIMEOUT)
    world = World.meet(own_store if shared is None else shared, rank, size, listens_at)
    source: Chooser | Follower
    if rank == 0:
        if resumed is None:
            set_aside(run_dir)
        initial = Layout(stages, min(size // stages, spec.num_shards))
        _warn_of_idle(initial, size, resumed)
        bounds = Bounds(initial, 1, size, 1, spec.num_shards, job.bytes_budget)
        first = 1
        if resumed is not None:  # which need not be the newest: what came after it may be without a checkpoint
            first += max(Checkpointer(job).newest_generation(), newest_generation(run_dir))
        uid = run_uid("" if resumed is None else str(resumed.state.get("job_uid", "")))
        source = Chooser(world, bounds, spec.pipeline.packing, first=first, run_uid=uid)
        watcher = GenerationWatcher(source.watched())
    else:
        source = Follower(world)
        watcher = GenerationWatcher(source)
    stop = threading.Event()
    device = _device_alone() if shared is None else choose_device()
    handler = GenerationRendezvousHandler(worker_name(rank), own_store, source, timeout=_TIMEOUT)
    with _stopping(stop, source), ExitStack() as at_end:
        at_end.callback(handler.shutdown)  # else the watcher's thread keeps the store of a run that failed
        at_end.enter_context(_telling(world))
        ending = Ending.LEFT
        while ending is Ending.LEFT:  # a rank that a layout leaves over waits for one that names it again
            trainer = Trainer(
                job, worker_name(rank), handler, watcher, Transport(address, device=device), source, run_dir,
                Hooks(stop_requested=stop.is_set),
            )  # fmt: skip
            try:
                ending = trainer.run()
            except (ModelError, DeviceError, DeviceMemoryError, CallbackError, SpecError, StorageError) as error:
                trainer.fail(error.reason, str(error))
                raise
            except WorkersDifferError as error:
                raise SpecError("data", str(error), reason="DataUnreadable") from error
            finally:
                trainer.close()
    control = trainer.control
    if stop.is_set():
        return Ending.STOPPED, control
    if rank == 0:
        world.tell_end({"ending": ending.value, "control": control.to_dict()})
    elif ending is Ending.CLOSED:
        ending, control = _told(world)
    world.leave()
    return ending, control


def _warn_of_idle(initial: Layout, size: int, resumed: CheckpointInfo | None) -> None:
    if initial.workers == size:
        return
    why = f"{initial.stages} stages are a pipeline"
    if resumed is not None and initial.pipelines == resumed.num_shards:
        why = f"the data of the checkpoint {resumed.folder} are in order of {resumed.num_shards}, one for a pipeline"
    logger.warning("%d of %d processes have no part in the first layout: %s", size - initial.workers, size, why)


@contextmanager
def _telling(world: World) -> Iterator[None]:
    """On rank 0: tell ranks without a part in it why the run failed."""
    try:
        yield
    except BaseException as error:
        if world.rank == 0:
            with suppress(dist.DistError):
                world.tell_end({"error": str(error) or type(error).__name__})
        raise


def _told(world: World) -> tuple[Ending, Control]:
    """What rank 0 says of a run that ended without this rank."""
    try:
        end = world.end()
    except dist.DistError as error:
        raise SystemExit("rank 0 has gone") from error
    if "error" in end:
        raise SystemExit(f"rank 0 has failed: {end['error']}")
    return Ending(end["ending"]), Control.from_dict(end["control"])


def _meeting_point(environment: Mapping[str, str]) -> tuple[Store | None, int, int]:
    """The store that torchrun's ranks share, this rank and their number; (None, 0, 1) without torchrun."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None, 0, 1
    store, rank, size = next(rendezvous("env://", timeout=_TIMEOUT))
    assert isinstance(store, TCPStore)
    # Processes that torchrun starts again may find the keys of those before them, and a run those of an earlier run.
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"pipetransformer/{attempt}/{next(_run_numbers)}", store), rank, size


def _own_address(environment: Mapping[str, str]) -> str:
    """The address of this machine on the way to rank 0."""
    host = environment.get("MASTER_ADDR")
    if host is None or environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE"):
        return _LOOPBACK
    family, kind, _, _, target = socket.getaddrinfo(host, int(environment["MASTER_PORT"]), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _device_alone() -> torch.device:
    """One process has the machine to itself, so torch's own number of threads stays."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def _stopping(stop: threading.Event, source: Chooser | Follower) -> Iterator[None]:
    """SIGTERM leaves at a round's end, where the run is in the main thread."""
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
