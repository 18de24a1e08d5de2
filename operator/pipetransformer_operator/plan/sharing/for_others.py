"""Decides which job releases claimed workers for a pending pod of another owner (`releaseForOthers` of the chart).

Jobs release one claimed pipeline at a time, and never workers of the starting size. Claimed workers leave a node only
if the pod fits there afterwards. If it fits nowhere, no worker leaves. For a pod that lacks several resources the
operator cannot compute the node. Then at most as many workers leave as the pod requests accelerators.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from pipetransformer_contract.api.job import JobSpec
from pipetransformer_operator.plan import layouts
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.rules.attempts import recently_not_committed
from pipetransformer_operator.plan.types import Observed


@dataclass(frozen=True, slots=True)
class PendingPod:
    """A pod of another owner that has no node.

    Attributes:
        uid: uid of the pod.
        priority: number of its PriorityClass.
        requests: how much the pod requests of each resource that nodes lack, according to the scheduler.
        missing_by_node: for a pod that lacks one resource: how much of it each node lacks for the pod, by node. Only
            nodes that could take the pod. None if the pod lacks several resources.
    """

    uid: str
    priority: int
    requests: Mapping[str, int]
    missing_by_node: Mapping[str, int] | None = None

    @property
    def has_room(self) -> bool:
        """Whether a node would take the pod now."""
        return self.missing_by_node is not None and any(lacking <= 0 for lacking in self.missing_by_node.values())

    def may_take(self, claim: "Claims") -> bool:
        """Whether these claimed workers use a resource that the pod lacks, and have a lower priority."""
        return claim.priority < self.priority and claim.resource in self.requests


@dataclass(frozen=True, slots=True)
class Claims:
    """Claimed workers of a training job.

    Attributes:
        key: key of the job. The order of keys decides between equals.
        layout_generation: generation of its present layout.
        resource: accelerator resource. Each worker of the job holds one of it.
        priority: priority of the pods of its claimed workers.
        workers: number of members, claimed or not.
        next_smaller: workers of the next smaller layout. None if that is below the starting size, or if the workers
            recently failed to commit it.
        settled: the job's layout is not changing, and none of its workers is leaving.
        smallest: workers of the smallest layout that keeps the starting size.
        claimed_by_node: number of claimed workers, by node.
    """

    key: str
    layout_generation: int
    resource: str
    priority: int
    workers: int
    next_smaller: int | None
    settled: bool
    smallest: int = 0
    claimed_by_node: Mapping[str, int] = field(default_factory=dict)

    @property
    def able(self) -> bool:
        """Whether the job can release a pipeline now."""
        return self.next_smaller is not None and self.settled

    def frees(self, node: str) -> int:
        """How many claimed workers the job could release on this node."""
        return min(self.claimed_by_node.get(node, 0), self.workers - self.smallest)


def claims_of(spec: JobSpec, observed: Observed, now: datetime) -> Claims | None:
    """The claimed workers of a job; None if it does not train, or does not use accelerators."""
    draft = Draft(spec, observed, now)
    status = draft.status
    if status.generation is None or not draft.view.active or not spec.accelerator_resource:
        return None
    members = draft.view.member_names
    claimed = draft.view.claimed
    base = len(members - claimed.names)
    next_smaller = _next_smaller(draft, len(members), base)
    return Claims(
        key=f"{observed.namespace}/{observed.name}",
        layout_generation=status.layout_generation,
        resource=spec.accelerator_resource,
        priority=claimed.highest_priority(0),
        workers=len(members),
        next_smaller=next_smaller,
        settled=status.resize is None and _all_stay(draft),
        smallest=len(members) if next_smaller is None else _smallest(draft, next_smaller, base),
        claimed_by_node=Counter(worker.node for worker in claimed if worker.name in members and worker.node),
    )


def _all_stay(draft: Draft) -> bool:
    """Whether no worker of the job is leaving, except on lost nodes."""
    staying = draft.view.wanted.alive.ids
    return not draft.view.workers.without(staying).that(lambda worker: not worker.node_lost)


def _next_smaller(draft: Draft, workers: int, base: int) -> int | None:
    """Workers of the next smaller layout than `workers`; None if it is below `base`, or recently was not committed."""
    layout = layouts.best(draft.view, workers - 1)
    if layout is None or layout.workers < base or recently_not_committed(draft.view, layout):
        return None
    return layout.workers


def _smallest(draft: Draft, workers: int, base: int) -> int:
    """Workers of the smallest layout with at least `base` workers, from `workers` down."""
    while (layout := layouts.best(draft.view, workers - 1)) is not None and layout.workers >= base:
        workers = layout.workers
    return workers


@dataclass(frozen=True, slots=True)
class Release:
    """The decision that one job releases a pipeline for a pod. Workers on `node` leave first; empty for any node."""

    pod: PendingPod
    claim: Claims
    node: str = ""


def choose_claim(waiting: Sequence[PendingPod], claims: Sequence[Claims], given: Mapping[str, int]) -> Release | None:
    """Chooses which job releases a pipeline next; None if none has to, or none can.

    Args:
        waiting: pods of other owners that have no node.
        claims: claimed workers of all jobs.
        given: how many workers jobs were already told to release for a pod, by UID of the pod.
    """
    for pod in sorted(waiting, key=lambda pod: (-pod.priority, pod.uid)):
        lower = [claim for claim in claims if pod.may_take(claim)]
        choose = _anywhere if pod.missing_by_node is None else _on_a_node
        found = choose(pod, lower, given.get(pod.uid, 0))
        if found is not None:
            return found
    return None


def _anywhere(pod: PendingPod, lower: Sequence[Claims], given: int) -> Release | None:
    wanted = max((pod.requests[claim.resource] for claim in lower), default=0)
    return _least_important(pod, lower) if given < wanted else None


def _on_a_node(pod: PendingPod, lower: Sequence[Claims], given: int) -> Release | None:
    assert pod.missing_by_node is not None
    node = "" if pod.has_room else _cheapest(pod.missing_by_node, lower)
    return _least_important(pod, [claim for claim in lower if claim.frees(node)], node) if node else None


def _least_important(pod: PendingPod, claims: Sequence[Claims], node: str = "") -> Release | None:
    able = [claim for claim in claims if claim.able]
    first = min(able, key=lambda claim: (claim.priority, -claim.workers, claim.key), default=None)
    return Release(pod, first, node) if first is not None else None


def _cheapest(places: Mapping[str, int], claims: Sequence[Claims]) -> str:
    """The node where the fewest workers must leave until the pod fits. Empty if claimed workers cannot make room."""
    enough = [node for node, lacking in places.items() if sum(claim.frees(node) for claim in claims) >= lacking]
    return min(enough, key=lambda node: (places[node], node), default="")
