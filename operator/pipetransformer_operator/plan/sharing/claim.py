"""Decides which larger layout a job tries next.

Up to its starting size a job replaces lost workers at once. Beyond that it claims. With `claimFrom: Idle` it claims as
many workers as nodes have room for now, and withdraws claims whose room another pod took. With `Autoscaler`, or with
unlimited room, it tries one more pipeline and waits until its workers run. While other jobs need room, it tries nothing
beyond its share and withdraws attempts that go beyond it.
"""

import heapq
from datetime import timedelta

from pipetransformer_contract.api.job import ClaimFrom
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import ResizeReason
from pipetransformer_operator.plan import layouts
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.rules import undeleted

from . import share

#: Time between two attempts to start although nodes have too little room.
LONGEST_WAIT = timedelta(days=1)


def target(draft: Draft) -> Layout:
    """The next larger layout to try.

    It is the present layout if none is better, or if the job sleeps after a failed attempt. It also is while workers of
    that attempt cannot be deleted."""
    plan = draft.status.generation
    assert plan is not None
    current = plan.layout
    if draft.view.sleeps() or undeleted.leaks(draft):
        return current
    best = _larger(draft, current, share.ceiling(draft))
    if best is None:
        return current
    return _own(draft, current) or _claim(draft, current, best)


def _larger(draft: Draft, current: Layout, workers: int) -> Layout | None:
    """The best layout on at most this many workers, if it has more than the present one."""
    layout = layouts.best(draft.view, workers)
    return layout if layout is not None and layout.workers > current.workers else None


def _own(draft: Draft, current: Layout) -> Layout | None:
    """A larger layout within the starting size."""
    initial = draft.status.initial_workers
    if current.workers >= initial:
        return None
    return _larger(draft, current, min(initial, share.ceiling(draft), _most_own(draft)))


def _claim(draft: Draft, current: Layout, best: Layout) -> Layout:
    most = most_idle(draft)
    if most is None:
        return _next_larger(draft, current, best)
    draft.waits_for_room |= most < best.workers
    return _larger(draft, current, min(share.ceiling(draft), most)) or current


def most_idle(draft: Draft) -> int | None:
    """Maximum number of workers that the job may claim, by what nodes have free. None if only an attempt can tell.

    If nodes are not watched, it is the number that other jobs release for it."""
    room, granted = draft.observed.room, draft.status.share
    if room is None or not _claims_idle(draft):
        return None
    if draft.observed.free is None and granted is not None and share.is_open(draft):
        return granted.workers
    return draft.view.num_placed + room


def _claims_idle(draft: Draft) -> bool:
    return draft.spec.elastic_policy.claim_from is ClaimFrom.IDLE


def _most_own(draft: Draft) -> int:
    """Maximum number of workers that the job tries to have again, up to its starting size.

    It tries once to replace lost workers, because an autoscaler may add nodes. Later, and after it released workers for
    another job, it waits until nodes have room or pods that it may preempt. Otherwise an attempt that gets only some
    workers would preempt claims of other jobs without using them."""
    plan, status, reach = draft.status.generation, draft.status, draft.observed.reach
    assert plan is not None
    lost = plan.reason in (ResizeReason.FAILURE, ResizeReason.DRAIN) and not status.resize_failures
    if lost or reach is None or not _claims_idle(draft):
        return status.initial_workers
    draft.waits_for_room = True
    return draft.view.num_placed + reach


def is_in_vain(draft: Draft, workers: int) -> bool:
    """Whether a job that does not train would again fail to get this many workers.

    Nodes cannot take them all, even with preemption. Such an attempt takes workers from other jobs and uses none. The
    job still tries once at first, and then once a day, because only a pending pod makes an autoscaler add nodes."""
    granted, failed = draft.status.share, bool(draft.status.resize_failures)
    if not failed or not _lacks_room(draft, workers):
        return False
    if granted is not None and granted.workers >= workers:
        return False
    if draft.status.next_resize_time is None:  # a release or a new share ended its sleep: the day begins now
        draft.update(next_resize_time=draft.now)
    again = (draft.status.next_resize_time or draft.now) + LONGEST_WAIT
    return not draft.clock.reached(again)


def _lacks_room(draft: Draft, workers: int) -> bool:
    """Whether nodes are known to have too little room for this many workers, and none of these is joining yet."""
    reach = draft.observed.reach
    if reach is None or draft.view.joining_ids or not _claims_idle(draft):
        return False
    return draft.view.num_placed + reach < workers


def is_claim(draft: Draft, layout: Layout) -> bool:
    """Whether the layout has more workers than the job's starting size."""
    return layout.workers > draft.status.initial_workers


def _next_larger(draft: Draft, current: Layout, best: Layout) -> Layout:
    stages = {offer.stages for offer in draft.view.offers}
    multiples = (range(k * (current.workers // k + 1), best.workers, k) for k in stages | {current.stages})
    for workers in heapq.merge(*multiples):
        layout = layouts.best(draft.view, workers)
        if layout is not None and layout.workers > current.workers:
            return layout
    return best
