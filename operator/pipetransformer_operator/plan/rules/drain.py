"""Replaces workers on nodes that are being emptied, and says how many workers evictions have to leave.

The signal is a cordon, or the taint of an autoscaler. Evictions are refused at first, so the workers are replaced
before they leave, however many pipelines there are. Replacements that are warm in time take their places; if none is,
all are given back and tried again. Past the drain's deadline evictions pass: an evicted worker leaves a checkpoint.
"""

from collections.abc import Sequence
from datetime import timedelta

from pipetransformer_contract.api.status import Drain, Reason
from pipetransformer_contract.messages import ResizeReason
from pipetransformer_operator.plan import generations, workforce
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.members import parted
from pipetransformer_operator.plan.types import Worker
from pipetransformer_operator.plan.view import View

from . import undeleted
from .prepare import begin, cancel, enter, is_late, try_at_once, why_not_ready


def replace(draft: Draft) -> bool:
    """Publishes the same layout without the workers that have to move, or prepares that. Returns whether it did."""
    generation = draft.status.generation
    assert generation is not None
    cordoned = draft.view.wanted.draining.names
    going, staying = parted(generation.members, cordoned)
    if not going:
        _give_up_replacements(draft)
        return False
    if draft.view.sleeps() or undeleted.leaks(draft):
        return False
    begin(draft, ResizeReason.DRAIN)
    _, fresh = parted(draft.view.ready_joiners, cordoned)  # joiners may land there again
    late = is_late(draft)
    pairs = _pairs(draft.view, draft.view.ids_of(going), draft.view.ids_of(fresh))
    if len(pairs) == len(going) or (pairs and late):
        replaced, replacing = (draft.view.names_of(ids) for ids in zip(*pairs, strict=True))
        joining, _ = parted(fresh, replacing)
        leaving, kept = parted(going, replaced)
        generations.publish(draft, generation.layout, [*staying, *joining, *kept, *leaving], ResizeReason.DRAIN)
        try_at_once(draft)
        return True
    if late:
        cancel(draft, *why_not_ready(draft.view))
        return False
    moving = draft.view.ids_of(going)
    joiners = sorted(new for _, new in _pairs(draft.view, moving, draft.view.joining_ids))
    workforce.want(draft, [*draft.view.ids_of(staying), *joiners], len(generation.members), moving)
    enter(draft, generation.layout, ResizeReason.DRAIN)
    return True


def _give_up_replacements(draft: Draft) -> None:
    """Drops replacements of workers that no longer have to move. They have the priority and quota of the starting size,
    which a claim must not have."""
    claimed = draft.view.claimed_ids
    base = len(set(draft.view.ids_of(draft.view.members)) - claimed)
    joining = [key for key in draft.view.joining_ids if key not in claimed]
    if surplus := joining[max(0, draft.status.initial_workers - base) :]:
        draft.keep_workers(draft.view.wanted_ids - set(surplus), "the node that it was to replace a worker of is back")


def _pairs(view: View, going: Sequence[int], joining: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of a worker that goes and the one that takes its place. A claimed worker never replaces one of the starting
    size, because it would stay one for good."""
    claimed = view.claimed_ids
    base = [key for key in joining if key not in claimed]
    claims = [key for key in joining if key in claimed]
    pairs = []
    for old in sorted(going, key=lambda key: key in claimed):
        pool = claims if old in claimed and claims else base
        if pool:
            pairs.append((old, pool.pop(0)))
    return pairs


def limit(draft: Draft) -> None:
    """Sets how many workers evictions must leave.

    Where drains are seen that is all of them, because workers on a cordoned node are replaced first. Past a drain's
    deadline, or where drains are not seen, it is one less: otherwise no eviction would ever pass. Before the first
    layout and while a job waits for a start any worker may go, because none holds state.
    Workers that do not run yet count too, because the cluster counts them once they run. Past a drain's deadline they
    do not, and neither do workers whose pods are not ready although they may train: the cluster never counts those, so
    it would refuse every eviction.
    """
    if draft.status.layout_generation == 0:
        return
    _set_deadline(draft)
    if draft.status.generation is None:
        draft.min_available = 0
        return
    deadline = draft.status.drain_deadline
    overdue = deadline is not None and draft.clock.reached(deadline)
    draft.keeps_unready = draft.observed.sees_drains and not overdue
    draft.min_available = max(0, _present(draft.view, overdue=overdue) - (not draft.keeps_unready))


def _present(view: View, *, overdue: bool) -> int:
    """How many wanted workers evictions have to count: past a drain's deadline those that run."""
    counted = view.wanted.running.ids if overdue else view.wanted_ids
    return len(counted - view.workers.ended.ids)


def _set_deadline(draft: Draft) -> None:
    """Sets until when evictions are refused.

    The time counts from the newest cordon whose workers are still there, whatever the job is busy with. It ends at the
    latest two times that long after the oldest cordon: nodes that are cordoned one after the other must not keep the
    first from being emptied. Joiners do not count, because they hold no state. A leaver's cordon renews nothing.
    """
    going = draft.view.wanted.moving.without(frozenset(draft.view.joining_ids))
    if not going:
        draft.update(drain_deadline=None, drains=[])
        return
    ids = going.ids
    drains = [drain.among(ids) for drain in draft.status.drains if ids & set(drain.worker_ids)]
    known = {key for drain in drains for key in drain.worker_ids}
    new = going.without(known)
    added = Drain(time=draft.now, worker_ids=sorted(ids - known))
    if not drains or draft.view.member_names & new.names:
        drains.append(added)
        try_at_once(draft)
        draft.clock.wake_at(draft.now)
        _tell_drain(draft, new)
    else:
        drains[-1] = drains[-1].joined_by(added)
    timeout = timedelta(seconds=draft.spec.run_policy.drain_timeout_seconds)
    draft.update(drains=drains, drain_deadline=min(drains[-1].time + timeout, drains[0].time + 2 * timeout))


def _tell_drain(draft: Draft, new: Sequence[Worker]) -> None:
    names = ", ".join(f"{worker.name} ({worker.drain_reason or 'cordoned'})" for worker in new[:8])
    draft.tell(Reason.WORKERS_DRAINING, f"Nodes of {len(new)} workers are emptied, or not well: {names}")
