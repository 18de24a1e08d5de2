"""Finds where the numbers of a skipped step stopped being finite, that is, where the first NaN or infinity was."""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipetransformer.elastic.transport.watchdog import ROUND, Watchdog
from pipetransformer.job.job import Job
from pipetransformer.state.control import Control

from .membership import Membership
from .vote import Vote


class Beginning(NamedTuple):
    """Where the first non-finite value of a step was: in the loss, or in the output or gradient of a unit."""

    what: str
    unit: str = ""

    def __str__(self) -> str:
        return f"the {self.what} of {self.unit}" if self.unit else f"the {self.what}"


#: No sample of the batch had a target, so there is no mean loss.
NO_TARGETS = Beginning("mean loss of no targets")


def find_beginning(job: Job, control: Control, vote: Vote, member: Membership, watchdog: Watchdog) -> Beginning:
    """Find the first non-finite value of the newest step, which was skipped. All members call this and get the same
    answer.

    If only gradients are non-finite, the vote tells the unit. A non-finite loss makes all gradients non-finite. Then
    this repeats the step's forward to find the first unit with a non-finite output.

    Raises:
        RuntimeError: a connection broke.
        ModelError: the model failed.
        DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
    """
    if not vote.weight > 0:
        return NO_TARGETS
    if math.isfinite(vote.loss_sum):
        unit = vote.non_finite_unit
        assert unit is not None
        return Beginning("gradient", job.at(control.visit).model.unit_name(unit))
    layout, step = member.layout, control.step - 1
    micro_batches = job.dealer.train(step, layout.pipelines, layout.micro_batch_size)[layout.pipeline]
    with watchdog.timing("search", member.groups.connections, ROUND):
        own = member.runner.first_non_finite(step, micro_batches, job.dataset.train)
        first = torch.tensor(math.inf if own is None else own, dtype=torch.float64)
        dist.all_reduce(first, op=dist.ReduceOp.MIN, group=member.world)
    if not first.isfinite():
        return Beginning("loss")
    return Beginning("output", job.at(control.visit).model.unit_name(int(first)))
