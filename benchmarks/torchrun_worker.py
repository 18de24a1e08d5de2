"""The baseline of bench-regroup: the same model and steps, elastic by torchrun's restart from a checkpoint.

Runs under `torchrun`. The world is cut into pipelines of `--stages`; every `--checkpoint-every` steps each stage of
pipeline 0 writes its units, and a marker follows. Each rank appends the end of each of its steps to `--steps-log`.
"""

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from pipetransformer.data import EpochOrder, deal, load_dataset
from pipetransformer.models import build_model, build_units
from pipetransformer.partition import spans
from pipetransformer.pipeline import StageRunner, StageSpec
from pipetransformer.schedules import make_schedule
from pipetransformer.state.optimizer import make_optimizer
from pipetransformer.state.worker_state import WorkerState
from pipetransformer_contract.spec import TrainerSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="JSON of a TrainerSpec")
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--checkpoint-every", type=int, default=5)
    parser.add_argument("--steps-log", type=Path, required=True)
    arguments = parser.parse_args()
    spec = TrainerSpec.model_validate_json(arguments.spec.read_text())
    torch.set_num_threads(1)

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    stages = arguments.stages
    pipelines = world // stages
    pipeline, stage = divmod(rank, stages)
    pipeline_groups = [dist.new_group([p * stages + s for s in range(stages)]) for p in range(pipelines)]
    stage_groups = [dist.new_group([p * stages + s for p in range(pipelines)]) for s in range(stages)]
    active = dist.new_group(list(range(pipelines * stages)))
    if rank >= pipelines * stages:
        signal.pause()  # left over by a world that is no multiple of the stages, until the agent makes another

    dtype = torch.float32
    dataset = load_dataset(spec.data, dtype=dtype)
    cut = spans(spec.model.num_layers, 0, stages)
    span = cut[stage]
    seed = spec.training.seed
    model = build_model(spec.model, dataset.info, seed=seed, dtype=dtype, units=[])
    state = WorkerState(spec.model.num_layers)
    state.units = build_units(spec.model, dataset.info, span, seed=seed, dtype=dtype)
    step = _load(arguments.checkpoint, state)
    parameters = list(state.trained_parameters())
    optimizer = make_optimizer(spec.training.optimizer, parameters, state.moments)
    assert optimizer is not None
    group = pipeline_groups[pipeline]
    assert isinstance(group, dist.ProcessGroup)
    device = torch.device("cpu")
    schedule = make_schedule(spec.pipeline.schedule)
    stage_spec = StageSpec(stage, cut, tuple(range(stages)), 0, schedule, group, device, dtype)
    runner = StageRunner(stage_spec, model, [state.units[index] for index in span])
    batch_size = spec.training.global_batch_size
    order = EpochOrder(seed=seed, num_samples=len(dataset.train), global_batch=batch_size, num_shards=batch_size)
    micro_batch_size = spec.pipeline.micro_batch_size
    assert micro_batch_size is not None

    attempt = os.environ["MASTER_PORT"]  # the agents count restarts apart
    with arguments.steps_log.open("a") as log:
        while True:
            batch = order.batch(step)
            optimizer.zero_grad()
            runner.train(step, deal(batch, pipelines, micro_batch_size)[pipeline], dataset.train)
            flat = torch.cat([parameter.grad.flatten() for _, parameter in parameters if parameter.grad is not None])
            dist.all_reduce(flat, group=stage_groups[stage])
            flat /= sum(len(shard) for shard in batch)
            parts = torch.split(flat, [parameter.numel() for _, parameter in parameters])
            for (_, parameter), part in zip(parameters, parts, strict=True):
                assert parameter.grad is not None
                parameter.grad.copy_(part.view_as(parameter))
            dist.all_reduce(torch.zeros(1), group=active)
            optimizer.step()
            step += 1
            entry = {"time": time.time(), "rank": rank, "world": world, "step": step, "attempt": attempt}
            log.write(json.dumps(entry) + "\n")
            log.flush()
            if step % arguments.checkpoint_every == 0:
                if pipeline == 0:
                    _save(arguments.checkpoint, state, step)
                dist.barrier(group=active)
                if rank == 0:
                    _mark(arguments.checkpoint, step)


def _save(folder: Path, state: WorkerState, step: int) -> None:
    for index in state.units:
        _replace(folder / f"{step}-{index}.pt", partial(torch.save, state.unit_tensors(index, with_moments=True)))


def _mark(folder: Path, step: int) -> None:
    _replace(folder / "step", lambda path: path.write_text(str(step)))


def _load(folder: Path, state: WorkerState) -> int:
    marker = folder / "step"
    if not marker.exists():
        return 0
    step = int(marker.read_text())
    for index, unit in list(state.units.items()):
        state.put_unit(index, unit, torch.load(folder / f"{step}-{index}.pt"))
    return step


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f"{path.name}.new")
    write(temporary)
    temporary.replace(path)


if __name__ == "__main__":
    main()
