"""Saves weights without the optimizer's state: those of the best model, or of a level that the job leaves."""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from pipetransformer.elastic.transport.barrier import SumBarrier, Work
from pipetransformer.errors import StorageError, storing
from pipetransformer.hooks import WorkerSignals
from pipetransformer.models import unit_name
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.storage import CheckpointInfo, commit, save_unit

from .storage_work import AGAIN_SECONDS, can_wait

logger = logging.getLogger(__name__)

_FILES_AT_ONCE = 4


class WeightsSaving:
    """Saves the current weights at a location, in place of those that it has. Threads begin at once to write this
    worker's part. All members make this object and call `wait`.

    Args:
        location: the location of these weights.
        state: what this worker holds. Its weights must stay as they are until `wait` has returned.
        layout: the present layout. Its first pipeline writes.
        signals: tell whether this worker must leave.

    Attributes:
        is_durable: whether `wait` has found that the weights of all members are durable.
    """

    def __init__(self, location: str, state: WorkerState, layout: StageLayout, signals: WorkerSignals) -> None:
        control = state.control
        self._location, self._state, self._layout, self._signals = location, state, layout, signals
        self._info = CheckpointInfo(
            step=control.step,
            boundary=control.boundary,
            layout_generation=control.lasting_generation(layout.number),
            nonce=layout.generation.nonce,
            num_layers=state.num_layers,
        )
        # Each write waits for its disk or store, so several are under way.
        self._threads = ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="save-weights")
        self._begun = self._begin() if layout.pipeline == 0 else []
        self.is_durable = False

    def wait(self, sum_barrier: SumBarrier) -> bool:
        """Wait until all members have saved their weights. While the storage fails at any member, repeat what failed.

        Args:
            sum_barrier: as `Barrier.sum_after`. The watchdog must watch its votes.

        Returns:
            Whether the weights are durable. They are not if a member is told to stop while the storage fails.

        Raises:
            StorageError: the storage failed, and a later attempt would fail, too.
            RuntimeError: a connection broke.
        """
        save = self._save if self._layout.pipeline == 0 else None
        count = self._count if self._layout.is_leader else None
        # The leader writes the marker after all units are written, and workers return after the marker is written.
        try:
            self.is_durable = self._do_until_stored(save, sum_barrier) and self._do_until_stored(count, sum_barrier)
        finally:
            if not self.is_durable:
                self.cancel()
        return self.is_durable

    def cancel(self) -> None:
        """Begin no more writes, which would keep the state in memory. Call this if `wait` will not be called."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _do_until_stored(self, work: Work[None] | None, sum_barrier: SumBarrier) -> bool:
        """Do `work`, this worker's part, until it succeeds at all members. Returns False if one was told to stop before
        that."""
        attempt = None if work is None else partial(_is_stored, self._location, work)

        def failed_and_leaves(stored: bool | None) -> list[float]:
            return [float(stored is False), float(self._signals.stop_requested())]

        while True:
            failures, leavers = sum_barrier(attempt, failed_and_leaves)
            if not failures or leavers:
                return not failures
            time.sleep(AGAIN_SECONDS)

    def _begin(self) -> "list[Future[None]]":
        return [self._threads.submit(self._save_one, index) for index in self._layout.units]

    def _save_one(self, index: int) -> None:
        tensors = self._state.unit_tensors(index, with_moments=False)
        save_unit(self._location, self._info, unit_name(index, self._state.num_layers), tensors)

    def _save(self) -> None:
        """Wait for the writes that have begun. After a failure, write all units again."""
        begun, self._begun = self._begun or self._begin(), []
        for write in begun:
            write.result()

    def _count(self) -> None:
        commit(self._location, self._info, keep=1)


def _is_stored(location: str, work: Work[None]) -> bool:
    """Try `work` once. Returns whether it succeeded; False means that the storage failed, but may recover.

    Raises:
        StorageError: the storage failed, and a later attempt would fail, too.
    """
    try:
        with storing(f"spec.checkpoint.location: {location}"):
            work()
    except StorageError as error:
        if not can_wait(error):
            raise
        logger.warning("training waits for the storage: %s", error)
        return False
    return True
