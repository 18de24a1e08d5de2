"""Reads frozen units from storage while a worker waits for its first generation, so that the regroup's pause need not
include their transfer.

Each unit is kept with the step of its checkpoint. The plan of the regroup decides whether it is still valid, because
the boundary may have fallen after that step.
"""

import logging
import threading
from collections.abc import Callable, Collection

from torch import Tensor

from pipetransformer.freeze.boundary import first_trainable
from pipetransformer.state.read_ahead import ReadUnit
from pipetransformer.storage import CheckpointInfo

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0


class Prefetcher:
    """Looks for checkpoints in a thread, until `stop`.

    Args:
        latest: returns the newest durable checkpoint.
        load: returns a unit's tensors from a checkpoint.
        skipped: units that share a parameter with another unit, so that they may change while they are frozen.

    Attributes:
        units: the units read so far, by index.
    """

    def __init__(
        self,
        latest: Callable[[], CheckpointInfo | None],
        load: Callable[[CheckpointInfo, int], dict[str, Tensor]],
        skipped: Collection[int] = (),
    ) -> None:
        self._latest, self._load, self._skipped = latest, load, skipped
        self._stopped = threading.Event()
        self.units: dict[int, ReadUnit] = {}

    def start(self) -> None:
        threading.Thread(target=self._run, name="prefetch", daemon=True).start()

    def stop(self) -> None:
        """Stop reading, and forget all units."""
        self._stopped.set()
        self.units = {}

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.look()
            except OSError as error:
                logger.info("cannot read ahead: %s", error)
            self._stopped.wait(_LOOK_SECONDS)

    def look(self) -> None:
        """Read the frozen units of the newest checkpoint that were not read since they froze."""
        units, info = self.units, self._latest()
        if info is None:
            return
        for index in range(first_trainable(info.boundary)):
            if self._stopped.is_set():
                return
            if index in self._skipped or (index in units and units[index].step >= info.state.get("fell_step", 0)):
                continue
            units[index] = ReadUnit(info.step, self._load(info, index))
