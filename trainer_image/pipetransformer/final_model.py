"""The model at a job's end: gathered on the leader from those that hold its units, and written where the job asks."""

from dataclasses import replace
from pathlib import Path

import torch

from .checkpoint import write_model
from .elastic.plan import Move
from .elastic.transfer import Parts, move_units
from .elastic.watchdog import Deadline, Watchdog
from .errors import ModelError, StorageError
from .job import Job
from .membership import Membership
from .state import UnitCodec, WorkerState


def gather_model(
    job: Job,
    state: WorkerState,
    codec: UnitCodec,
    member: Membership,
    device: torch.device,
    watchdog: Watchdog,
) -> dict[str, torch.Tensor]:
    """Parameters and buffers of the whole model by name on the leader; nothing on the others. All members call this.

    Raises:
        RuntimeError: a connection broke.
    """
    layout = member.layout
    boundary, leader = state.control.boundary, layout.leader_rank
    codec = replace(codec, optimizer=None)
    held = set(layout.spans[layout.roles[leader][1]])
    moves = [
        Move(unit=unit, source=layout.holder(0, stage), target=leader)
        for stage, span in enumerate(layout.spans)
        for unit in span
        if unit not in held
    ]

    def give(index: int) -> Parts:
        return codec.give(state, index, device)

    def blank(index: int) -> Parts:
        return codec.blank(index, job.model.units[index], boundary, device)

    num_bytes = sum(codec.size(move.unit, job.model.units[move.unit], boundary) for move in moves)
    overdue = Deadline(watchdog.limit_to_move(num_bytes)).is_past
    with watchdog.watching(member.groups.connections, overdue):
        received = move_units(moves, layout.rank, member.world, give, blank)
    if not layout.is_leader:
        return {}
    whole = WorkerState(state.num_layers, state.ties, state.control, dict(state.units))
    for index, parts in received.items():
        unit = job.blank_unit(index)
        whole.put_unit(index, unit, codec.take(parts, index, unit, boundary))
    gathered = {}
    for index in range(job.num_layers + 2):
        gathered.update(whole.unit_tensors(index, with_moments=False))
    return gathered


def write_final_model(job: Job, tensors: dict[str, torch.Tensor], run_dir: Path) -> None:
    """Write the model to the job's output, or into `run_dir`.

    Raises:
        StorageError: it cannot be written.
        ModelError: it cannot be saved as what it is.
    """
    output = job.spec.output
    location = str(run_dir / "model") if output is None else f"{output.location.rstrip('/')}/model"
    try:
        write_model(location, tensors, spec=job.spec, info=job.dataset.info)
    except OSError as error:
        raise StorageError(f"spec.output.location: {location}: {error}") from error
    except Exception as error:
        raise ModelError(f"cannot be saved: {type(error).__name__}: {error}") from error
