"""Saves the model of the best evaluation in `best/` beside the checkpoints, and reads it at the job's end."""

from functools import partial

from torch import Tensor

from pipetransformer.elastic.transport.barrier import Barrier
from pipetransformer.elastic.transport.groups import GenerationGroups
from pipetransformer.errors import storing
from pipetransformer.hooks import WorkerSignals
from pipetransformer.job.job import Job
from pipetransformer.models import unit_name
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.storage import latest, load_unit

from .weights_saving import WeightsSaving


def save_best(
    job: Job,
    state: WorkerState,
    layout: StageLayout,
    groups: GenerationGroups,
    barrier: Barrier,
    signals: WorkerSignals,
) -> bool:
    """Save the current model as the best one, in place of the earlier best. All members call this, and training waits
    until the model is durable.

    Returns:
        Whether the model is durable. It is not if a member is told to stop (`signals`) while the storage fails.

    Raises:
        StorageError: the storage failed, and a later attempt would fail, too.
        RuntimeError: a connection broke.
    """
    return WeightsSaving(_location(job), state, layout, signals).wait(partial(barrier.sum_after, groups=groups))


def load_best(job: Job) -> dict[str, Tensor]:
    """Read the best model's parameters and buffers, by whole-model name, on the CPU.

    Raises:
        StorageError: the best model cannot be read, or does not exist.
    """
    location = _location(job)
    with storing(f"spec.checkpoint.location: {location}"):
        info = latest(location)
        if info is None:
            raise FileNotFoundError("there is no best model")
        tensors: dict[str, Tensor] = {}
        for index in range(job.num_layers + 2):
            tensors.update(load_unit(location, info, unit_name(index, job.num_layers)))
    return tensors


def best_location(checkpoints: str) -> str:
    """The location of the best model, beside the checkpoints at `checkpoints`."""
    return f"{checkpoints.rstrip('/')}/best"


def _location(job: Job) -> str:
    assert job.spec.checkpoint is not None
    return best_location(job.spec.checkpoint.location)
