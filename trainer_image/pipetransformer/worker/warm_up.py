"""Warms a worker up before it says that it is ready, because all workers wait for a joiner's first step.

The warm-up starts autograd's threads, loads and compiles kernels for the job's shapes, imports the optimizers and takes
memory.
"""

import copy
import itertools
import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from pipetransformer.data import lengths_of, read_batch
from pipetransformer.elastic.transport.groups import alone
from pipetransformer.errors import DeviceError, SpecError, fault_of
from pipetransformer.job.job import Job
from pipetransformer.models import MicroBatchContext, SamplesFirstError, run_unit
from pipetransformer.pipeline import StageRunner, StageSpec
from pipetransformer.state.optimizer import make_optimizer
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.training.memory_reserve import Reserve

logger = logging.getLogger(__name__)


def warm_up(job: Job, device: torch.device, reserve: Reserve) -> None:
    """Train a model of one layer, whose weights are zero, on one micro-batch. On a CPU, fill `reserve` for a stage.

    Raises:
        SpecError: a unit applies dropout to a tensor without samples first, makes random draws that are not keyed, or
            changes itself.
        DeviceError: the accelerator is broken.
    """
    _check_dropout(job, device)
    try:
        _train(job, device)
        if device.type == "cpu":
            reserve.fill(job.layouts.stage_bytes)
    except Exception as error:  # noqa: BLE001 - judged below
        _pass_over(error, "this worker is not warm")


def _pass_over(error: Exception, words: str) -> None:
    """Log an error of the warm-up, because zeros may have caused it; the first step will show it otherwise. A broken
    accelerator is raised."""
    fault = fault_of(error)
    if isinstance(fault, DeviceError):
        raise fault from error
    logger.warning("%s: %s: %s", words, type(error).__name__, error)


def _train(job: Job, device: torch.device) -> None:
    state = WorkerState(job.num_layers, job.model.ties)
    for index in (0, 1, job.num_layers + 1):
        _put_zeros(job, state, index, device)
    spec = StageSpec(
        worker=0,
        spans=[range(len(state.units))],
        owners=(0,),
        boundary=0,
        schedule=job.schedule,
        group=alone(),
        device=device,
        dtype=job.dtype,
        autocast=job.autocast,
        recompute=job.spec.training.activation_checkpointing,
    )
    runner = StageRunner(spec, job.model, list(state.units.values()))
    micro_batch = job.dealer.train(0, 1, job.micro_batch_size)[0][0]
    for _, parameter in state.trained_parameters():
        parameter.grad = torch.zeros_like(parameter)  # as in training: sparse gradients add up in a dense one
    runner.train(0, [micro_batch], job.dataset.train)
    optimizer = make_optimizer(job.spec.training.optimizer, state.trained_parameters(), state.moments, job.no_decay)
    assert optimizer is not None
    optimizer.step()


def _put_zeros(job: Job, state: WorkerState, index: int, device: torch.device) -> nn.Module:
    """Put a unit of zeros on the device into the state, and return it."""
    state.units[index] = unit = job.blank_unit(index)
    tensors = state.unit_tensors(index, with_moments=False)
    state.put_unit(index, unit, {name: torch.zeros_like(old, device=device) for name, old in tensors.items()})
    return unit.to(device)  # moves tensors that are not part of the state


def _check_dropout(job: Job, device: torch.device) -> None:
    """Try each unit on a micro-batch whose size divides no number of positions. Otherwise a tensor with positions first
    would look like several rows of each sample. Units run on the meta device, or as zeros on `device` if they need
    values.

    Raises:
        SpecError: a unit applies dropout to a tensor without samples first, makes random draws that are not keyed, or
            changes itself.
        DeviceError: the accelerator is broken.
    """
    meta = torch.device("meta")
    # One more or one less, if the embedding adds a class token or the head removes it.
    positions = [count + more for count in job.model.activation[:1] for more in (-1, 0, 1) if count + more > 0]
    size = next(size for size in itertools.count(2) if all(count % size for count in positions))
    x = read_batch(job.dataset.train, [0] * size, 0)[0]
    for index, shell in enumerate(job.model.units):
        name = job.model.unit_name(index)
        error = _failure(job, partial(_on_meta, shell), x.to(meta))
        if error is not None and not isinstance(error, SamplesFirstError):  # it may need values
            state = WorkerState(job.num_layers, job.model.ties)
            error = _failure(job, partial(_put_zeros, job, state, index, device), x.to(device))
        if isinstance(error, SamplesFirstError):
            raise SpecError("spec.model", f"{name}: {error}") from error
        if isinstance(error, SpecError):
            raise error
        if error is not None:
            _pass_over(error, f"could not check that {name} applies dropout to tensors with samples first")
        x = torch.zeros(job.model.activation_shape(size), dtype=job.dtype)


def _on_meta(shell: nn.Module) -> nn.Module:
    return copy.deepcopy(shell).to("meta")


def _failure(job: Job, make: Callable[[], nn.Module], x: Tensor) -> Exception | None:
    """Train a unit on a micro-batch of the first sample, and return what it raises. The meta device has no autocast."""
    context = MicroBatchContext(0, range(len(x)), lengths_of(job.dataset.train, [0] * len(x), x.device))
    try:
        with torch.no_grad():
            run_unit(make().train(), x, context)
    except Exception as error:  # noqa: BLE001 - judged by the caller
        return error
    return None
