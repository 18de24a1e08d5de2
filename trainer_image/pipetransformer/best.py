"""The model of the best evaluation, kept in `best/` beside the checkpoints until the job's end."""

import torch
import torch.distributed as dist
from torch import Tensor

from .checkpoint import CheckpointInfo, StaleCheckpointError, commit, latest, load_unit, save_unit
from .errors import StorageError
from .job import Job
from .layout import StageLayout
from .models import unit_name
from .state import WorkerState


def save_best(job: Job, state: WorkerState, layout: StageLayout, world: dist.ProcessGroup) -> None:
    """Replace the model that is kept by the present one, for good once this returns. All members call this.

    Raises:
        StorageError: it cannot be written.
    """
    location, control = _location(job), state.control
    generation = control.lasting_generation(layout.number)
    try:
        if layout.pipeline == 0:
            for index in layout.span:
                save_unit(
                    location,
                    step=control.step,
                    layout_generation=generation,
                    unit=unit_name(index, job.num_layers),
                    tensors=state.unit_tensors(index, with_moments=False),
                )
        dist.all_reduce(torch.ones(1), group=world)
        if layout.is_leader:
            info = CheckpointInfo(
                step=control.step,
                boundary=control.boundary,
                layout_generation=generation,
                num_layers=job.num_layers,
            )
            commit(location, info, keep=1)
        dist.all_reduce(torch.ones(1), group=world)  # nobody notes it as the best before it counts
    except (OSError, StaleCheckpointError) as error:
        raise StorageError(f"spec.checkpoint.location: {location}: {error}") from error


def load_best(job: Job) -> dict[str, Tensor]:
    """Parameters and buffers of the model that is kept, by whole-model name.

    Raises:
        StorageError: it cannot be read.
    """
    location = _location(job)
    try:
        info = latest(location)
        if info is None:
            raise FileNotFoundError("no model is kept there")
        tensors: dict[str, Tensor] = {}
        for index in range(job.num_layers + 2):
            tensors.update(load_unit(location, info, unit_name(index, job.num_layers)))
    except OSError as error:
        raise StorageError(f"spec.checkpoint.location: {location}: {error}") from error
    return tensors


def best_location(checkpoints: str) -> str:
    """Where the best model is kept, beside the checkpoints at this location."""
    return f"{checkpoints.rstrip('/')}/best"


def _location(job: Job) -> str:
    assert job.spec.checkpoint is not None
    return best_location(job.spec.checkpoint.location)
