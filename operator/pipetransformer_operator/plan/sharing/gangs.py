"""Which waiting job starts first where several hold parts of what each needs whole: the others give way to it.

A start needs all of its workers. Where two jobs hold half each, neither begins, and no third job can use what they
hold. So all starts that cannot complete are looked at together, pool by pool: what they hold goes to the first of them
that it is enough for, by priority and then by age. The others hold nothing until that one has all of its workers.

No job gives way to one of lower priority: the scheduler would take the accelerators back by preemption. A job that
others gave way to, and that found no nodes all the same, is not preferred again for a while (`share.note_vain`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from pipetransformer_contract.api.job import JobSpec
from pipetransformer_operator.plan import layouts
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.rules.prepare import all_scheduled, can_start
from pipetransformer_operator.plan.types import Observed

from . import share
from .demand import PATIENCE, pool_of

#: How `Worker.waiting` begins where the scheduler found no node for its pod.
UNSCHEDULABLE = "Unschedulable"
#: A registry may answer at its next try.
PATIENCE_WITH_CONTAINERS = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Gang:
    """A start that is not complete.

    Attributes:
        key: namespace and name of the job.
        pool: what its workers run on, as `Demand.pool`.
        needs: workers of the layout that it starts with.
        holds: pods with a node that have not ended, those included that were told to.
        priority: of its pods.
        since: when the job first asked for its workers.
        competes: the scheduler has pods of it that it finds no node for, and gives them what others release.
        eligible: more nodes are all that it lacks, as far as anything is known.
        granted: jobs that train make room for all of it.
        fresh: it may complete by itself soon, so it gives way to none.
    """

    key: str
    pool: tuple[str, str]
    needs: int
    holds: int
    priority: int
    since: datetime
    competes: bool
    eligible: bool
    granted: bool = False
    fresh: bool = False


def gang_of(spec: JobSpec, observed: Observed, now: datetime) -> Gang | None:
    """The job's start, if it is not complete; None if the job trains, has ended, waits for its queue, or has all its
    workers."""
    draft = Draft(spec, observed, now)
    status, layout = draft.status, layouts.starting(draft.view)
    if not spec.managed or draft.view.stopped or status.finished or draft.view.spec_errors:
        return None
    if status.generation is not None or status.start_time is None or layout is None:
        return None
    if observed.queue is not None and not any(one.admitted for one in status.quota_requests):
        return None
    lacks_nodes = any(not one.scheduled and one.waiting.startswith(UNSCHEDULABLE) for one in draft.view.joiners)
    refused = bool(observed.refusal) and len(draft.view.joiners) < len(draft.view.joining_ids)
    fresh = False
    if status.resize is None:
        eligible = not draft.view.asleep or status.waits_for_nodes_since is not None
    elif draft.view.joining_ids and all_scheduled(draft.view) and can_start(draft.view):
        return None
    else:
        fresh = _may_complete(draft, lacks_nodes=lacks_nodes, refused=refused)
        eligible = lacks_nodes and can_start(draft.view)
    granted = status.share is not None and not status.share.yields and status.share.workers >= layout.workers
    return Gang(
        key=f"{observed.namespace}/{observed.name}",
        pool=pool_of(spec, observed.namespace),
        needs=layout.workers,
        holds=sum(worker.scheduled and worker.holds for worker in observed.workers),
        priority=max((worker.priority for worker in draft.view.wanted), default=status.priority),
        since=status.start_time,
        competes=lacks_nodes,
        eligible=eligible and not refused and not share.sits_out(draft),
        granted=granted,
        fresh=fresh,
    )


def _may_complete(draft: Draft, *, lacks_nodes: bool, refused: bool) -> bool:
    """Whether an attempt to start is not known to be stuck: the scheduler and registries need a moment."""
    resize = draft.status.resize
    if draft.view.asleep or resize is None or resize.trouble_time is None:
        return True
    if not (lacks_nodes or refused or not can_start(draft.view)):
        return True
    patience = PATIENCE if lacks_nodes else PATIENCE_WITH_CONTAINERS
    return draft.now < max(resize.start_time, resize.trouble_time) + patience


def prefer(gangs: Sequence[Gang], before: Iterable[str] = ()) -> dict[str, str]:
    """Which gangs give way, each with the key of the one that it gives way to.

    Args:
        gangs: all starts that are not complete.
        before: keys of those that others gave way to at the last look. They stay preferred until they have all their
            workers: what is released for them is not held by anybody for a moment.
    """
    known = frozenset(before)
    pools: dict[tuple[str, str], list[Gang]] = {}
    for gang in gangs:
        pools.setdefault(gang.pool, []).append(gang)
    return {key: to for pool in pools.values() for key, to in _prefer_in(pool, known).items()}


def _prefer_in(pool: Sequence[Gang], before: frozenset[str]) -> dict[str, str]:
    order = sorted(pool, key=lambda gang: (-gang.priority, gang.since, gang.key))
    preferred = [gang for gang in order if gang.key in before and (gang.eligible or gang.fresh)]
    taken = sum(gang.needs for gang in preferred)
    # The scheduler gives what is released to the pods of the highest priority, whoever it was released for.
    least = max((gang.priority for gang in pool if gang.competes and not gang.fresh), default=None)
    for gang in order:
        if gang in preferred or gang.fresh or not gang.eligible or (least is not None and gang.priority < least):
            continue
        reach = sum(other.holds for other in pool if other.priority <= gang.priority and not other.fresh) - taken
        if gang.granted or gang.needs <= reach:
            preferred.append(gang)
            taken += gang.needs
    found = {}
    for gang in order:
        first = next((one for one in preferred if one.priority >= gang.priority), None)
        if first is not None and gang not in preferred and not gang.fresh:
            found[gang.key] = first.key
    return found
