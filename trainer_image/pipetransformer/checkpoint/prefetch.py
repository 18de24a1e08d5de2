"""Reads frozen units from storage while a worker waits for its first generation, so that the regroup's pause need not
include their transfer.

Each unit is kept with the step of its checkpoint. The plan of the regroup decides whether it is still valid, because
the boundary may have fallen after that step.
"""

import logging
import threading
from collections.abc import Collection

from pipetransformer.freeze.boundary import first_trainable
from pipetransformer.models import unit_name
from pipetransformer.state.read_ahead import ReadUnit
from pipetransformer.storage import latest, load_unit

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0


class Prefetcher:
    """Looks for checkpoints in a thread, until `stop`.

    Args:
        location: of the checkpoints; None if there are none to read.
        num_layers: layers of the model.
        skipped: units that share a parameter with another unit, so that they may change while they are frozen.

    Attributes:
        units: the units read so far, by index.
    """

    def __init__(self, location: str | None, num_layers: int, skipped: Collection[int] = ()) -> None:
        self._location, self._num_layers, self._skipped = location, num_layers, skipped
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
        units, location = self.units, self._location
        info = None if location is None else latest(location)
        if location is None or info is None:
            return
        for index in range(first_trainable(info.boundary)):
            if self._stopped.is_set():
                return
            if index in self._skipped or (index in units and units[index].step >= info.state.get("fellStep", 0)):
                continue
            units[index] = ReadUnit(info.step, load_unit(location, info, unit_name(index, self._num_layers)))
