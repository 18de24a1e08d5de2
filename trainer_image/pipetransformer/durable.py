"""When and how the workers of a generation make a checkpoint durable together, and load one at another size."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from pipetransformer_contract.messages import DurableCheckpoint

from .checkpoint import CheckpointInfo, StaleCheckpointError, commit, latest, load_unit, save_unit
from .elastic.plan import DurablePoint
from .errors import StorageError
from .job import Job
from .layout import StageLayout
from .models import unit_name
from .state import Control, WorkerState


class Checkpointer:
    """Saves and loads at the spec's location; without a location it does nothing and finds nothing."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._spec = job.spec.checkpoint
        self._loading: CheckpointInfo | None = None

    @property
    def enabled(self) -> bool:
        return self._spec is not None

    def due(self, step: int) -> bool:
        """Whether the spec asks for a checkpoint after `step` committed steps."""
        return self._spec is not None and self._spec.every_steps is not None and step % self._spec.every_steps == 0

    def save(self, state: WorkerState, layout: StageLayout, world: dist.ProcessGroup) -> DurableCheckpoint | None:
        """Write the committed state. All members call this between rounds; returns once the checkpoint is durable.

        Raises:
            StorageError: this worker cannot write its part.
        """
        if self._spec is None:
            return None
        try:
            self._save_units(state, layout)
        except OSError as error:
            raise StorageError(f"spec.checkpoint.location: {self._spec.location}: {error}") from error
        dist.all_reduce(torch.ones(1), group=world)
        if not layout.is_leader:
            return None
        control = state.control
        info = CheckpointInfo(
            step=control.step,
            boundary=control.boundary,
            layout_generation=layout.number,
            num_layers=self._job.num_layers,
            min_stages=self._job.min_stages(control.boundary),
            num_shards=self._job.spec.num_shards,
            state=control.to_dict(),
        )
        try:
            commit(self._spec.location, info, keep=self._spec.keep)
        except (OSError, StaleCheckpointError) as error:
            raise StorageError(f"spec.checkpoint.location: {self._spec.location}: {error}") from error
        return describe(info)

    def _save_units(self, state: WorkerState, layout: StageLayout) -> None:
        """On the first pipeline: write the units of this stage."""
        assert self._spec is not None
        if layout.pipeline == 0:
            for index in layout.span:
                save_unit(
                    self._spec.location,
                    step=state.control.step,
                    layout_generation=layout.number,
                    unit=unit_name(index, self._job.num_layers),
                    tensors=state.unit_tensors(index, with_moments=True),
                )

    def durable(self) -> DurablePoint | None:
        """Where the newest checkpoint stands."""
        self._loading = None
        info = self._newest()
        return None if info is None else DurablePoint(info.step, info.boundary)

    def newest(self) -> DurableCheckpoint | None:
        """The newest checkpoint, as the operator wants to know it."""
        info = latest(self._spec.location) if self._spec is not None else None
        return None if info is None else describe(info)

    def load_control(self) -> Control:
        """Control state of the newest checkpoint, without what was measured on the workers of that time.

        Raises:
            LookupError: there is none.
        """
        self._loading = None
        return replace(Control.from_dict(dict(self._checkpoint().state)), costs=None)

    def load_unit(self, index: int) -> dict[str, Tensor]:
        """A unit's tensors, on the CPU, from the checkpoint of the last `load_control`.

        Raises:
            LookupError, OSError: it is not there, or not whole.
        """
        assert self._spec is not None
        return load_unit(self._spec.location, self._checkpoint(), unit_name(index, self._job.num_layers))

    def _newest(self) -> CheckpointInfo | None:
        if self._spec is None:
            return None
        if self._loading is None:
            self._loading = latest(self._spec.location)
        return self._loading

    def _checkpoint(self) -> CheckpointInfo:
        info = self._newest()
        if info is None:
            raise LookupError("there is no checkpoint to load")
        return info


def describe(info: CheckpointInfo) -> DurableCheckpoint:
    """A checkpoint's marker as the channel carries it."""
    return DurableCheckpoint(
        step=info.step,
        boundary=info.boundary,
        min_stages=info.min_stages,
        layout_generation=info.layout_generation,
    )
