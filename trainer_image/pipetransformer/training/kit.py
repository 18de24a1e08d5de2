"""The objects that a worker keeps as long as it lives, through all generations."""

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
    """The objects that one worker keeps through all generations.

    Attributes:
        job: the job that trains; with `multiLevel`, the job of level 0.
        handler: the rendezvous, in which the members of a generation meet.
        watcher: tells the leader that a newer generation exists.
        transport: the address where other workers reach this one, and the device of training.
        reports: sends the leader's reports to the operator.
        run_dir: folder of the run's record.
        hooks: tells whether this worker shall stop, and has hook points for tests.
        watchdog: ends a wait for a worker that hangs.
        meter: counts this worker's Prometheus metrics.
        committer: commits the steps that all workers have voted for.
        checkpointer: writes and reads checkpoints.
        cache: this worker's cache of the outputs of frozen layers.
        mirrors: copies of this worker's stage and of its neighbour's, in host memory.
        readers: processes that read samples ahead; None if there are none.
        teller: calls the callbacks of the user's program.
        barrier: lets all members wait until each has finished its work with the storage.
        usable_bytes: memory that this worker's layers may take, in bytes; infinite if there is no limit.
        host_apart: whether host memory does not count as part of `usable_bytes`.
        reserve: host memory that was filled in advance.
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
        """Make the stage's runner, its optimizer and the reduction of its gradients, for the present boundary."""
        job = self.job.at(state.control.visit)
        self.mirrors.suit(job.codec, job.shells)
        self.place(state, member)
        self.cache.close_if_inputs_change()
        with RunningModel("making a stage and its optimizer"):  # no connection is used here
            member.equip(job, state, self.committer, self.cache.activations, self.readers, self.transport.device)

    def keeps_layers_on_device(self, control: Control, layout: StageLayout) -> bool:
        """Whether more frozen layers must stay on the devices because of this worker.

        Always False unless this worker is the first of its pipeline. The first worker returns True in these cases:

        - No more layers wait to move to host memory (`Control.awaited_layers`).
        - The job never moves layers there (`Layouts.offloads`).
        - Host memory counts as part of `usable_bytes`, so a move would save no memory.
        - Its cache lacks outputs of an epoch, or reading them is not known to be quicker than computing.
        """
        if not layout.is_first:
            return False
        awaited = layout.cut.prefix_layers(control.awaited_layers)
        leave = self.host_apart and self.job.layouts.offloads and awaited > control.cached_layers
        return not (leave and self.cache.holds_epoch(layout, awaited))

    def place(self, state: WorkerState, member: Membership) -> None:
        """Move this worker's units to host memory or back to the device, by `cached_layers` of the control state.

        Raises:
            DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
        """
        layout, cached_layers = member.layout, state.control.cached_layers
        off = layout.cut.off_device(layout.stage, cached_layers)
        with RunningModel("moving frozen layers between the accelerator and host memory"):
            self.meter.on_placed(state.keep_off_device(off, self.transport.device))
        member.placed_for = cached_layers
