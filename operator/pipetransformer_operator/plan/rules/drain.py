"""Replaces workers on nodes that are being drained, and sets how many workers evictions must leave.

The signal is a cordon, or the taint of an autoscaler. At first the job's PodDisruptionBudget refuses to evict workers
of the starting size, so that replacements can warm up. Replacements that are warm in time take the places of workers on
the drained nodes. If none is warm, the job releases all replacements and tries again later. After the drain's deadline
the budget allows evictions, and an evicted worker writes a checkpoint before it ends.
"""

from collections.abc import Sequence
from datetime import timedelta

from pipetransformer_contract.api.status import Drain, Reason
from pipetransformer_contract.messages import ResizeReason
from pipetransformer_operator.plan import generations, workforce
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.members import parted
from pipetransformer_operator.plan.types import NO_DISRUPTION_BUDGET, DisruptionBudget, Worker
from pipetransformer_operator.plan.view import View

from . import undeleted
from .attempts import try_at_once
from .prepare import cancel, end_other_preparation, enter, is_late
from .readiness import why_not_ready


def replace(draft: Draft) -> bool:
    """Publishes the same layout without the workers on drained nodes, or prepares their replacements.

    Returns whether it did either."""
    # Which members must leave their nodes.
    generation = draft.view.generation
    cordoned = draft.view.wanted.draining.names
    going, staying = parted(generation.members, cordoned)
    if not going:
        _release_replacements(draft)
        return False
    if draft.view.asleep_and_wakes() or undeleted.leaks(draft):
        return False
    # Warm replacements take the places of all members that leave; after the deadline, of as many as they can.
    end_other_preparation(draft, ResizeReason.DRAIN)
    _, fresh = parted(draft.view.ready_joiners, cordoned)  # a joiner may also be on a drained node
    late = is_late(draft)
    pairs = _pairs(draft.view, draft.view.ids_of(going), draft.view.ids_of(fresh))
    if len(pairs) == len(going) or (pairs and late):
        replaced, replacing = (draft.view.names_of(ids) for ids in zip(*pairs, strict=True))
        joining, _ = parted(fresh, replacing)
        leaving, kept = parted(going, replaced)
        generations.publish(draft, generation.layout, [*staying, *joining, *kept, *leaving], ResizeReason.DRAIN)
        try_at_once(draft)
        return True
    # Without a warm replacement the attempt ends at its deadline.
    if late:
        cancel(draft, *why_not_ready(draft.view))
        return False
    # Until then the job keeps the members that leave, and wants a replacement for each.
    moving = draft.view.ids_of(going)
    joiners = sorted(new for _, new in _pairs(draft.view, moving, draft.view.joining_ids))
    workforce.want(draft, [*draft.view.ids_of(staying), *joiners], len(generation.members), moving)
    enter(draft, generation.layout, ResizeReason.DRAIN)
    return True


def _release_replacements(draft: Draft) -> None:
    """Deletes replacements that are no longer needed, because the drained nodes accept pods again.

    They cannot stay as claims, because they have the priority and quota of the starting size."""
    claimed = draft.view.claimed_ids
    base = len(set(draft.view.ids_of(draft.view.members)) - claimed)
    joining = [key for key in draft.view.joining_ids if key not in claimed]
    surplus = joining[max(0, draft.status.initial_workers - base) :]
    draft.keep_workers(draft.view.wanted_ids - set(surplus), "the node of the replaced worker accepts pods again")


def _pairs(view: View, going: Sequence[int], joining: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of ids: a worker that leaves, and the joiner that takes its place.

    A claimed worker never replaces one of the starting size, because its priority and quota cannot change."""
    claimed = view.claimed_ids
    base = [key for key in joining if key not in claimed]
    claims = [key for key in joining if key in claimed]
    pairs = []
    for old in sorted(going, key=lambda key: key in claimed):
        pool = claims if old in claimed and claims else base
        if pool:
            pairs.append((old, pool.pop(0)))
    return pairs


def set_disruption_budget(draft: Draft) -> None:
    """Sets how many workers evictions must leave (the PodDisruptionBudget).

    It covers claimed workers only while these are needed. If it always did, the scheduler would preempt other pods
    before it preempts claimed workers, although these have a lower priority.

    If the operator sees drains, no covered worker may go, because the operator replaces workers on a cordoned node
    first. One may go after a drain's deadline, or if the operator sees no drains. Otherwise no eviction would ever
    succeed. While a job waits for a start, evictions may remove any worker, because none holds state.

    Workers that do not run yet count too, because the cluster counts them once they run. After a drain's deadline only
    running workers count. The budget then also stops protecting pods that are not ready: the cluster never counts such
    pods, so it would refuse every eviction.
    """
    if draft.status.layout_generation == 0:
        return
    _set_deadline(draft)
    if draft.status.generation is None:
        draft.disruption_budget = NO_DISRUPTION_BUDGET
        return
    view, deadline = draft.view, draft.status.drain_deadline
    overdue = deadline is not None and draft.clock.reached(deadline)
    strict = view.observed.sees_drains and not overdue
    claimed = _needs_claims(view)
    counted = view.wanted.running.ids if overdue else view.wanted_ids
    counted -= view.workers.ended.ids if claimed else view.workers.ended.ids | view.claimed_ids
    draft.disruption_budget = DisruptionBudget(max(0, len(counted) - (not strict)), claimed=claimed, unready=strict)


def _needs_claims(view: View) -> bool:
    """Whether the workers of the starting size may lack a stage that claimed workers hold.

    They hold all stages when a claim joins. That may change once one of them is lost, because its replacement may get
    another stage. The operator knows no stages, but it knows the order: such a replacement is newer than the claim.
    """
    base = set(view.ids_of(view.living(view.members))) - view.claimed_ids
    needed = min(view.status.initial_workers, view.generation.layout.workers)
    return len(base) < needed or any(claim < max(base) for claim in view.claimed_ids)


def _set_deadline(draft: Draft) -> None:
    """Sets until when the PodDisruptionBudget refuses evictions: the drain's deadline.

    It is `drainTimeoutSeconds` after the newest cordon of a node that still has workers. It is never later than twice
    that time after the oldest cordon. Otherwise an administrator who cordons one node after the other could never drain
    the first. Joiners do not count, because they hold no state. A cordon of a leaver's node does not extend the time.
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
    draft.tell(Reason.WORKERS_DRAINING, f"Workers on nodes that are drained or unhealthy ({len(new)}): {names}")
