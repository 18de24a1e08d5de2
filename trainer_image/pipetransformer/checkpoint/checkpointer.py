"""Makes checkpoints durable while training goes on, and loads them for any layout.

Between two rounds each worker of the first pipeline copies its stage to host memory while the others wait, and a thread
writes the copy. Each vote counts the workers that still write. When none does, a thread of the leader writes the
marker, and the checkpoint counts. One checkpoint is written at a time. A regroup cancels it, and the new generation
begins another. Without `everySteps`, the interval follows from the cost of the newest checkpoint (`interval_seconds`).
If the storage fails, training continues, and the workers retry until the storage works again.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from pipetransformer.device_copies import HostCopies
from pipetransformer.elastic.regroup.transfer_plan import DurablePoint
from pipetransformer.elastic.transport.barrier import Barrier
from pipetransformer.elastic.transport.groups import GenerationGroups
from pipetransformer.errors import StorageError, storing
from pipetransformer.hooks import WorkerSignals
from pipetransformer.job.checks import check_resumed
from pipetransformer.job.job import Job
from pipetransformer.models import unit_name
from pipetransformer.models.off_device import is_off
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.storage import CheckpointInfo, commit, find, latest, load_unit, newest_generation
from pipetransformer_contract.messages import DurableCheckpoint

from .best_model import best_location
from .level_weights import level_locations
from .prefetch import Prefetcher
from .storage_work import AGAIN_SECONDS, StorageWork, Write, can_wait

logger = logging.getLogger(__name__)

#: Largest share of the time that training may pause for checkpoints, and largest share that the storage may be busy.
LARGEST_SHARE = 0.01
LARGEST_SHARE_OF_STORAGE = 0.1
#: Smallest and largest seconds between checkpoints. They win over the shares above.
SHORTEST_INTERVAL = 60.0
LONGEST_INTERVAL = 1800.0
#: Seconds between two attempts to write while training continues. Each attempt retries for up to a minute by itself.
_PAUSE_SECONDS = 10.0


def interval_seconds(pause_seconds: float, writing_seconds: float) -> float:
    """Seconds between two checkpoints if the spec does not say how often.

    Args:
        pause_seconds: seconds that training paused for the newest checkpoint.
        writing_seconds: seconds from the start of that checkpoint until all workers had written their parts.
    """
    wanted = max(pause_seconds / LARGEST_SHARE, writing_seconds / LARGEST_SHARE_OF_STORAGE)
    return min(LONGEST_INTERVAL, max(SHORTEST_INTERVAL, wanted))


@dataclass(slots=True)
class _InProgress:
    """A checkpoint that is not yet durable.

    Attributes:
        info: its marker.
        work: writes this worker's part, or the marker. None if this worker has no part, or has written it.
        token: token of the request that the checkpoint answers; empty if a user did not ask for it.
        begun_at: when it was begun, by the clock.
        pause_seconds: for how many seconds training paused for it.
    """

    info: CheckpointInfo
    work: StorageWork | None
    token: str
    begun_at: float
    pause_seconds: float


class Checkpointer:
    """Saves and loads checkpoints at `spec.checkpoint.location`. Without that field it saves and finds nothing.

    Between two rounds all members call `want`, `begin` and `advance` in the same order. Only the results of
    `poll_writing` and `overdue` differ between members, so members exchange them in the vote.

    Args:
        job: the job that trains.
        signals: tell whether this worker must leave, and whether its time to save its state is over.
        clock: returns seconds that only grow.

    Attributes:
        why_unsaved: the last error if this worker cannot write its part of the current checkpoint, or the marker;
            otherwise empty.
    """

    def __init__(
        self,
        job: Job,
        signals: WorkerSignals | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._signals = signals or WorkerSignals()
        self._clock = clock
        self.why_unsaved = ""
        #: Of the newest checkpoint: when it was begun, by the clock and in committed steps, and what it cost.
        self._begun_at, self._begun_step = clock(), 0
        self._pause_seconds = self._writing_seconds = 0.0
        self._spec = job.spec.checkpoint
        self._loading: CheckpointInfo | None = None
        self._known: CheckpointInfo | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._wanted = False
        #: The checkpoint that the members are writing.
        self._begun: _InProgress | None = None
        #: On the leader: the checkpoint whose marker is being written.
        self._marking: _InProgress | None = None
        self._cancelled = threading.Event()
        #: Token of the request that the newest durable checkpoint of the generation answers.
        self._served = ""
        #: Whether an attempt to write the current checkpoint failed. Its duration is then not used for the interval.
        self._was_late = False

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` committed steps, by `checkpoint.everySteps`."""
        every = None if self._spec is None else self._spec.every_steps
        return every is not None and step % every == 0

    @property
    def _asked(self) -> bool:
        """Whether a user asks for a checkpoint, and this worker began none since."""
        token = self._signals.checkpoint_request()
        answered = {self._served, *(each.token for each in (self._begun, self._marking) if each is not None)}
        return bool(token) and token not in answered

    def overdue(self, step: int) -> bool:
        """Whether a checkpoint of `step` is due because a user asked for one, or by this worker's clock.

        The clock counts only without `checkpoint.everySteps`, and while no checkpoint is being written. It does not
        count for the step of the newest checkpoint, as while a job waits and makes no step.
        """
        if self._spec is not None and self._asked:
            return True
        if self._spec is None or self._spec.every_steps is not None or self._begun is not None:
            return False
        if step == self._begun_step:
            return False
        interval = interval_seconds(self._pause_seconds, self._writing_seconds)
        return self._clock() >= self._begun_at + interval

    def poll_writing(self) -> bool:
        """If an attempt to write this worker's part of the current checkpoint failed, try again. Returns whether the
        part is not yet written.

        Raises:
            StorageError: the storage failed, and a later attempt would fail, too, as for a wrong location.
        """
        begun = self._begun
        if begun is None:
            return False
        if self._finish_or_retry(begun):
            begun.work = None
        return begun.work is not None

    def _finish_or_retry(self, checkpoint: _InProgress) -> bool:
        """If the work on `checkpoint` failed but the storage may recover, start it again. Returns whether none is left.

        Raises:
            StorageError: the storage failed, and a later attempt would fail, too.
        """
        work = checkpoint.work
        if work is None:
            return True
        if not work.done:
            return False
        try:
            work.wait()
        except StorageError as error:
            leaves_later = self._signals.stop_requested() and not self._signals.out_of_time()  # then `save_now` retries
            if not (leaves_later or can_wait(error)):
                raise
            logger.warning("training without a new checkpoint: %s", error)
            self.why_unsaved, self._was_late = str(error), True
            work.repeat(_PAUSE_SECONDS)
            return False
        self.why_unsaved = ""
        return True

    def want(self) -> None:
        """Request a checkpoint. The next `begin` starts it, once no other checkpoint is being written."""
        self._wanted = self._spec is not None

    def begin(self, state: WorkerState, layout: StageLayout, groups: GenerationGroups, barrier: Barrier) -> None:
        """Copy the committed state and begin to write the copy. Does nothing if no checkpoint was requested (`want`),
        or if one is being written.

        Raises:
            RuntimeError: a connection broke.
        """
        if self._spec is None or not self._wanted or self._begun is not None:
            return
        # Name the checkpoint.
        self._wanted = False
        token = self._signals.checkpoint_request()
        control = state.control
        job = self._job.at(control.visit)
        info = CheckpointInfo(
            step=control.step,
            boundary=control.boundary,
            layout_generation=control.lasting_generation(layout.number),
            nonce=layout.generation.nonce,
            num_layers=job.num_layers,
            min_stages=job.layouts.min_stages(control.settled_boundary),
            num_shards=job.order.num_shards,
            state=control.to_file(),
            run=job.identity,
        )
        # Copy the state while all members wait.
        host, self._begun_at, self._was_late = HostCopies(), self._clock(), False
        self._begun_step = control.step

        def copied(index: int) -> dict[str, Tensor]:
            tensors = state.unit_tensors(index, with_moments=True)
            if is_off(state.held[index]):
                return tensors
            return {name: host.copy(tensor) for name, tensor in tensors.items()}

        def copy() -> dict[str, dict[str, Tensor]]:
            return {unit_name(index, job.num_layers): copied(index) for index in layout.units}

        self._cancelled = threading.Event()
        copies = barrier.pass_after(copy if layout.pipeline == 0 else None, groups)
        self._pause_seconds = self._clock() - self._begun_at
        # Begin to write the copies.
        self._begun = _InProgress(info, None, token, self._begun_at, self._pause_seconds)
        if copies is not None:
            location, cancelled = self._spec.location, self._cancelled
            write = Write(location, info, copies, host, cancelled)
            self._begun.work = StorageWork(self._thread, write.run, location, cancelled)

    def advance(self, writing: float, *, leads: bool) -> DurableCheckpoint | None:
        """Let the leader write the marker once all members have written their parts. Members call this after each vote.

        Args:
            writing: the sum of the votes: the number of members that still write.
            leads: whether this worker is the leader.

        Returns:
            On the leader, the checkpoint that has just become durable; otherwise None.

        Raises:
            StorageError: the marker cannot be written, and a later attempt would fail, too.
        """
        if self._begun is not None and not writing:
            if not self._was_late:
                self._writing_seconds = self._clock() - self._begun_at
            if leads:
                self._drop_marking()
                self._marking = self._mark(self._begun)
            self._begun = None
        if self._marking is None or not self._finish_or_retry(self._marking):
            return None
        marking, self._marking = self._marking, None
        return self._marked(marking)

    def save_now(
        self, state: WorkerState, layout: StageLayout, groups: GenerationGroups, barrier: Barrier
    ) -> DurableCheckpoint | None:
        """Write a checkpoint of the committed state and wait until it is durable. All members call this.

        Retries until the storage works, a connection breaks, or the worker's time is over
        (`WorkerSignals.out_of_time`).

        Returns:
            On the leader, the durable checkpoint; None on other workers, or without `spec.checkpoint`.

        Raises:
            StorageError: the checkpoint could not be written in time.
            RuntimeError: a connection broke.
        """
        if self._spec is None:
            return None
        self.cancel()
        self.want()
        self.begin(state, layout, groups, barrier)
        return self.complete(layout, groups, barrier, insist=True)

    def complete(
        self, layout: StageLayout, groups: GenerationGroups, barrier: Barrier, *, insist: bool = False
    ) -> DurableCheckpoint | None:
        """Wait until the newest checkpoint that is being written, if any, is durable. All members call this.

        Args:
            insist: whether to retry while the storage fails, as `save_now` does; otherwise the first error is raised.

        Returns:
            On the leader, the durable checkpoint; None on other workers, or if none was being written.

        Raises:
            StorageError: the checkpoint cannot be written.
            RuntimeError: a connection broke.
        """
        begun, self._begun = self._begun, None
        if begun is not None:  # its part waits in the thread, behind an earlier marker
            self._drop_marking()
        part = None if begun is None else begun.work
        cancelled = self._cancelled if insist else None
        barrier.pass_after(None if part is None else partial(self._insist, part, cancelled), groups)
        if begun is not None and layout.is_leader:
            self._marking = self._mark(begun)
        marking, self._marking = self._marking, None

        def finish(marking: _InProgress) -> DurableCheckpoint:
            assert marking.work is not None
            self._insist(marking.work, cancelled)
            return self._marked(marking)

        return barrier.pass_after(None if marking is None else partial(finish, marking), groups)

    def _insist(self, work: StorageWork, cancelled: threading.Event | None) -> None:
        """Wait until `work` succeeds. Repeats it while the storage fails, until `cancelled` is set or the worker's time
        is over. If `cancelled` is None, raises the first error instead."""
        while True:
            try:
                work.wait()
            except StorageError as error:
                self.why_unsaved = str(error)
                if cancelled is None or self._signals.out_of_time() or cancelled.wait(AGAIN_SECONDS):
                    raise
                logger.warning("retrying the last checkpoint: %s", error)
                work.repeat()
            else:
                self.why_unsaved = ""
                return

    def cancel(self) -> None:
        """Cancel the checkpoint that is being written, because the generation is over.

        This worker writes no more of it, so that the next checkpoint does not compete for the storage. The next durable
        checkpoint removes the files that were written.
        """
        self._cancelled.set()
        self._drop_marking()
        self._begun = None
        self._wanted = False
        self._served = ""  # the operator asks again until it knows of one
        self.why_unsaved = ""

    def _drop_marking(self) -> None:
        """Stop retrying to write the marker of an earlier checkpoint, which is no longer wanted."""
        if self._marking is not None and self._marking.work is not None:
            self._marking.work.cancel()
        self._marking = None

    def _mark(self, begun: _InProgress) -> _InProgress:
        """Begin to write the marker of a checkpoint whose parts are all written."""
        assert self._spec is not None
        location, keep = self._spec.location, self._spec.keep

        def mark() -> None:
            commit(location, begun.info, keep=keep)

        return replace(begun, work=StorageWork(self._thread, mark, location, self._cancelled))

    def _marked(self, marking: _InProgress) -> DurableCheckpoint:
        self._known, self._served = marking.info, marking.token
        more = {
            "request": marking.token,
            "pause_seconds": marking.pause_seconds,
            "write_seconds": self._clock() - marking.begun_at,
        }
        return describe(marking.info, marking.info.state["earlierGenerations"]).model_copy(update=more)

    def durable(self) -> DurablePoint | None:
        """Read step, boundary, folder name and visit of the newest durable checkpoint; None without one.

        Raises:
            SpecError: the checkpoint belongs to another run.
            StorageError: the storage cannot be read.
        """
        if self._spec is None:
            return None
        with storing(f"spec.checkpoint.location: {self._spec.location}"):
            info = latest(self._spec.location)
        if info is None:
            return None
        check_resumed(self._job.identity, info.run, self._spec.location)
        return DurablePoint(info.step, info.boundary, info.folder, info.state.get("visit", 0))

    def kept_step(self) -> int:
        """Read the committed steps of the best model that `evaluation.keepBest` keeps; 0 without one.

        Raises:
            StorageError: the storage cannot be read.
        """
        if self._spec is None or not self._job.spec.evaluation.keep_best:
            return 0
        with storing(f"spec.checkpoint.location: {self._spec.location}"):
            best = latest(best_location(self._spec.location))
        return 0 if best is None else best.step

    def newest_generation(self) -> int:
        """Read the highest layout generation that wrote at the checkpoint's location; 0 if none did. Counts unfinished
        checkpoints, the best model and the weights of levels, too.

        Raises:
            StorageError: the storage cannot be read.
        """
        if self._spec is None:
            return 0
        location = self._spec.location
        with storing(f"spec.checkpoint.location: {location}"):
            folders = [location, best_location(location), *level_locations(self._job)]
            return max(map(newest_generation, folders))

    def known(self, control: Control) -> DurableCheckpoint | None:
        """The newest checkpoint that this worker has loaded or, as leader, made durable; None if neither happened.

        This is remembered, so no storage is read. `control` tells which generations belong to earlier jobs.
        """
        return None if self._known is None else describe(self._known, control.earlier_generations)

    def load_control(self, name: str) -> Control:
        """Read the control state of the checkpoint in folder `name` (see `durable`). This waits until the marker, which
        the leader has seen, is visible to this worker.

        Costs that earlier workers measured are left out. Later calls of `load_unit` read the same checkpoint.

        Raises:
            LookupError: the checkpoint is gone, because newer checkpoints replaced it, or it is not visible in time.
            StorageError: the storage cannot be read.
        """
        assert self._spec is not None
        with storing(f"spec.checkpoint.location: {self._spec.location}"):
            self._loading = find(self._spec.location, name)
        if self._loading is None:
            raise LookupError(f"{self._spec.location} no longer holds {name}")
        self._known = self._loading
        return Control.from_file(self._loading.state)

    def load_unit(self, index: int) -> dict[str, Tensor]:
        """Read a unit's tensors, on the CPU, from the checkpoint that the last `load_control` read.

        Raises:
            LookupError: the checkpoint is gone, because newer checkpoints replaced it.
            StorageError: the unit's file is missing or damaged.
        """
        assert self._spec is not None and self._loading is not None
        location, info = self._spec.location, self._loading
        with storing(f"spec.checkpoint.location: {location}: remove {info.folder} to use an older checkpoint"):
            try:
                return load_unit(location, info, unit_name(index, info.num_layers))
            except FileNotFoundError as error:
                if latest(location) == info:
                    raise
                raise LookupError(f"{location} no longer holds {info.folder}") from error

    def prefetcher(self) -> Prefetcher:
        """Make a reader that reads frozen units of the newest checkpoint ahead of a regroup."""
        tied = {unit for tie in self._job.model.ties.all for unit, _ in tie.places}
        return Prefetcher(None if self._spec is None else self._spec.location, self._job.num_layers, tied)


def describe(info: CheckpointInfo, earlier_generations: int) -> DurableCheckpoint:
    """The marker `info` as the leader reports it to the operator.

    Files count generations across jobs, the operator within one job. So `earlier_generations`, the highest generation
    of earlier jobs, is subtracted. A checkpoint of an earlier job gets generation 0.
    """
    return DurableCheckpoint(
        step=info.step,
        boundary=info.boundary,
        min_stages=info.min_stages,
        num_shards=info.num_shards,
        layout_generation=max(0, info.layout_generation - earlier_generations),
    )
