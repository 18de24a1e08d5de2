"""Scores the model on the held-out samples, through the pipelines that train it, and keeps the best model."""

import math
import time
from collections.abc import Sequence
from itertools import pairwise

import torch.distributed as dist

from pipetransformer.checkpoint.best_model import save_best
from pipetransformer.elastic.transport.barrier import Barrier
from pipetransformer.elastic.transport.groups import wait_for
from pipetransformer.elastic.transport.watchdog import ROUND, Timing, Watchdog
from pipetransformer.hooks import WorkerSignals
from pipetransformer.job.job import Job
from pipetransformer.models.metrics import LOSS, checking_sums
from pipetransformer.pipeline import SpanProbes
from pipetransformer.state.control import Control
from pipetransformer.state.worker_state import WorkerState

from .leader_events import Evaluated
from .membership import Membership

#: About how many seconds an evaluation runs between two agreements of all members to continue it.
_SECONDS = 1.0


def evaluation_due(job: Job, control: Control) -> bool:
    """Whether the newest step must be followed by an evaluation that is not done yet."""
    return control.evaluated_step != control.step and job.evaluates_after(control.step)


def rehearse(job: Job, member: Membership, watchdog: Watchdog) -> None:
    """Check that samples and slices of tokens can be run apart. Then score one micro-batch of held-out samples in each
    pipeline, if there are any, and drop the result. So errors of an evaluation show before the first step, and not only
    after an epoch. All members call this.

    Raises:
        RuntimeError: a connection broke.
        SpecError: see `SpanProbes.check_slices`, `SpanProbes.check_samples` and `checking_sums`.
        ModelError: a metric or the model failed.
        DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
    """
    layout, test = member.layout, job.dataset.test
    with watchdog.timing("rehearsal", member.groups.connections):
        probes = SpanProbes(member.runner, job.dataset.train)
        probes.check_slices()
        probes.check_samples()
        if not len(test):
            return
        micro_batches = job.dealer.test(layout.pipelines, layout.micro_batch_size)[layout.pipeline][:1]
        metrics = {**job.metrics, LOSS: checking_sums(job.model.loss)}
        member.runner.evaluate(micro_batches, test, list(metrics.values()), name="test")


def evaluate(
    job: Job,
    state: WorkerState,
    member: Membership,
    watchdog: Watchdog,
    barrier: Barrier,
    signals: WorkerSignals,
) -> bool:
    """Evaluate the committed state on all held-out samples. All members call this between rounds.

    If `keepBest` is set and this is the best evaluation so far, the model is also saved.

    Returns:
        Whether the evaluation is complete, and the model is saved if it has to be. False if a member was told to stop
        meanwhile, because that member will soon be killed. Then nothing is noted, and the evaluation will be repeated.

    Raises:
        RuntimeError: a connection broke. Nothing is noted, and the evaluation will be repeated.
        ModelError: a metric or the model failed.
        DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
        StorageError: the best model cannot be written, and waiting will not help.
    """
    layout, control = member.layout, state.control
    dealt = job.dealer.test(layout.pipelines, layout.micro_batch_size)
    own, metrics = dealt[layout.pipeline], list(job.metrics.values())
    with watchdog.timing("evaluation", member.groups.connections, ROUND) as timing:
        stretches = _Stretches(member, list(map(member.runner.lengths_of_parts, dealt)), signals, timing)
        scores = member.runner.evaluate(own, job.dataset.test, metrics, name="test", may_continue=stretches.part_ended)
        if not stretches.end_with_the_others():
            return False
        dist.all_reduce(scores, group=member.world)
    values = {
        name: numerator / denominator if denominator else math.nan
        for name, (numerator, denominator) in zip(job.metrics, scores.tolist(), strict=True)
    }
    better = job.is_last(control.visit) and control.is_better(values, job.spec.evaluation)
    if better and job.spec.evaluation.keep_best:
        control.kept_step = 0  # if the write breaks, the stored model is unknown
        if not save_best(job, state, layout, member.groups, barrier, signals):
            return False
        control.kept_step = control.step
    control.note_evaluation(values, better=better)  # last, so that a broken evaluation is repeated
    if member.leader is not None:
        member.leader.tell(Evaluated(control, better))
    return True


class _Stretches:
    """Lets all members agree, about once a second, whether an evaluation continues.

    An evaluation consists of parts of a few micro-batches. An agreement after each part would make the stages wait for
    each other. So members agree after several parts: a stretch. They exchange how long the last stretch took, and all
    derive the number of parts in the next stretch from the slowest. The first stretch has one part, and each has at
    most twice as many as the one before. When the length of samples changes, they start again with one part, because
    longer samples may take a hundred times as long.
    """

    def __init__(
        self,
        member: Membership,
        lengths: Sequence[Sequence[int | None]],
        signals: WorkerSignals,
        timing: Timing,
    ) -> None:
        """
        Args:
            member: this worker's membership.
            lengths: length of the samples in each part, for each pipeline.
            signals: tells whether this worker shall stop.
            timing: the watchdog's timer of the evaluation. It counts each stretch as one lap.
        """
        self._exchange = member.groups.exchange
        self._device = member.runner.spec.device
        self._parts = max(map(len, lengths))
        self._done = 0
        self._changes = {
            done for own in lengths for done, (before, after) in enumerate(pairwise(own), start=1) if before != after
        }
        self._signals = signals
        self._timing = timing
        self._size = self._left = 1
        self._began = time.perf_counter()
        self._may_continue = True

    def part_ended(self) -> bool:
        """Note that one more part is done, and agree with all members if the stretch ends here. Returns whether the
        evaluation continues."""
        self._done += 1
        self._left -= 1
        if self._done < self._parts and (not self._left or self._done in self._changes):
            self._agree()
        return self._may_continue

    def end_with_the_others(self) -> bool:
        """Take part in the remaining agreements, if another pipeline has more parts. Returns whether the evaluation is
        complete in all pipelines."""
        while self._may_continue and self._done < self._parts:
            self.part_ended()
        return self._may_continue

    def _agree(self) -> None:
        wait_for(self._device)
        seconds = time.perf_counter() - self._began
        said = self._exchange.gather([float(self._signals.stop_requested()), seconds])
        leaving, slowest = map(max, zip(*said, strict=True))
        self._may_continue = not leaving
        most = 1 if self._done in self._changes else 2 * self._size
        self._size = self._left = max(1, min(most, int(self._size * _SECONDS / slowest)))
        self._timing.lap()
        self._began = time.perf_counter()
