"""Who gives way to pods of other owners that wait for accelerators: the opt-in that the cluster's operator switches on.

A claimed pipeline goes, never one of a job's starting size, and one at a time. It goes for a node: claimed workers
of the node leave where the pod fits by that. If it fits nowhere, none leaves. For a pod that lacks several resources
nodes do not tell; there as many workers go as it wants accelerators, and no more.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from pipetransformer_contract.api.job import JobSpec
from pipetransformer_operator.plan import layouts
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.rules.prepare import snoozed
from pipetransformer_operator.plan.types import Observed


@dataclass(frozen=True, slots=True)
class Waiting:
    """A pod of somebody else that has no node.

    Attributes:
        uid: of the pod.
        priority: the number that the cluster made of its PriorityClass.
        lacks: how many it wants of each resource that the scheduler says there is too little of.
        places: nodes that would take it, and how many of the one resource each of them lacks; None where that does not
            tell.
    """

    uid: str
    priority: int
    lacks: Mapping[str, int]
    places: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Claims:
    """What a job that trains has beyond its starting size.

    Attributes:
        key: of the job; the order of keys decides between equals.
        layout_generation: of the layout that it has.
        resource: that each of its workers has one of.
        priority: of its claimed workers.
        workers: that it has in all.
        fewer: workers of the next smaller layout; None if that would take some of the starting size, or is slept over.
        settled: its layout does not change now, and nothing of it is on its way out.
        least: workers of the smallest layout that takes none of the starting size.
        on: claimed workers by node.
    """

    key: str
    layout_generation: int
    resource: str
    priority: int
    workers: int
    fewer: int | None
    settled: bool
    least: int = 0
    on: Mapping[str, int] = field(default_factory=dict)

    def frees(self, node: str) -> int:
        """Workers that the job can give up on that node."""
        return min(self.on.get(node, 0), self.workers - self.least)


def claims_of(spec: JobSpec, observed: Observed, now: datetime) -> Claims | None:
    """What the job could give up; None if it does not train, or not on accelerators."""
    draft = Draft(spec, observed, now)
    generation, status = draft.status.generation, draft.status
    if generation is None or status.finished or not spec.managed or draft.view.stopped or not spec.accelerator_resource:
        return None
    claimed_ids = set(status.claimed_ids)
    claimed = [worker for worker in draft.view.wanted if worker.id in claimed_ids]
    members = {member.name for member in generation.members}
    base = len(members - {worker.name for worker in claimed})
    layout = layouts.best(draft.view, len(members) - 1)
    wanted = set(status.worker_ids)
    stays = all(worker.node_lost or (worker.alive and worker.id in wanted) for worker in observed.workers)
    possible = layout is not None and layout.workers >= base and not snoozed(draft.view, layout)
    return Claims(
        key=f"{observed.namespace}/{observed.name}",
        layout_generation=status.layout_generation,
        resource=spec.accelerator_resource,
        priority=max((worker.priority for worker in claimed), default=0),
        workers=len(members),
        fewer=layout.workers if layout is not None and possible else None,
        settled=generation.confirmed and status.resize is None and stays,
        least=_least(draft, len(members), base) if possible else len(members),
        on=Counter(worker.node for worker in claimed if worker.name in members and worker.node),
    )


def _least(draft: Draft, workers: int, base: int) -> int:
    """Workers of the smallest layout that is reached without those of the starting size."""
    while (layout := layouts.best(draft.view, workers - 1)) is not None and layout.workers >= base:
        workers = layout.workers
    return workers


@dataclass(frozen=True, slots=True)
class Choice:
    """For which pod which job gives up a pipeline, and on which node its workers go first; empty for any."""

    pod: Waiting
    claim: Claims
    node: str = ""


def choose_claim(waiting: Sequence[Waiting], claims: Sequence[Claims], given: Mapping[str, int]) -> Choice | None:
    """Which job gives up a pipeline next; None if nobody needs to, or can.

    Args:
        waiting: pods of others.
        claims: of all jobs.
        given: workers that were asked for already, by the UID of the pod that waits.
    """
    for pod in sorted(waiting, key=lambda pod: (-pod.priority, pod.uid)):
        lower = [claim for claim in claims if claim.priority < pod.priority and claim.resource in pod.lacks]
        node = ""
        if pod.places is not None:
            node = _cheapest(pod.places, lower)
            lower = [claim for claim in lower if node and claim.frees(node)]
        elif lower and given.get(pod.uid, 0) >= max(pod.lacks[claim.resource] for claim in lower):
            continue
        able = [claim for claim in lower if claim.fewer is not None and claim.settled]
        if able:
            return Choice(pod, min(able, key=lambda claim: (claim.priority, -claim.workers, claim.key)), node)
    return None


def _cheapest(places: Mapping[str, int], claims: Sequence[Claims]) -> str:
    """The node where the fewest workers have to go until the pod fits; empty where none can be freed so far, or one has
    room already."""
    if any(lacking <= 0 for lacking in places.values()):
        return ""
    enough = [node for node, lacking in places.items() if sum(claim.frees(node) for claim in claims) >= lacking]
    return min(enough, key=lambda node: (places[node], node), default="")
