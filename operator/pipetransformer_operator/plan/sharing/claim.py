"""Which larger layout a job tries next.

Up to its starting size a job takes back at once what it lost. Beyond that it claims. With `claimFrom: Idle` it claims
as many workers as nodes have room for now, and withdraws what another pod was quicker to take. With `Autoscaler`, and
where there is no bound, a claim is tried, not computed: one pipeline's workers, and see if they run. While room is made
for another job it tries nothing beyond its share, and withdraws what it has begun.
"""

import heapq
from datetime import timedelta

from pipetransformer_contract.api.job import ClaimFrom
from pipetransformer_contract.choose import Layout
from pipetransformer_contract.messages import ResizeReason
from pipetransformer_operator.plan import layouts
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.rules import undeleted

from . import share

#: Between two attempts to start where nodes have too little room each time.
LONGEST_WAIT = timedelta(days=1)


def target(draft: Draft) -> Layout:
    """The next larger layout, or the present one: when there is no better, or an attempt is being slept over, or
    workers of the last one cannot be deleted."""
    generation, status = draft.status.generation, draft.status
    assert generation is not None
    current = generation.layout
    if draft.view.sleeps() or undeleted.leaks(draft):
        return current
    ceiling = share.ceiling(draft)
    best = layouts.best(draft.view, ceiling)
    if best is None or best.workers <= current.workers:
        return current
    if current.workers < status.initial_workers:
        base = layouts.best(draft.view, min(status.initial_workers, ceiling, _most_own(draft)))
        if base is not None and base.workers > current.workers:
            return base
    most = most_idle(draft)
    if most is None:
        return _next_larger(draft, current, best)
    draft.waits_for_room |= most < best.workers
    idle = layouts.best(draft.view, min(ceiling, most))
    return idle if idle is not None and idle.workers > current.workers else current


def most_idle(draft: Draft) -> int | None:
    """Workers up to which the job may claim by what nodes have free; None where nothing but an attempt tells. Where
    nodes are not seen, those alone that other jobs give up for it."""
    room = draft.observed.room
    if draft.spec.elastic_policy.claim_from is not ClaimFrom.IDLE or room is None:
        return None
    if draft.observed.free is None and share.is_open(draft) and draft.status.share is not None:
        return draft.status.share.workers
    return draft.view.num_placed + room


def _most_own(draft: Draft) -> int:
    """Workers up to which the job takes back its starting size. What it lost it tries to have again once at any rate,
    because an autoscaler may add nodes. Later, and after it gave some up for another job, it waits until nodes have
    room, or pods that it may preempt: an attempt that gets a part would take claims from others and use none."""
    generation, status, reach = draft.status.generation, draft.status, draft.observed.reach
    assert generation is not None
    lost = generation.reason in (ResizeReason.FAILURE, ResizeReason.DRAIN) and not status.resize_failures
    if lost or reach is None or draft.spec.elastic_policy.claim_from is not ClaimFrom.IDLE:
        return status.initial_workers
    draft.waits_for_room = True
    return draft.view.num_placed + reach


def is_in_vain(draft: Draft, workers: int) -> bool:
    """Whether a job that does not train would fail again to get so many workers: nodes cannot take them all, even where
    they may preempt. Such an attempt takes workers from others and uses none. The first attempt is made at any rate,
    because an autoscaler may add nodes, and one each day."""
    status, reach, granted = draft.status, draft.observed.reach, draft.status.share
    if draft.spec.elastic_policy.claim_from is not ClaimFrom.IDLE or reach is None or draft.view.joining_ids:
        return False
    if not status.resize_failures or draft.view.num_placed + reach >= workers:
        return False
    if granted is not None and granted.workers >= workers:
        return False
    again = (status.next_resize_time or draft.now) + LONGEST_WAIT
    return not draft.clock.reached(again)


def is_claim(draft: Draft, layout: Layout) -> bool:
    """Whether the layout goes beyond the job's starting size."""
    return layout.workers > draft.status.initial_workers


def _next_larger(draft: Draft, current: Layout, best: Layout) -> Layout:
    report = draft.status.last_report
    stages = {offer.stages for offer in report.offers} if report else set()
    multiples = (range(k * (current.workers // k + 1), best.workers, k) for k in stages | {current.stages})
    for workers in heapq.merge(*multiples):
        layout = layouts.best(draft.view, workers)
        if layout is not None and layout.workers > current.workers:
            return layout
    return best
