"""The parts that a worker keeps as long as it lives, through all generations."""

from dataclasses import dataclass, field
from pathlib import Path

from pipetransformer.callbacks.callback import Teller
from pipetransformer.checkpoint.checkpointer import Checkpointer
from pipetransformer.data import Readers
from pipetransformer.elastic.generations.rendezvous import GenerationRendezvousHandler
from pipetransformer.elastic.generations.watcher import GenerationWatcher
from pipetransformer.elastic.regroup.mirrors import Mirrors
from pipetransformer.elastic.transport.barrier import Barrier
from pipetransformer.elastic.transport.groups import Transport
from pipetransformer.elastic.transport.watchdog import Watchdog
from pipetransformer.errors import RunningModel
from pipetransformer.hooks import Hooks
from pipetransformer.job.job import Job
from pipetransformer.metrics import Meter
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState

from .cache_handover import WorkerCache
from .commit import Committer
from .leader_reports import ReportSink
from .membership import Membership
from .memory_reserve import Reserve


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """One worker's lasting parts.

    Attributes:
        job: that trains.
        handler: meets the members of a generation.
        watcher: tells the leader of a newer generation.
        transport: how groups reach the others, and the device of training.
        reports: take the leader's reports to the operator.
        run_dir: of the record.
        hooks: of the process.
        watchdog: ends waits for a peer that hangs.
        meter: of this worker's metrics.
        committer: makes committed state of what all voted for.
        checkpointer: writes and reads checkpoints.
        cache: of what frozen layers made.
        mirrors: of the neighbour's stage.
        readers: processes that read samples ahead; None where there are none.
        teller: of the program's callbacks.
        barrier: behind storage.
        usable_bytes: that this worker's layers may take; infinite if nothing bounds them.
        host_apart: whether host memory is apart from these bytes.
        reserve: of host memory.
    """

    job: Job
    handler: GenerationRendezvousHandler
    watcher: GenerationWatcher
    transport: Transport
    reports: ReportSink
    run_dir: Path
    hooks: Hooks
    watchdog: Watchdog
    meter: Meter
    committer: Committer
    checkpointer: Checkpointer
    cache: WorkerCache
    mirrors: Mirrors
    readers: Readers | None
    teller: Teller
    barrier: Barrier
    usable_bytes: float
    host_apart: bool
    reserve: Reserve = field(default_factory=Reserve)

    def equip(self, state: WorkerState, member: Membership) -> None:
        """Make the stage, its optimizer and the reduction of its gradients, at the present boundary."""
        job = self.job.at(state.control.visit)
        self.mirrors.suit(job.codec, job.shells)
        self.place(state, member)
        with RunningModel("making a stage and its optimizer"):  # no connection can have broken in it
            member.equip(job, state, self.committer, self.cache.activations, self.readers, self.transport.device)

    def is_cold(self, control: Control, layout: StageLayout) -> bool:
        """Whether this worker is the first of its pipeline, and further frozen layers must stay on its device."""
        if not layout.is_first:
            return False
        awaited = layout.cut.prefix_layers(control.awaited_layers)
        leave = self.host_apart and self.job.offloads and awaited > control.cached_layers
        return not (leave and self.cache.holds_epoch(layout, awaited))

    def place(self, state: WorkerState, member: Membership) -> None:
        """Move units to host memory, or back to the device, as the control state says.

        Raises:
            DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
        """
        layout, cached_layers = member.layout, state.control.cached_layers
        off = layout.cut.off_device(layout.stage, cached_layers)
        with RunningModel("moving frozen layers between the accelerator and host memory"):
            self.meter.on_placed(state.keep_off_device(off, self.transport.device))
        member.placed_for = cached_layers
