"""Reads frozen units from storage while a worker waits for its first generation. The regroup then need not transfer
them, so its pause is shorter.

Each unit is kept with the step after which the boundary had last fallen. The transfer plan decides at the regroup
whether the unit is still valid: the boundary may have fallen again, and the unit may have trained since.
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
    """Looks for new checkpoints in a thread, until `stop`, and reads their frozen units.

    Args:
        location: folder of the checkpoints; None without checkpoints, and then nothing is read.
        num_layers: number of layers of the model.
        skipped: units that are not read, because they share a parameter with another unit. While they are frozen, the
            other unit may still train that parameter.

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
        """Read the frozen units of the newest checkpoint. Skip a unit that was read since the boundary last fell,
        because it has not changed since."""
        units, location = self.units, self._location
        info = None if location is None else latest(location)
        if location is None or info is None:
            return
        fell_step = info.state.get("fellStep", 0)
        for index in range(first_trainable(info.boundary)):
            if self._stopped.is_set():
                return
            if index in self._skipped or (index in units and units[index].fell_step == fell_step):
                continue
            units[index] = ReadUnit(fell_step, load_unit(location, info, unit_name(index, self._num_layers)))
