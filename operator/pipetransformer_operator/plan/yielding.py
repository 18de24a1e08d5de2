"""Who gives way to pods of other owners that wait for accelerators: the opt-in that the cluster's operator switches on.

A claimed pipeline goes, never one of a job's starting size, and one at a time. Whether what it frees fits the pod that
waits, nobody knows before the scheduler tried, so for each pod only as many workers are asked for as it wants
accelerators: one that can never run strips nobody of more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from ..api.job import JobSpec
from . import layouts
from .draft import Draft
from .prepare import snoozed
from .types import Observed


@dataclass(frozen=True, slots=True)
class Waiting:
    """A pod of somebody else that has no node.

    Attributes:
        uid: of the pod.
        priority: the number that the cluster made of its PriorityClass.
        lacks: how many it wants of each resource that the scheduler says there is too little of.
    """

    uid: str
    priority: int
    lacks: Mapping[str, int]


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
    """

    key: str
    layout_generation: int
    resource: str
    priority: int
    workers: int
    fewer: int | None
    settled: bool


def claims_of(spec: JobSpec, observed: Observed, now: datetime) -> Claims | None:
    """What the job could give up; None if it does not train, or not on accelerators."""
    draft = Draft(spec, observed, now)
    plan, status = draft.status.plan, draft.status
    if plan is None or status.finished or not spec.managed or draft.stopped or not spec.accelerator_resource:
        return None
    claimed_ids = set(status.claimed_ids)
    claimed = [worker for worker in draft.wanted if worker.id in claimed_ids]
    members = {member.name for member in plan.members}
    base = len(members - {worker.name for worker in claimed})
    layout = layouts.best(draft, len(members) - 1)
    wanted = set(status.worker_ids)
    stays = all(worker.node_lost or (worker.alive and worker.id in wanted) for worker in observed.workers)
    possible = layout is not None and layout.workers >= base and not snoozed(draft, layout)
    return Claims(
        key=f"{observed.namespace}/{observed.name}",
        layout_generation=status.layout_generation,
        resource=spec.accelerator_resource,
        priority=max((worker.priority for worker in claimed), default=0),
        workers=len(members),
        fewer=layout.workers if layout is not None and possible else None,
        settled=plan.confirmed and status.resize is None and stays,
    )


def choose_claim(
    waiting: Sequence[Waiting], claims: Sequence[Claims], given: Mapping[str, int]
) -> tuple[Waiting, Claims] | None:
    """For whom which job gives up a pipeline; None if nobody needs to, or can.

    Args:
        waiting: pods of others.
        claims: of all jobs.
        given: workers that were asked for already, by the UID of the pod that waits.
    """
    for pod in sorted(waiting, key=lambda pod: (-pod.priority, pod.uid)):
        able = [
            claim
            for claim in claims
            if claim.fewer is not None
            and claim.settled
            and claim.priority < pod.priority
            and given.get(pod.uid, 0) < pod.lacks.get(claim.resource, 0)
        ]
        if able:
            return pod, min(able, key=lambda claim: (claim.priority, -claim.workers, claim.key))
    return None
