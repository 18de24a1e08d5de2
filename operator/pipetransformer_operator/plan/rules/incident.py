"""What is lost at one turn: members and workers that were to join, however many fell at once. Changes nothing."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

from pipetransformer_operator.plan import budget
from pipetransformer_operator.plan.losses import cause_of, describe, loss_of, out_of_memory_at
from pipetransformer_operator.plan.types import FailureCause, NodeFailure, Worker
from pipetransformer_operator.plan.view import View
from pipetransformer_operator.plan.workers import Workers

from .prepare import may_go_on

#: A working node reports on a pod within seconds; the cluster takes most of a minute to see that a node is dead.
UNATTENDED = timedelta(seconds=30)
#: The same on a node where other workers fell silent lately.
UNATTENDED_IN_DOUBT = timedelta(seconds=5)


@dataclass(frozen=True)
class Incident:
    """Lost workers by id, as they stood when they were found.

    Attributes:
        view: before anything was done about them.
        lost: names of holders of state that can train no more, and why.
        suspects: those of them whose pods look alive, and why they are lost.
    """

    view: View
    lost: Mapping[str, str]
    suspects: Mapping[str, str]

    @cached_property
    def starting(self) -> bool:
        """Whether the job does not train yet."""
        return self.view.status.generation is None

    @cached_property
    def workers(self) -> dict[int, Worker]:
        """All wanted workers that exist."""
        return self.view.wanted.by_id

    @cached_property
    def members(self) -> list[int]:
        """Lost holders of state."""
        return [key for key in self.view.status.worker_ids if self.view.name_of(key) in self.lost]

    def _present(self, ids: Iterable[int]) -> Workers:
        """Those of the workers whose pods are there."""
        return Workers(filter(None, map(self.workers.get, ids)))

    @cached_property
    def stranded(self) -> dict[int, str]:
        """Joiners that will not start where they are, and why."""
        whys = {worker.id: _why_stranded(self.view, worker) for worker in self._present(self.view.joining_ids)}
        return {key: why for key, why in whys.items() if why}

    @cached_property
    def ended(self) -> Workers:
        """Joiners that ended before they joined."""
        return self._present(self.view.joining_ids).ended

    @cached_property
    def why(self) -> dict[int, str]:
        """All that are lost, members first, and why."""
        joiners = self.stranded.keys() | self.ended.ids
        return {key: self._why(key) for key in (*self.members, *sorted(joiners))}

    def _why(self, key: int) -> str:
        return self.lost.get(self.view.name_of(key)) or self.stranded.get(key) or describe(self.workers.get(key))

    @cached_property
    def observed(self) -> Workers:
        """Those whose pods are there."""
        return self._present(self.why)

    @cached_property
    def short(self) -> dict[int, int]:
        """Members whose pipelines were packed into too little memory, and how many stages these have."""
        stages = {worker.id: out_of_memory_at(worker) for worker in self._present(self.members)}
        return {key: count for key, count in stages.items() if 0 < count < self._longest}

    @property
    def _longest(self) -> int:
        return self.view.spec.pipeline.stages

    @cached_property
    def failed(self) -> list[int]:
        """Members whose loss is a failure."""
        return [key for key in self.members if loss_of(self.workers.get(key), self._longest).counts]

    @cached_property
    def failed_joiners(self) -> Workers:
        """Joiners whose end is a failure."""
        return self.ended.that(lambda worker: loss_of(worker).counts)

    @cached_property
    def _disrupted(self) -> Workers:
        return self.ended.without(self.stranded).that(lambda worker: worker.disrupted)

    @property
    def at_fault(self) -> int | None:
        """A joiner without which what is prepared cannot go on; failed ones first."""
        return next((worker.id for worker in (*self.failed_joiners, *self._disrupted)), None)

    @property
    def retry(self) -> timedelta | None:
        """How long a start waits before it replaces them; None: it does so at once."""
        waits = (loss_of(worker).retry for worker in (*self.failed_joiners, *self._disrupted))
        return max(filter(None, waits), default=None)

    @cached_property
    def silent(self) -> Workers:
        """Failed members whose nodes may be the reason."""
        return self._present(self.failed).that(lambda one: budget.is_of_node(self.view, one, self.suspects))

    @property
    def failures(self) -> list[NodeFailure]:
        """Failed workers by node and cause, except silent ones: whether their node is lost shows later."""
        failed = [*self._present(self.failed).without(self.silent.ids), *self.failed_joiners]
        return [NodeFailure(worker.node, self._cause(worker)) for worker in failed]

    def _cause(self, worker: Worker) -> FailureCause:
        return FailureCause.SILENT if worker.name in self.suspects else cause_of(worker)

    @property
    def counts(self) -> bool:
        """Whether it is a failure."""
        return bool(self.failed or self._fails_a_start)

    @property
    def counts_now(self) -> bool:
        """Whether it counts at once. Nodes that may be the reason are waited for, and workers that fall while others
        are awaited fell with them."""
        return len(self.failed) > len(self.silent) or (self._fails_a_start and not self.view.asleep)

    @property
    def _fails_a_start(self) -> bool:
        return self.starting and bool(self.failed_joiners)

    def named(self, key: int) -> str:
        """Name of the worker, and its node if it has one."""
        name, worker = self.view.name_of(key), self.workers.get(key)
        return f"{name} on {worker.node}" if worker is not None and worker.node else name

    @property
    def described(self) -> str:
        """All of them, and why."""
        return ", ".join(f"{self.named(key)} ({self.why[key]})" for key in sorted(self.why))


def _why_stranded(view: View, worker: Worker) -> str:
    """Why a worker that is to join will not start where it is; empty when it may.

    Many pods that start at once may wait for a slow control plane. So only a job that trains gives up on a node when
    nothing else speaks against the node. It also keeps workers off a node that is being emptied, except workers that
    tolerate the mark and return again and again.
    """
    if worker.draining and may_go_on(view):
        return f"its node {worker.node} takes no pods any more"
    if view.hears(worker.uid):
        return ""
    if worker.node_lost:
        return "its node is lost"
    if worker.unattended_since is None or not (worker.node_doubted or view.status.generation):
        return ""
    patience = UNATTENDED_IN_DOUBT if worker.node_doubted else UNATTENDED
    if view.clock.reached(worker.unattended_since + patience):
        return f"its node has said nothing of it for {patience.seconds} s"
    return ""
