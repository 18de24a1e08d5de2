"""Work of the checkpoint's thread that can be repeated, because the storage may fail for minutes.

Training does not need the storage, so it goes on meanwhile. Only the end of the job, and the last checkpoint of a
worker that was told to stop, wait for the result.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from torch import Tensor

from pipetransformer.device_copies import HostCopies
from pipetransformer.errors import StorageError, storing
from pipetransformer.storage import CheckpointInfo, save_unit
from pipetransformer.storage.retries import may_pass

Result = TypeVar("Result")

#: Seconds between two attempts while workers wait for the storage.
AGAIN_SECONDS = 2.0


class StorageWork(Generic[Result]):
    """Work that has begun in the thread.

    Args:
        thread: does the work.
        work: what to do; it must be idempotent.
        location: of the checkpoints.
        given_up: set once the checkpoint is given up. The work is then not repeated.
    """

    def __init__(
        self, thread: ThreadPoolExecutor, work: Callable[[], Result], location: str, given_up: threading.Event
    ) -> None:
        self._thread, self._work, self._location, self._given_up = thread, work, location, given_up
        self._future: Future[Result] = thread.submit(work)

    @property
    def done(self) -> bool:
        """Whether the last attempt has ended, well or not."""
        return self._future.done()

    def result(self) -> Result:
        """Wait for the attempt and return its result.

        Raises:
            StorageError: it failed.
        """
        with storing(f"spec.checkpoint.location: {self._location}"):
            return self._future.result()

    def repeat(self, pause_seconds: float = 0.0) -> None:
        """Try once more, after a pause."""
        self._future = self._thread.submit(partial(self._repeat, pause_seconds))

    def drop(self) -> None:
        """Do not try again."""
        self._given_up.set()

    def _repeat(self, pause_seconds: float) -> Result:
        if self._given_up.wait(pause_seconds):
            raise OSError("the checkpoint was given up")
        return self._work()


def can_wait(error: StorageError) -> bool:
    """Whether training may go on after `error`, because the storage may do the same work later."""
    return may_pass(error.__cause__)


@dataclass(frozen=True)
class Write:
    """This worker's part of one checkpoint: what is left to write, and where."""

    location: str
    info: CheckpointInfo
    units: dict[str, dict[str, Tensor]]
    host: HostCopies
    given_up: threading.Event

    def run(self) -> None:
        """Write units until all are written or the checkpoint is given up. A failed write is repeated by another
        run."""
        self.host.wait()
        while self.units and not self.given_up.is_set():
            unit = next(iter(self.units))
            save_unit(self.location, self.info, unit, self.units[unit])
            del self.units[unit]
