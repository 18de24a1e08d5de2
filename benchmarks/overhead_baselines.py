"""The three baselines of bench-overhead, as their tutorials write them, on the same model, weights, data and cut."""

import itertools
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from pipetransformer.job.job import Job


class Baseline(Protocol):
    """Trains one step a call."""

    def step(self) -> None: ...


def make_baseline(name: str, job: Job, rank: int, group: dist.ProcessGroup) -> Baseline:
    """`plain`, `ddp` or `pipelining`."""
    if name == "pipelining":
        return Pipelining(job, rank, group)
    return Loop(job, rank, group)


class Loop:
    """A plain PyTorch loop; with DistributedDataParallel where there is more than one rank."""

    def __init__(self, job: Job, rank: int, group: dist.ProcessGroup) -> None:
        model: nn.Module = nn.Sequential(*job.build_units(range(job.num_layers + 2)).values())
        if group.size() > 1:
            model = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        self._model = model
        self._optimizer = _optimizer(job, model)
        self._loss = nn.CrossEntropyLoss()
        self._batches = _batches(job, rank, group.size())

    def step(self) -> None:
        inputs, labels = next(self._batches)
        self._optimizer.zero_grad()
        self._loss(self._model(inputs), labels).backward()
        self._optimizer.step()


class Pipelining:
    """A script on torch.distributed.pipelining with static stages and 1F1B."""

    def __init__(self, job: Job, rank: int, group: dist.ProcessGroup) -> None:
        stages, size = group.size(), job.micro_batch_size
        span = job.layouts.cut(0, stages, 1, None).spans[rank]
        module = nn.Sequential(*job.build_units(span).values())
        inputs = torch.zeros(size, *job.dataset.info.input_shape)
        hidden = torch.zeros(job.model.activation_shape(size), requires_grad=True)
        outputs = torch.zeros(size, job.dataset.info.num_classes, requires_grad=True)
        self._rank, self._stages = rank, stages
        stage = PipelineStage(
            module,
            rank,
            stages,
            torch.device("cpu"),
            input_args=inputs if rank == 0 else hidden,
            output_args=outputs if rank == stages - 1 else hidden,
            group=group,
        )
        self._schedule = Schedule1F1B(stage, job.order.global_batch // size, loss_fn=nn.CrossEntropyLoss())
        self._optimizer = _optimizer(job, module)
        self._batches = _batches(job, 0, 1)

    def step(self) -> None:
        inputs, labels = next(self._batches)
        self._optimizer.zero_grad()
        if self._rank == 0:
            self._schedule.step(inputs, return_outputs=False)
        else:
            losses: list[Tensor] = []
            self._schedule.step(target=labels, losses=losses, return_outputs=False)
        self._optimizer.step()


def _optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    spec = job.spec.training.optimizer
    return torch.optim.AdamW(
        model.parameters(),
        lr=spec.learning_rate,
        betas=(spec.beta1, spec.beta2),
        eps=spec.epsilon,
        weight_decay=spec.weight_decay,
    )


def _batches(job: Job, rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of each global batch, in a new random order each epoch, without end."""
    count, batch = len(job.dataset.train), job.order.global_batch
    share = batch // ranks
    for epoch in itertools.count():
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()
        for start in range(rank * share, count, batch):
            yield job.dataset.train.batch(order[start : start + share])
