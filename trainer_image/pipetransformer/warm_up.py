"""Does once, before a worker says that it is ready, what a process does at its first step only: start the threads of
autograd, load and compile kernels for the job's shapes, import the optimizers, find memory. A joiner's first step is in
everybody's pause."""

import copy
import itertools
import logging

import torch
import torch.distributed as dist

from .data import lengths_of, read_batch
from .elastic.groups import ensure_default_group
from .errors import SpecError
from .job import Job
from .models import MicroBatchContext, SamplesFirstError, run_unit, set_micro_batch
from .optimizer import make_optimizer
from .reserve import Reserve
from .schedules import StageRunner, StageSpec
from .state import WorkerState

logger = logging.getLogger(__name__)


def warm_up(job: Job, device: torch.device, reserve: Reserve) -> None:
    """Train a model of one block, all of it zeros, for one micro-batch; fill `reserve` with what a stage may need.

    Raises:
        SpecError: a unit drops what does not have samples first.
    """
    _check_dropout(job)
    try:
        _train(job, device)
        if device.type == "cpu":
            reserve.fill(job.stage_bytes)
    except Exception:  # whatever it is, only the first step can tell whether it is more than the zeros
        logger.warning("this worker is not warm", exc_info=True)


def _train(job: Job, device: torch.device) -> None:
    state = WorkerState(job.num_layers, job.model.ties)
    for index in (0, 1, job.num_layers + 1):
        state.units[index] = unit = job.blank_unit(index)
        zeros = {
            name: torch.zeros_like(old, device=device)
            for name, old in state.unit_tensors(index, with_moments=False).items()
        }
        state.put_unit(index, unit, zeros)
        unit.to(device)  # what is not part of the state
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


def _check_dropout(job: Job) -> None:
    """Positions first look like several rows of each sample where the micro-batch divides them: each unit is tried with
    one that does not, on the meta device, where nothing is computed.

    Raises:
        SpecError: a unit drops what does not have samples first.
    """
    device, positions = torch.device("meta"), job.model.activation[0]
    # One more, or one less, where the embedding adds a class token, or the head takes it off.
    size = next(size for size in itertools.count(2) if all((positions + more) % size for more in (-1, 0, 1)))
    lengths = lengths_of(job.dataset.train, [0] * size, device)
    set_micro_batch(MicroBatchContext(0, range(size), lengths, autocast=job.autocast))
    inputs, _ = read_batch(job.dataset.train, [0], 0)
    x = inputs.to(device).expand(size, *inputs.shape[1:])
    for index, shell in enumerate(job.model.units):
        try:
            with torch.no_grad():
                run_unit(copy.deepcopy(shell).to(device).train(), x)
        except SamplesFirstError as error:
            raise SpecError("spec.model", f"{job.model.unit_name(index)}: {error}") from error
        except Exception:  # what asks for values fails on this device
            logger.debug("dropout of %s is not checked", job.model.unit_name(index), exc_info=True)
        x = torch.empty(job.model.activation_shape(size), dtype=job.dtype, device=device)
