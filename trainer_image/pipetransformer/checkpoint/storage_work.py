"""Writes to the checkpoint's storage in a thread. Repeats a write that failed, because storage may fail for minutes.

Training continues meanwhile. Only two callers wait for the result: the end of the job, and a worker that was told to
stop and writes its last checkpoint.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from pipetransformer.device_copies import HostCopies
from pipetransformer.errors import StorageError, storing
from pipetransformer.storage import CheckpointInfo, save_unit
from pipetransformer.storage.retries import may_pass

#: Seconds between two attempts while workers wait for the storage.
AGAIN_SECONDS = 2.0


class StorageWork:
    """A function that runs in a thread, once as soon as this object is made, and again at each `repeat`.

    Args:
        thread: the executor that runs the function.
        work: the function. It must be idempotent, because it may run again after it failed.
        location: location of the checkpoints, for error messages.
        cancelled: an event that is set to cancel the checkpoint. The function is then not repeated.
    """

    def __init__(
        self, thread: ThreadPoolExecutor, work: Callable[[], None], location: str, cancelled: threading.Event
    ) -> None:
        self._thread, self._work, self._location, self._cancelled = thread, work, location, cancelled
        self._future: Future[None] = thread.submit(work)

    @property
    def done(self) -> bool:
        """Whether the last attempt has ended, with success or with an error."""
        return self._future.done()

    def wait(self) -> None:
        """Wait for the last attempt.

        Raises:
            StorageError: the attempt failed.
        """
        with storing(f"spec.checkpoint.location: {self._location}"):
            self._future.result()

    def repeat(self, pause_seconds: float = 0.0) -> None:
        """Start another attempt in the thread, which first waits `pause_seconds`."""
        self._future = self._thread.submit(partial(self._repeat, pause_seconds))

    def cancel(self) -> None:
        """Cancel the checkpoint, so that later attempts fail at once."""
        self._cancelled.set()

    def _repeat(self, pause_seconds: float) -> None:
        if self._cancelled.wait(pause_seconds):
            raise OSError("the checkpoint was cancelled")
        self._work()


def can_wait(error: StorageError) -> bool:
    """Whether training may continue after `error`, because the same work may succeed later."""
    return may_pass(error.__cause__)


@dataclass(frozen=True)
class Write:
    """This worker's part of one checkpoint.

    Attributes:
        location: location of the checkpoints.
        info: the checkpoint's marker, which names its folder.
        units: tensors by unit name and tensor name, on the CPU. `run` removes each unit that it has written.
        host: the copies from the device, which must be complete before the tensors are read.
        cancelled: an event that is set to cancel the checkpoint.
    """

    location: str
    info: CheckpointInfo
    units: dict[str, dict[str, Tensor]]
    host: HostCopies
    cancelled: threading.Event

    def run(self) -> None:
        """Write the units that are left, until all are written or the checkpoint is cancelled. After an error, another
        call continues with the unit that failed."""
        self.host.wait()
        while self.units and not self.cancelled.is_set():
            unit = next(iter(self.units))
            save_unit(self.location, self.info, unit, self.units[unit])
            del self.units[unit]
