"""Describes all losses that one turn found, of members and of workers that would join. Changes nothing."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

from pipetransformer_operator.plan import budget
from pipetransformer_operator.plan.losses import cause_of, describe, loss_of, out_of_memory_at, packed_too_tight
from pipetransformer_operator.plan.types import FailureCause, NodeFailure, Worker
from pipetransformer_operator.plan.view import View
from pipetransformer_operator.plan.workers import Workers

from .attempts import may_renew

#: How long a node may not report on a new pod. A working node reports within seconds, while the cluster takes most of
#: a minute to see that a node is dead.
UNATTENDED = timedelta(seconds=30)
#: The same for a node where other workers fell silent lately.
UNATTENDED_IN_DOUBT = timedelta(seconds=5)


@dataclass(frozen=True)
class Incident:
    """The workers that one turn found lost.

    Attributes:
        view: the job before any rule reacts to the losses.
        lost: why workers with state can no longer train, by name of the worker.
        suspects: the part of `lost` whose pods look alive.
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
        """All wanted workers that exist, by id, lost or not."""
        return self.view.wanted.by_id

    @cached_property
    def lost_member_ids(self) -> list[int]:
        """Ids of lost workers that hold state."""
        return [key for key in self.view.status.worker_ids if self.view.name_of(key) in self.lost]

    def _existing(self, ids: Iterable[int]) -> Workers:
        """The workers with these ids whose pods exist."""
        return Workers(filter(None, map(self.workers.get, ids)))

    @cached_property
    def stranded(self) -> dict[int, str]:
        """Why joiners will not start on their nodes, by id of the joiner."""
        whys = {worker.id: _why_stranded(self.view, worker) for worker in self._existing(self.view.joining_ids)}
        return {key: why for key, why in whys.items() if why}

    @cached_property
    def ended(self) -> Workers:
        """Joiners that ended before they joined."""
        return self._existing(self.view.joining_ids).ended

    @cached_property
    def why(self) -> dict[int, str]:
        """Why each lost worker is lost, by its id."""
        lost = {*self.lost_member_ids, *self.stranded, *self.ended.ids}
        return {key: self._why(key) for key in sorted(lost)}

    def _why(self, key: int) -> str:
        return self.lost.get(self.view.name_of(key)) or self.stranded.get(key) or describe(self.workers.get(key))

    @cached_property
    def lost_workers(self) -> Workers:
        """Lost workers whose pods exist."""
        return self._existing(self.why)

    @cached_property
    def out_of_memory(self) -> dict[int, int]:
        """Members that ran out of memory after packing, by id: how many stages their pipeline had."""
        members = self._existing(self.lost_member_ids)
        return {one.id: out_of_memory_at(one) for one in members if packed_too_tight(one, self._longest)}

    @property
    def _longest(self) -> int:
        return self.view.spec.pipeline.stages

    @cached_property
    def failed_member_ids(self) -> list[int]:
        """Ids of members whose loss is a failure of the job."""
        return [key for key in self.lost_member_ids if loss_of(self.workers.get(key), self._longest).counts]

    @cached_property
    def failed_joiners(self) -> Workers:
        """Joiners whose end is a failure of the job."""
        return self.ended.that(lambda worker: loss_of(worker).counts)

    @cached_property
    def _disrupted(self) -> Workers:
        return self.ended.without(self.stranded).that(lambda worker: worker.disrupted)

    @property
    def at_fault(self) -> int | None:
        """Id of a joiner whose loss ends the present preparation; a failed one before one that the cluster removed."""
        return next((worker.id for worker in (*self.failed_joiners, *self._disrupted)), None)

    @property
    def retry(self) -> timedelta | None:
        """How long a start waits before it replaces the lost joiners; None to replace them at once."""
        waits = (loss_of(worker).retry for worker in (*self.failed_joiners, *self._disrupted))
        return max(filter(None, waits), default=None)

    @cached_property
    def silent(self) -> Workers:
        """Members whose loss is a failure, unless their nodes turn out to be lost."""
        return self._existing(self.failed_member_ids).that(lambda one: budget.is_of_node(self.view, one, self.suspects))

    @property
    def failures(self) -> list[NodeFailure]:
        """Failed workers by node and cause, except silent ones: whether their node is lost shows later."""
        failed = [*self._existing(self.failed_member_ids).without(self.silent.ids), *self.failed_joiners]
        return [NodeFailure(worker.node, self._cause(worker)) for worker in failed]

    def _cause(self, worker: Worker) -> FailureCause:
        return FailureCause.SILENT if worker.name in self.suspects else cause_of(worker)

    @property
    def counts(self) -> bool:
        """Whether these losses are a failure of the job."""
        return bool(self.failed_member_ids or self._fails_a_start)

    @property
    def counts_now(self) -> bool:
        """Whether the failure counts against the budget now.

        Not if all failed members may have lost their nodes: `budget` first waits for the cluster's word. Nor if a start
        already waits to replace workers: these losses probably have the same cause."""
        return len(self.failed_member_ids) > len(self.silent) or (self._fails_a_start and not self.view.asleep)

    @property
    def _fails_a_start(self) -> bool:
        return self.starting and bool(self.failed_joiners)

    def name_and_node(self, key: int) -> str:
        """Name of the worker with this id, and its node if it has one."""
        name, worker = self.view.name_of(key), self.workers.get(key)
        return f"{name} on {worker.node}" if worker is not None and worker.node else name

    @property
    def described(self) -> str:
        """All lost workers and why they are lost, for messages."""
        return ", ".join(f"{self.name_and_node(key)} ({why})" for key, why in self.why.items())


def _why_stranded(view: View, worker: Worker) -> str:
    """Why a joiner will not start on its node; empty if it may start.

    A node that does not report on the pod may be dead. Or the control plane is slow, because many pods start at once.
    So a job that does not train yet gives up such a joiner only if other workers on the node fell silent too. A job
    that trains gives it up after `UNATTENDED`.

    A job that trains also gives up joiners on a node that is being drained, at most `attempts.RENEWALS` times. Pods
    that tolerate the node's taint would otherwise return there again and again.
    """
    if worker.draining and may_renew(view):
        return f"its node {worker.node} no longer accepts pods"
    if view.hears(worker.uid):
        return ""
    if worker.node_lost:
        return "its node is lost"
    if worker.unattended_since is None or not (worker.node_doubted or view.status.generation):
        return ""
    patience = UNATTENDED_IN_DOUBT if worker.node_doubted else UNATTENDED
    if view.clock.reached(worker.unattended_since + patience):
        return f"its node has not reported its status for {patience.seconds} s"
    return ""
