"""Saves the model of the best evaluation in `best/` beside the checkpoints, and reads it at the job's end."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from torch import Tensor

from pipetransformer.elastic.transport.barrier import Barrier
from pipetransformer.elastic.transport.groups import GenerationGroups
from pipetransformer.errors import StorageError, storing
from pipetransformer.hooks import Hooks
from pipetransformer.job.job import Job
from pipetransformer.models import unit_name
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.storage import CheckpointInfo, commit, latest, load_unit, save_unit

from .storage_work import AGAIN_SECONDS, can_wait

logger = logging.getLogger(__name__)

_FILES_AT_ONCE = 4


def save_best(
    job: Job, state: WorkerState, layout: StageLayout, groups: GenerationGroups, barrier: Barrier, hooks: Hooks
) -> bool:
    """Save the current model as the best one, in place of the earlier best. All members call this, and training waits
    until the model is durable.

    Returns:
        Whether the model is durable. It is not if a member is told to stop (`hooks`) while the storage fails.

    Raises:
        StorageError: the storage failed, and a later attempt would fail, too.
        RuntimeError: a connection broke.
    """
    return save_weights(_location(job), state, layout, groups, barrier, hooks)


def save_weights(
    location: str,
    state: WorkerState,
    layout: StageLayout,
    groups: GenerationGroups,
    barrier: Barrier,
    hooks: Hooks,
) -> bool:
    """Replace the weights saved at `location` by the current ones. Callers, result and errors are as in `save_best`."""
    control = state.control
    info = CheckpointInfo(
        step=control.step,
        boundary=control.boundary,
        layout_generation=control.lasting_generation(layout.number),
        nonce=layout.generation.nonce,
        num_layers=state.num_layers,
    )

    def save_one(index: int) -> None:
        tensors = state.unit_tensors(index, with_moments=False)
        save_unit(location, info, unit_name(index, state.num_layers), tensors)

    def save() -> None:
        # Each write waits for its disk or store, and training waits for all writes.
        with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
            list(threads.map(save_one, layout.units))

    def count() -> None:
        commit(location, info, keep=1)

    wait = partial(_wait_until_stored, location, groups, barrier, hooks)
    # The leader writes the marker after all units are written, and workers return after the marker is written.
    return wait(save if layout.pipeline == 0 else None) and wait(count if layout.is_leader else None)


def _wait_until_stored(
    location: str, groups: GenerationGroups, barrier: Barrier, hooks: Hooks, work: Callable[[], None] | None
) -> bool:
    """Do `work`, this worker's part, and repeat it while the storage fails at any member. Returns whether all members
    succeeded. Gives up and returns False if a member was told to stop before that."""
    assert groups.world is not None
    attempt = None if work is None else partial(_is_stored, location, work)
    while True:
        failed = barrier.pass_after(attempt, groups) is False
        failures, leavers = groups.exchange.sum([float(failed), float(hooks.stop_requested())])
        if not failures or leavers:
            return not failures
        time.sleep(AGAIN_SECONDS)


def _is_stored(location: str, work: Callable[[], None]) -> bool:
    """Try `work` once. Returns whether it succeeded; False means that the storage failed, but may recover.

    Raises:
        StorageError: the storage failed, and a later attempt would fail, too.
    """
    try:
        with storing(f"spec.checkpoint.location: {location}"):
            work()
    except StorageError as error:
        if not can_wait(error):
            raise
        logger.warning("training waits for the storage: %s", error)
        return False
    return True


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
