"""Scores the model on the held-out samples, through the same pipelines that train it, and keeps the best."""

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from pipetransformer.checkpoint.best_model import save_best
from pipetransformer.elastic.transport.barrier import Barrier
from pipetransformer.elastic.transport.exchange import EVALUATION, Exchange
from pipetransformer.elastic.transport.groups import wait_for
from pipetransformer.elastic.transport.watchdog import ROUND, Watchdog
from pipetransformer.job.job import Job
from pipetransformer.state.control import Control
from pipetransformer.state.worker_state import WorkerState

from .membership import Membership

#: About how long an evaluation goes on before all agree to.
_SECONDS = 1.0


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


def evaluate(
    job: Job,
    state: WorkerState,
    member: Membership,
    watchdog: Watchdog,
    barrier: Barrier,
    stop_requested: Callable[[], bool],
) -> bool:
    """Evaluate the committed state; all members call this between rounds.

    Returns:
        Whether that was done. Not if a member is told to stop meanwhile, for which `stop_requested` is asked: it is
        killed before long, and nothing is noted, so it will be done again.

    Raises:
        RuntimeError: a connection broke; nothing is noted, so it will be done again.
        ModelError: a metric or the model failed.
        DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
        StorageError: the best model cannot be written.
    """
    layout, control = member.layout, state.control
    dealt = job.test_micro_batches(layout.pipelines, layout.micro_batch_size)
    own, metrics = dealt[layout.pipeline], list(job.metrics.values())
    with watchdog.timing("evaluation", member.groups.connections, ROUND) as ended:
        slices = _Slices(member, list(map(member.runner.lengths_of_parts, dealt)), stop_requested, ended)
        scores = member.runner.evaluate(own, job.dataset.test, metrics, name="test", goes_on=slices.part_ended)
        if not slices.end_with_the_others():
            return False
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
        member.leader.on_evaluated(control, better=better)
    return True


class _Slices:
    """Has all members agree, about once a second, whether an evaluation goes on.

    They say how long the parts since the last time took, so that all know alike after how many more they ask again:
    after each would cost a pipeline its overlap. First after one, then after at most twice as many as before; and so
    again where longer samples come, whose parts may take a hundred times as long.
    """

    def __init__(
        self,
        member: Membership,
        lengths: Sequence[Sequence[int | None]],
        stop_requested: Callable[[], bool],
        ended: Callable[[], None],
    ) -> None:
        """
        Args:
            member: of the generation.
            lengths: of the samples in each part, by pipeline.
            stop_requested: whether this worker was told to stop.
            ended: called after each slice but the last.
        """
        self._exchange = Exchange(member.world, 2, EVALUATION)
        self._device = member.runner.spec.device
        self._parts = max(map(len, lengths))
        self._done = 0
        self._changes = {
            done for own in lengths for done, (before, after) in enumerate(pairwise(own), start=1) if before != after
        }
        self._stop_requested = stop_requested
        self._ended = ended
        self._size = self._left = 1
        self._began = time.perf_counter()
        self._goes_on = True

    def part_ended(self) -> bool:
        """Whether all go on after one more part."""
        self._done += 1
        self._left -= 1
        if self._done < self._parts and (not self._left or self._done in self._changes):
            self._agree()
        return self._goes_on

    def end_with_the_others(self) -> bool:
        """Take part in the agreements of pipelines that have more parts. Whether all have come to their end."""
        while self._goes_on and self._done < self._parts:
            self.part_ended()
        return self._goes_on

    def _agree(self) -> None:
        wait_for(self._device)
        seconds = time.perf_counter() - self._began
        said = self._exchange(torch.tensor([float(self._stop_requested()), seconds], dtype=torch.float64))
        leaving, slowest = said.amax(dim=0).tolist()
        self._goes_on = not leaving
        most = 1 if self._done in self._changes else 2 * self._size
        self._size = self._left = max(1, min(most, int(self._size * _SECONDS / slowest)))
        self._ended()
        self._began = time.perf_counter()
