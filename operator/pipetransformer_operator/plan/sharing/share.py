"""Applies a job's share, which `allocate` computes while other jobs want workers.

Only `onPack: Auto` obeys the share, but every job obeys one that makes room for pods of other owners. A job above its
share releases whole pipelines. Then no job makes room for it for a while, so that workers do not come straight back.
A job below its share tries at once, whatever failed before, and claims nothing beyond it. If it gets no node in the
room that others made, no job makes room for it for a while, twice as long each time. It then tries as if alone.
"""

from datetime import timedelta

from pipetransformer_contract.api.status import Reason, Share
from pipetransformer_contract.choose import OnPack
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.quota.requests import admitted

#: How long no job makes room for a job whose workers found no node in such room. Doubles each time in a row.
FIRST_SIT_OUT = timedelta(minutes=10)
LONGEST_SIT_OUT = timedelta(days=1)
#: How long no job makes room for a job that released workers for another.
REST = timedelta(minutes=10)


def take(draft: Draft) -> None:
    """Writes a new share to the status and acts on it."""
    share, before = draft.observed.share, draft.status.share
    if share == before:
        return
    draft.update(share=share)
    if share is not None and share.for_others:
        message = f"Releasing workers down to {share.workers} for pending higher-priority pods"
        draft.tell(Reason.SHARE_CHANGED, message)
    elif _workers(share) != _workers(before):
        _use(draft, share, before)


def _use(draft: Draft, share: Share | None, before: Share | None) -> None:
    """Tries a resize at once if the share allows more workers than now, and tells the user."""
    message = "The job's share is unlimited: no job has to make room for another"
    if share is not None:
        message = f"The job's share is {share.workers} workers, because other jobs want some"
        _grow_into(draft, share.workers, before)
    if draft.view.on_pack is OnPack.AUTO:
        draft.tell(Reason.SHARE_CHANGED, message)


def _grow_into(draft: Draft, workers: int, before: Share | None) -> None:
    """Ends waits of a job that may have more workers than now, or than before."""
    if workers > len(draft.view.members):
        draft.update(next_resize_time=None)
    granted = before.workers if before and not before.for_others else 0
    if workers > granted and is_open(draft):
        draft.prepare_anew(draft.now)  # other jobs make room from now on


def _workers(share: Share | None) -> int | None:
    return share.workers if share is not None else None


def takes_part(draft: Draft) -> bool:
    """Whether this operator controls the job, and the job is valid and active."""
    inactive = draft.view.stopped or draft.status.finished
    return draft.spec.managed and not inactive and not draft.view.spec_errors


def has_quota(draft: Draft) -> bool:
    """Whether the job's queue admitted some of its workers, or it has no queue."""
    return draft.observed.queue is None or bool(admitted(draft.status))


def is_refused(draft: Draft) -> bool:
    """Whether the cluster refuses to create workers that should join."""
    return bool(draft.observed.refusal) and len(draft.view.joiners) < len(draft.view.joining_ids)


def ceiling(draft: Draft) -> int:
    """Maximum number of workers that the job may grow to, even if its share is from an earlier layout."""
    most, granted = draft.spec.elastic_policy.ceiling, draft.view.granted
    return most if granted is None or draft.view.on_pack is not OnPack.AUTO else min(most, granted)


def is_open(draft: Draft) -> bool:
    """Whether the job has fewer workers with a node than its share."""
    granted = draft.view.granted
    return granted is not None and draft.view.num_placed < granted


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
    return draft.clock.is_ahead(draft.status.next_grant_time)
