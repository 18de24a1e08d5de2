"""The model of the best evaluation, kept in `best/` beside the checkpoints until the job's end."""

from torch import Tensor

from pipetransformer.elastic.transport.barrier import Barrier
from pipetransformer.elastic.transport.groups import GenerationGroups
from pipetransformer.errors import storing
from pipetransformer.job.job import Job
from pipetransformer.models import unit_name
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.storage import CheckpointInfo, commit, latest, load_unit, save_unit


def save_best(job: Job, state: WorkerState, layout: StageLayout, groups: GenerationGroups, barrier: Barrier) -> None:
    """Replace the kept model by the current one, durably when this returns. All members call this.

    Raises:
        StorageError: it cannot be written.
        RuntimeError: a connection broke.
    """
    save_weights(_location(job), state, layout, groups, barrier)


def save_weights(
    location: str, state: WorkerState, layout: StageLayout, groups: GenerationGroups, barrier: Barrier
) -> None:
    """Replace the weights at a location by the current ones, as `save_best` does."""
    control = state.control
    info = CheckpointInfo(
        step=control.step,
        boundary=control.boundary,
        layout_generation=control.lasting_generation(layout.number),
        nonce=layout.generation.nonce,
        num_layers=state.num_layers,
    )

    def save() -> None:
        with storing(f"spec.checkpoint.location: {location}"):
            for index in layout.units:
                tensors = state.unit_tensors(index, with_moments=False)
                save_unit(location, info, unit_name(index, state.num_layers), tensors)

    def count() -> None:
        with storing(f"spec.checkpoint.location: {location}"):
            commit(location, info, keep=1)

    barrier.pass_after(save if layout.pipeline == 0 else None, groups)
    barrier.pass_after(count if layout.is_leader else None, groups)  # no worker notes it as the best before it counts


def load_best(job: Job) -> dict[str, Tensor]:
    """Parameters and buffers of the kept model, by whole-model name.

    Raises:
        StorageError: it cannot be read.
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
