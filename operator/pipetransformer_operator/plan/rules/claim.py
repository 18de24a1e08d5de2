"""Decides which larger layout a job tries next.

Up to its starting size a job replaces lost workers at once. Beyond that it claims. With `claimFrom: Idle` it claims as
many workers as nodes have room for now, and withdraws a claim if another pod took the room. With `Autoscaler`, or with
unlimited room, it tries one more pipeline and waits until that pipeline's workers run. While other jobs want workers,
it tries no layout above its share, and withdraws attempts that exceed the share.
"""

import heapq
from datetime import timedelta

from pipetransformer_contract.api.job import ClaimFrom
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import ResizeReason
from pipetransformer_operator.plan import layouts
from pipetransformer_operator.plan.draft import Draft

from . import share, undeleted

#: Time between two attempts to start while nodes have too little room. Their pending pods make an autoscaler add nodes.
LONGEST_WAIT = timedelta(days=1)


def target(draft: Draft) -> Layout:
    """The next larger layout to try.

    It is the present layout if no larger one is better, or if the job waits after a failed attempt. It is also the
    present layout while the cluster refuses to delete workers of the failed attempt.

    Also sets `draft.waits_for_room` if the layout may be larger once nodes have more room."""
    current = draft.view.generation.layout
    if draft.view.asleep_and_wakes() or undeleted.leaks(draft):
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
    """A larger layout within the starting size; None without one."""
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
    """How many workers the job may have, claims included, by what nodes have free. None if only an attempt can tell.

    If the operator does not watch nodes, it is the job's share, as far as other jobs release workers for it."""
    room = draft.observed.room
    if room is None or not _claims_idle(draft):
        return None
    if draft.observed.free is None and share.is_open(draft):
        return draft.view.share_workers
    return draft.view.num_placed + room


def _claims_idle(draft: Draft) -> bool:
    return draft.spec.elastic_policy.claim_from is ClaimFrom.IDLE


def _most_own(draft: Draft) -> int:
    """How many workers the job tries to have, up to its starting size.

    It tries once to replace all lost workers, because an autoscaler may add nodes. Later, or after it released workers
    for another job, it tries only as many as nodes have room for, preemption included. Otherwise an attempt that gets
    only some of its workers would preempt claims of other jobs without using them."""
    status, reach = draft.status, draft.observed.reach
    lost = draft.view.generation.reason in (ResizeReason.FAILURE, ResizeReason.DRAIN) and not status.resize_failures
    if lost or reach is None or not _claims_idle(draft):
        return status.initial_workers
    draft.waits_for_room = True
    return draft.view.num_placed + reach


def postpones_hopeless_attempt(draft: Draft, workers: int) -> bool:
    """Postpones an attempt of a job that does not train, if it would probably fail again to get this many workers.

    Returns whether it does, and sets `status.nextResizeTime`, from which the day counts. An attempt is hopeless if
    nodes cannot take all its workers, even by preemption. It would preempt workers of other jobs and use none. The
    job still tries once at first, and then once a day, because only a pending pod makes an autoscaler add nodes."""
    given, failed = draft.status.share, bool(draft.status.resize_failures)
    if not failed or not _lacks_room(draft, workers):
        return False
    if given is not None and given.workers >= workers:
        return False
    begin = draft.status.next_resize_time or draft.now  # if another rule ended the wait, the day begins now
    draft.update(next_resize_time=begin)
    return not draft.clock.reached(begin + LONGEST_WAIT)


def _lacks_room(draft: Draft, workers: int) -> bool:
    """Whether nodes are known to have too little room for this many workers, and no joiner exists or is wanted."""
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
