"""The model at a job's end: gathered on the leader from those that hold its units, and written where the job asks."""

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from pipetransformer.elastic.regroup.transfer import Parts, move_units
from pipetransformer.elastic.regroup.transfer_plan import Move
from pipetransformer.elastic.transport.watchdog import Deadline, Watchdog
from pipetransformer.errors import ModelError, StorageError
from pipetransformer.job.job import Job
from pipetransformer.models import HUGGINGFACE, VIT, import_huggingface
from pipetransformer.state.codec import UnitCodec
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.storage import Kind, ModelConfig, write_model
from pipetransformer_contract.spec import SCRIPT

from .membership import Membership


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


def write_final_model(job: Job, tensors: dict[str, torch.Tensor], run_dir: Path, *, steps: int) -> None:
    """Write the model to the job's output, or into `run_dir`, with what made its inputs.

    Args:
        job: whose model it is.
        tensors: parameters and buffers by whole-model name.
        run_dir: of this worker.
        steps: that were committed when these were the weights.

    Raises:
        StorageError: it cannot be written.
        ModelError: it cannot be saved as what it is.
    """
    output = job.spec.output
    location = str(run_dir / "model") if output is None else f"{output.location.rstrip('/')}/model"
    try:
        config, dataset = _describe(job, tensors, steps), job.dataset
        write_model(location, tensors, config=config, info=dataset.info, processor=dataset.processor)
    except OSError as error:
        raise StorageError(f"spec.output.location: {location}: {error}") from error
    except Exception as error:
        raise ModelError(f"cannot be saved: {type(error).__name__}: {error}") from error


def _describe(job: Job, tensors: Mapping[str, torch.Tensor], steps: int) -> ModelConfig:
    model, info = job.spec.model, job.dataset.info
    kind = {VIT: Kind.VIT, HUGGINGFACE: Kind.TRANSFORMERS, SCRIPT: Kind.SCRIPT}.get(model.name, Kind.FUNCTION)
    of_transformers = kind is Kind.TRANSFORMERS
    return ModelConfig(
        made_by=f"pipetransformer {version('pipetransformer')}",
        kind=kind,
        model_class=import_huggingface().class_name(model) if of_transformers else type(job.model).__name__,
        function=model.name if kind is Kind.FUNCTION else job.model_function,
        model=model,
        data=job.spec.data,
        steps=steps,
        precision=job.spec.training.precision,
        dtype=str(job.dtype).removeprefix("torch."),
        input_dtype=str(job.input_dtype).removeprefix("torch."),
        **{name: getattr(info, name) for name in ("input_shape", "num_classes", "vocab_size", "task", "labels")},
    )
