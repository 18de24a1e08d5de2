"""Scores the model on the held-out samples, through the same pipelines that train it, and keeps the best."""

import math

import torch.distributed as dist

from .best import save_best
from .elastic.barrier import Barrier
from .elastic.watchdog import Watchdog
from .job import Job
from .membership import Membership
from .state import Control, WorkerState


def evaluation_due(job: Job, control: Control) -> bool:
    """Whether the newest step is one to evaluate after, and that was not done yet."""
    return control.evaluated_step != control.step and job.evaluates_after(control.step)


def rehearse(job: Job, member: Membership, watchdog: Watchdog) -> None:
    """Score one micro-batch of held-out samples, and forget it: what fails in an evaluation fails before the first step
    and not after an epoch. All members call this.

    Raises:
        RuntimeError: a connection broke.
        ModelError: a metric or the model failed.
        DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
    """
    layout, test = member.layout, job.dataset.test
    micro_batches = job.test_micro_batches(layout.pipelines, layout.micro_batch_size)[layout.pipeline][:1]
    with watchdog.timing("rehearsal", member.groups.connections):
        member.runner.evaluate(micro_batches, test, list(job.metrics.values()), name="test")


def evaluate(job: Job, state: WorkerState, member: Membership, watchdog: Watchdog, barrier: Barrier) -> None:
    """Evaluate the committed state; all members call this between rounds.

    Raises:
        RuntimeError: a connection broke; nothing is noted, so it will be done again.
        ModelError: a metric or the model failed.
        DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
        StorageError: the best model cannot be written.
    """
    layout, control = member.layout, state.control
    micro_batches = job.test_micro_batches(layout.pipelines, layout.micro_batch_size)[layout.pipeline]
    metrics = list(job.metrics.values())
    rounds = math.ceil(len(job.dataset.test) / job.order.global_batch)
    with watchdog.timing("evaluation", member.groups.connections, rounds):
        scores = member.runner.evaluate(micro_batches, job.dataset.test, metrics, name="test")
        dist.all_reduce(scores, group=member.world)
    values = {
        name: numerator / denominator if denominator else math.nan
        for name, (numerator, denominator) in zip(job.metrics, scores.tolist(), strict=True)
    }
    better = control.is_better(values, job.spec.evaluation)
    if better and job.spec.evaluation.keep_best:
        control.kept_step = 0  # from here on nobody knows which, if this breaks
        save_best(job, state, layout, member.groups, barrier)
        control.kept_step = control.step
    control.note_evaluation(values, better=better)  # last: what breaks before it is done again
    if member.leader is not None:
        member.leader.evaluated(control, better=better)
