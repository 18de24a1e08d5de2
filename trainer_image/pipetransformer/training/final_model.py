"""Gathers the whole model on the leader at the end of a job, and writes it to the job's output."""

from collections.abc import Mapping
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path

import torch

from pipetransformer.elastic.regroup.transfer import HOST, StateCargo, move_units
from pipetransformer.elastic.regroup.transfer_plan import Move
from pipetransformer.elastic.transport.watchdog import Deadline, Watchdog
from pipetransformer.errors import ModelError, StorageError
from pipetransformer.job.job import Job
from pipetransformer.models import HUGGINGFACE, VIT, import_huggingface
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.storage import Kind, ModelConfig, write_model
from pipetransformer_contract.spec import SCRIPT

from .membership import Membership


def gather_model(
    job: Job,
    state: WorkerState,
    member: Membership,
    watchdog: Watchdog,
) -> dict[str, torch.Tensor]:
    """Return parameters and buffers of the whole model by name; an empty dict on all members except the leader. All
    members call this.

    The leader's own units stay where they are. It receives all others in host memory, because the whole model may not
    fit its device.

    Raises:
        RuntimeError: a connection broke.
    """
    layout = member.layout
    boundary, leader = state.control.boundary, layout.leader_rank
    codec = replace(job.codec, optimizer=None)
    held = layout.cut.units_of(layout.roles[leader][1])
    moves = [
        Move(unit=unit, source=layout.holder(0, unit), target=leader)
        for unit in range(layout.cut.num_units)
        if unit not in held
    ]

    cargo = StateCargo(codec, job.model.units, state, boundary, HOST)
    seconds = watchdog.limit_to_move(sum(cargo.num_bytes(move.unit) for move in moves))
    with watchdog.watching(member.groups.connections, Deadline("final model", seconds)):
        received = move_units(moves, layout.rank, member.world, cargo)
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
    """Write the model to `spec.output`, or into `run_dir` if that is not set. The dataset's processor (tokenizer or
    image processor), if it has one, is written with it.

    Args:
        job: the job that trained the model.
        tensors: parameters and buffers by their names in the whole model.
        run_dir: folder of the run's record.
        steps: number of committed steps that these weights were trained for.

    Raises:
        StorageError: the model cannot be written.
        ModelError: the model cannot be saved in its format.
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
        **{each.name: getattr(info, each.name) for each in fields(info)},
    )
