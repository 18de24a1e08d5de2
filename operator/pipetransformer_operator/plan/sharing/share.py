"""A job's share while other jobs want workers. `allocate` computes it; only `onPack: Auto` obeys it. If the share makes
room for pods of other owners, every job obeys it.

A job above its share releases whole pipelines and waits before its next claim. For a while no job makes room for it, so
that the workers do not come straight back. A job below its share tries at once, whatever failed before, and claims
nothing beyond it. If the room that others made does not help, because no node fits or another pod was faster, no job
makes room for it for a while. That time doubles, and meanwhile the job tries as if it were alone.
"""

from datetime import timedelta

from pipetransformer_contract.api.status import Reason, Share
from pipetransformer_contract.choose import OnPack
from pipetransformer_operator.plan.draft import Draft

#: How long no job makes room for one whose workers found no node in such room; doubles each time in a row.
FIRST_SIT_OUT = timedelta(minutes=10)
LONGEST_SIT_OUT = timedelta(days=1)
#: How long no job makes room for one that released workers for another.
REST = timedelta(minutes=10)


def take(draft: Draft) -> None:
    """Notes a new share."""
    share, before = draft.observed.share, draft.status.share
    if share == before:
        return
    draft.update(share=share)
    if share is not None and share.yields:
        message = f"Releasing workers down to {share.workers} for pending higher-priority pods"
        draft.tell(Reason.SHARE_CHANGED, message)
    elif _workers(share) != _workers(before):
        _use(draft, share, before)


def _use(draft: Draft, share: Share | None, before: Share | None) -> None:
    """Tries at once if the share allows more workers than now, and tells the user."""
    plan = draft.status.generation
    if share is not None and share.workers > (plan.layout.workers if plan else 0):
        draft.update(next_resize_time=None)
    granted = before.workers if before and not before.yields else 0
    if share is not None and share.workers > granted and is_open(draft):
        draft.prepare_anew(draft.now)  # from now on others make room
    if draft.view.on_pack is OnPack.AUTO:
        message = "The job's share is unlimited: no job has to make room for another"
        if share is not None:
            message = f"The job's share is {share.workers} workers, because other jobs want some"
        draft.tell(Reason.SHARE_CHANGED, message)


def _workers(share: Share | None) -> int | None:
    return share.workers if share is not None else None


def takes_part(draft: Draft) -> bool:
    """Whether the job is ours, valid and active."""
    inactive = draft.view.stopped or draft.status.finished
    return draft.spec.managed and not inactive and not draft.view.spec_errors


def has_quota(draft: Draft) -> bool:
    """Whether the job's queue admitted some of its workers, or it has no queue."""
    return draft.observed.queue is None or any(request.admitted for request in draft.status.quota_requests)


def is_refused(draft: Draft) -> bool:
    """Whether the cluster refuses to create workers that are to join."""
    return bool(draft.observed.refusal) and len(draft.view.joiners) < len(draft.view.joining_ids)


def ceiling(draft: Draft) -> int:
    """Workers up to which the job may grow, even if its share was computed for an earlier layout."""
    most, share = draft.spec.elastic_policy.ceiling, draft.status.share
    if share is None or share.yields or draft.view.on_pack is not OnPack.AUTO:
        return most
    return min(most, share.workers)


def is_open(draft: Draft) -> bool:
    """Whether the job has fewer workers with a node than it was granted."""
    share = draft.status.share
    return share is not None and not share.yields and draft.view.num_placed < share.workers


def note_vain(draft: Draft) -> None:
    """Notes that the job found no nodes although other jobs made room for it."""
    if not is_open(draft) and draft.observed.preferred_since is None:
        return
    times = draft.status.grants_in_vain
    wait = min(LONGEST_SIT_OUT, FIRST_SIT_OUT * (1 << min(times, 16)))
    draft.update(grants_in_vain=times + 1, next_grant_time=draft.now + wait)


def rest(draft: Draft) -> None:
    """Notes that the job released workers for another."""
    before, until = draft.status.next_grant_time, draft.now + REST
    draft.update(next_grant_time=until if before is None else max(before, until))


def sits_out(draft: Draft) -> bool:
    """Whether no job makes room for this one."""
    return draft.status.next_grant_time is not None and draft.now < draft.status.next_grant_time
