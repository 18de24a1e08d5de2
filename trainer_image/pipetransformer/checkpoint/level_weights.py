"""With `multiLevel`, saves the weights of a level before the job moves to a smaller one, in `levels/` beside the
checkpoints.

When the job comes back to the level, it gets a share of these weights back. The files outlive all workers, and save
memory meanwhile.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pipetransformer.errors import StorageError, storing
from pipetransformer.hooks import WorkerSignals
from pipetransformer.job.job import Job
from pipetransformer.models import unit_name
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.storage import latest, load_unit

from .weights_saving import WeightsSaving

logger = logging.getLogger(__name__)


def begin_to_keep(job: Job, state: WorkerState, layout: StageLayout, signals: WorkerSignals) -> WeightsSaving | None:
    """Begin to save the weights of the level that the job is about to leave. All members call this, and wait for the
    result before the job leaves the level: what counts as done at a smaller level must never lack these weights.

    Returns:
        The saving. None if nothing has to be saved: with `alpha: 1` the level is later made from the smaller level
        alone.
    """
    assert job.spec.multi_level is not None
    if job.spec.multi_level.alpha == 1:
        return None
    return WeightsSaving(_location(job, job.at(state.control.visit).level), state, layout, signals)


def level_locations(job: Job) -> list[str]:
    """The folders for the weights of levels; empty without `spec.checkpoint`."""
    if job.spec.checkpoint is None:
        return []
    return [_location(job, level) for level in range(len(job.smaller))]


class LevelWeights:
    """Reads the weights that `begin_to_keep` saved. It implements `multilevel.EarlierWeights`.

    Args:
        job: the job of level 0.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._ahead = _Ahead()

    def read_ahead(self, level: int, units: Sequence[int]) -> None:
        """Begin to read these units in a thread, because the last steps of the smaller level hide the storage. A unit
        that cannot be read is left to `read`. Asking again for the same units does nothing."""
        if (level, tuple(units)) != (self._ahead.level, self._ahead.units):
            self.forget()
            self._ahead = _Ahead(level, tuple(units))
            threading.Thread(target=self._read_all, args=(self._ahead,), name="read-level", daemon=True).start()

    def _read_all(self, ahead: "_Ahead") -> None:
        for unit in ahead.units:
            if ahead.is_over:
                return
            try:
                ahead.found[unit] = self._read(ahead.level, unit)
            except StorageError as error:
                logger.info("cannot read ahead: %s", error)
                return

    def forget(self) -> None:
        """Drop what was read ahead and not used."""
        self._ahead.is_over = True
        self._ahead = _Ahead()

    def read(self, level: int, unit: int) -> dict[str, Tensor]:
        """Return the saved parameters and buffers of a unit by whole-model name, on the CPU.

        Raises:
            StorageError: the weights cannot be read, or were not saved at the step when this job leaves
                the level.
        """
        found = self._ahead.found.pop(unit, None) if level == self._ahead.level else None
        return self._read(level, unit) if found is None else found

    def _read(self, level: int, unit: int) -> dict[str, Tensor]:
        location = _location(self._job, level)
        left = next(visit.end for visit in self._job.visits if visit.level == level)
        with storing(f"spec.checkpoint.location: {location}"):
            info = latest(location)
            if info is None or info.step != left:
                found = "holds none" if info is None else f"holds those of step {info.step}"
                raise StorageError(
                    f"spec.checkpoint.location: the model needs its weights of step {left} to grow back, and {location}"
                    f" {found}: resume a checkpoint from before that step, or begin from the start"
                )
            return load_unit(location, info, unit_name(unit, info.num_layers))


@dataclass(slots=True)
class _Ahead:
    """Units of a level that a thread reads. `is_over` ends it."""

    level: int = -1
    units: tuple[int, ...] = ()
    found: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    is_over: bool = False


def _location(job: Job, level: int) -> str:
    assert job.spec.checkpoint is not None
    return f"{job.spec.checkpoint.location.rstrip('/')}/levels/{level}"
