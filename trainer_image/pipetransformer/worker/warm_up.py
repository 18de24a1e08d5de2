"""Does once, before a worker says that it is ready, what a process does at its first step only: start the threads of
autograd, load and compile kernels for the job's shapes, import the optimizers, find memory. A joiner's first step is in
everybody's pause."""

import copy
import itertools
import logging
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.data import lengths_of, read_batch
from pipetransformer.elastic.transport.groups import ensure_default_group
from pipetransformer.errors import DeviceError, SpecError, fault_of
from pipetransformer.job.job import Job
from pipetransformer.models import MicroBatchContext, SamplesFirstError, run_unit, set_micro_batch
from pipetransformer.pipeline import StageRunner, StageSpec
from pipetransformer.state.optimizer import make_optimizer
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.training.memory_reserve import Reserve

logger = logging.getLogger(__name__)


def warm_up(job: Job, device: torch.device, reserve: Reserve) -> None:
    """Train a model of one block, all of it zeros, for one micro-batch; fill `reserve` with what a stage may need.

    Raises:
        SpecError: a unit drops what does not have samples first, draws what is not keyed, or changes itself.
        DeviceError: the accelerator is broken.
    """
    _check_dropout(job, device)
    try:
        _train(job, device)
        if device.type == "cpu":
            reserve.fill(job.stage_bytes)
    except Exception as error:  # noqa: BLE001 - judged below
        _pass_over(error, "this worker is not warm")


def _pass_over(error: Exception, words: str) -> None:
    """Whatever it is, only the first step can tell whether it is more than the zeros, and shows where it was raised;
    but for a broken accelerator."""
    fault = fault_of(error)
    if isinstance(fault, DeviceError):
        raise fault from error
    logger.warning("%s: %s: %s", words, type(error).__name__, error)


def _train(job: Job, device: torch.device) -> None:
    state = WorkerState(job.num_layers, job.model.ties)
    for index in (0, 1, job.num_layers + 1):
        _put_zeros(job, state, index, device)
    ensure_default_group()
    assert dist.group.WORLD is not None
    spec = StageSpec(
        stage=0,
        stages=1,
        span=range(len(state.units)),
        boundary=0,
        schedule=job.schedule,
        group=dist.group.WORLD,
        device=device,
        dtype=job.dtype,
        autocast=job.autocast,
        recompute=job.spec.training.activation_checkpointing,
    )
    runner = StageRunner(spec, job.model, list(state.units.values()))
    micro_batch = job.training_micro_batches(0, 1, job.micro_batch_size)[0][0]
    runner.train(0, [micro_batch], job.dataset.train)
    optimizer = make_optimizer(job.spec.training.optimizer, state.trained_parameters(), state.moments, job.no_decay)
    assert optimizer is not None
    optimizer.step()


def _put_zeros(job: Job, state: WorkerState, index: int, device: torch.device) -> nn.Module:
    """A unit of zeros on the device, as part of the state."""
    state.units[index] = unit = job.blank_unit(index)
    tensors = state.unit_tensors(index, with_moments=False)
    state.put_unit(index, unit, {name: torch.zeros_like(old, device=device) for name, old in tensors.items()})
    return unit.to(device)  # what is not part of the state


def _check_dropout(job: Job, device: torch.device) -> None:
    """Positions first look like several rows of each sample where the micro-batch divides them: each unit is tried with
    one that does not, on the meta device, where nothing is computed; one that needs values, as zeros on `device`.

    Raises:
        SpecError: a unit drops what does not have samples first, draws what is not keyed, or changes itself.
        DeviceError: the accelerator is broken.
    """
    meta = torch.device("meta")
    # One more, or one less, where the embedding adds a class token, or the head takes it off.
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
            _pass_over(error, f"it is not known whether {name} drops what has samples first")
        x = torch.zeros(job.model.activation_shape(size), dtype=job.dtype)


def _on_meta(shell: nn.Module) -> nn.Module:
    return copy.deepcopy(shell).to("meta")


def _failure(job: Job, make: Callable[[], nn.Module], x: Tensor) -> Exception | None:
    """What a unit raises in training on a micro-batch of the first sample; without autocast, which meta has not."""
    set_micro_batch(MicroBatchContext(0, range(len(x)), lengths_of(job.dataset.train, [0] * len(x), x.device)))
    try:
        with torch.no_grad():
            run_unit(make().train(), x)
    except Exception as error:  # noqa: BLE001 - judged by the caller
        return error
    return None
