"""Decides which waiting job starts first if several jobs hold only some of their workers. The other jobs give way.

A start needs all of its workers. If two jobs hold half of the accelerators each, neither can start. So the operator
sorts all incomplete starts of a pool by priority, and then by age. It prefers the first job that can start with the
accelerators that it and the less important jobs hold. The others release theirs, and wait until it has all its workers.
No job gives way to one of lower priority, because its own pods would preempt that job's pods later. If a preferred job
finds no nodes all the same, no job makes room for it for a while (`share.note_no_nodes`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from pipetransformer_contract.api.job import JobSpec
from pipetransformer_contract.layout import Layout
from pipetransformer_operator.plan import layouts
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.rules import share
from pipetransformer_operator.plan.types import Observed

from .allocate import Pool, by_pool
from .demand import PATIENCE, pool_of

#: `Worker.why_pending` begins with this if the scheduler found no node for the pod.
UNSCHEDULABLE = "Unschedulable"
#: How long a start may still complete although containers do not start: a registry may answer at the next attempt.
PATIENCE_WITH_CONTAINERS = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Gang:
    """A job whose start is not complete, because some workers have no node or cannot start.

    Attributes:
        key: namespace and name of the job.
        pool: resource and placement of its workers, like `Demand.pool`.
        needs: workers of the starting layout.
        holds: number of pods with a node that have not ended, including pods that were told to end.
        priority: priority of its pods.
        since: when the job first asked for its workers.
        competes: the scheduler finds no node for some of the job's pods, and gives them nodes that other pods release.
        eligible: as far as the operator knows, only missing nodes hold up the start.
        room_is_made: training jobs make room for all of its workers.
        fresh: the start may still complete without help, so the job gives way to no other.
    """

    key: str
    pool: Pool
    needs: int
    holds: int
    priority: int
    since: datetime
    competes: bool
    eligible: bool
    room_is_made: bool = False
    fresh: bool = False

    @property
    def keeps_preference(self) -> bool:
        """Whether the job stays preferred if it was preferred before."""
        return self.eligible or self.fresh

    @property
    def contends(self) -> bool:
        """Whether the job's pods compete for nodes that other pods release."""
        return self.competes and not self.fresh

    @property
    def may_be_preferred(self) -> bool:
        """Whether other jobs may begin to give way to this job."""
        return self.eligible and not self.fresh


def gang_of(spec: JobSpec, observed: Observed, now: datetime) -> Gang | None:
    """The incomplete start of a job. None if the job trains, has ended, waits for its queue, or has all its workers."""
    draft = Draft(spec, observed, now)
    layout, since = layouts.starting(draft.view), draft.status.start_time
    if layout is None or since is None or not _is_starting(draft):
        return None
    if draft.view.start_complete:
        return None
    attempt = _Attempt.of(draft)
    return Gang(
        key=f"{observed.namespace}/{observed.name}",
        pool=pool_of(spec, observed.namespace),
        needs=layout.workers,
        holds=len(draft.view.workers.placed.holding),
        priority=draft.view.wanted.highest_priority(draft.status.priority),
        since=since,
        competes=attempt.lacks_nodes,
        eligible=_is_eligible(draft, attempt),
        room_is_made=_is_room_made(draft, layout),
        fresh=_is_fresh(draft, attempt),
    )


class _Attempt(NamedTuple):
    """What holds up the present attempt to start."""

    lacks_nodes: bool  #: the scheduler finds no node for some of its pods
    refused: bool  #: the cluster refuses to create some of its pods

    @classmethod
    def of(cls, draft: Draft) -> "_Attempt":
        unplaced = draft.view.joiners.unplaced
        lacks_nodes = any(worker.why_pending.startswith(UNSCHEDULABLE) for worker in unplaced)
        return cls(lacks_nodes, share.is_refused(draft))


def _is_starting(draft: Draft) -> bool:
    return draft.status.generation is None and share.takes_part(draft) and share.has_quota(draft)


def _is_eligible(draft: Draft, attempt: _Attempt) -> bool:
    if attempt.refused or share.sits_out(draft):
        return False
    if draft.status.resize is not None:
        return attempt.lacks_nodes and draft.view.joiners_startable
    return not draft.view.asleep or draft.status.waits_for_nodes_since is not None


def _is_room_made(draft: Draft, layout: Layout) -> bool:
    share_workers = draft.view.share_workers
    return share_workers is not None and share_workers >= layout.workers


def _is_fresh(draft: Draft, attempt: _Attempt) -> bool:
    """Whether the present attempt to start may still complete: the scheduler and registries need a moment."""
    resize = draft.status.resize
    if resize is None:
        return False
    held_up = attempt.lacks_nodes or attempt.refused or not draft.view.joiners_startable
    if draft.view.asleep or resize.trouble_time is None or not held_up:
        return True
    patience = PATIENCE if attempt.lacks_nodes else PATIENCE_WITH_CONTAINERS
    return draft.now < max(resize.start_time, resize.trouble_time) + patience


def prefer(gangs: Sequence[Gang], before: Iterable[str]) -> dict[str, str]:
    """Which jobs give way: maps the key of each of them to the key of the job that it gives way to.

    Args:
        gangs: all starts that are not complete.
        before: keys of the jobs that were preferred at the last call. They stay preferred until they have all their
            workers, because for a moment no job holds the accelerators that were released for them.
    """
    known = frozenset(before)
    return {key: to for pool in by_pool(gangs) for key, to in _prefer_in(pool, known).items()}


def _prefer_in(pool: Sequence[Gang], before: frozenset[str]) -> dict[str, str]:
    order = sorted(pool, key=lambda gang: (-gang.priority, gang.since, gang.key))
    preferred = [gang for gang in order if gang.key in before and gang.keeps_preference]
    # The scheduler gives released nodes to pending pods of the highest priority, even if they were released for others.
    least = max((gang.priority for gang in pool if gang.contends), default=-math.inf)
    candidates = [gang for gang in order if gang.may_be_preferred and gang.priority >= least]
    for gang in candidates:
        if gang not in preferred and _can_complete(gang, pool, preferred):
            preferred.append(gang)
    return _give_way(order, preferred)


def _can_complete(gang: Gang, pool: Sequence[Gang], preferred: Sequence[Gang]) -> bool:
    """Whether the gang gets all its workers if other gangs give way, after what already preferred gangs need."""
    return gang.room_is_made or gang.needs <= _reach(gang, pool) - sum(one.needs for one in preferred)


def _give_way(order: Sequence[Gang], preferred: Sequence[Gang]) -> dict[str, str]:
    """Maps each gang that gives way to the first preferred gang of the same or a higher priority, by their keys."""
    others = [gang for gang in order if gang not in preferred and not gang.fresh]
    chosen = {gang.key: _first(preferred, gang.priority) for gang in others}
    return {key: first.key for key, first in chosen.items() if first is not None}


def _reach(gang: Gang, pool: Sequence[Gang]) -> int:
    """How many workers gangs of the same or a lower priority hold. Together with its own, this gang could use them."""
    return sum(other.holds for other in pool if other.priority <= gang.priority and not other.fresh)


def _first(preferred: Sequence[Gang], priority: int) -> Gang | None:
    return next((gang for gang in preferred if gang.priority >= priority), None)
