"""Which larger layout a job tries next. A claim is tried, not computed: one pipeline's workers, and see if they run.

Up to its starting size a job takes back at once what it lost; beyond that it grows by one pipeline at a time. While
room is made for another job it tries nothing beyond its share, and withdraws what it has begun.
"""

import heapq

from pipetransformer_contract.choose import Layout

from . import layouts, share, undeleted
from .draft import Draft


def target(draft: Draft) -> Layout:
    """The next larger layout, or the present one: when there is no better, or an attempt is being slept over, or
    workers of the last one cannot be deleted."""
    plan, status = draft.status.plan, draft.status
    assert plan is not None
    current = plan.layout
    if draft.sleeps() or undeleted.leaks(draft):
        return current
    ceiling = share.ceiling(draft)
    best = layouts.best(draft, ceiling)
    if best is None or best.workers <= current.workers:
        return current
    if current.workers < status.initial_workers:
        base = layouts.best(draft, min(status.initial_workers, ceiling))
        if base is not None and base.workers > current.workers:
            return base
    return _next_larger(draft, current, best)


def is_claim(draft: Draft, layout: Layout) -> bool:
    """Whether the layout goes beyond the job's starting size."""
    return layout.workers > draft.status.initial_workers


def _next_larger(draft: Draft, current: Layout, best: Layout) -> Layout:
    report = draft.status.last_report
    stages = {offer.stages for offer in report.offers} if report else set()
    multiples = (range(k * (current.workers // k + 1), best.workers, k) for k in stages | {current.stages})
    for workers in heapq.merge(*multiples):
        layout = layouts.best(draft, workers)
        if layout is not None and layout.workers > current.workers:
            return layout
    return best
