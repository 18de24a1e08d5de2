"""Applies a job's share: how many workers it may have while other jobs want some. `allocate` computes it.

Only `onPack: Auto` obeys the share, but every job obeys one that makes room for pods of other owners. A job above its
share releases whole pipelines. Then no job makes room for it for a while, so that workers do not come straight back.
A job below its share tries a resize at once, even after failed attempts, and claims nothing above the share. If it
finds no node although others made room, no job makes room for it for a while. That time doubles with each such attempt.
"""

from datetime import timedelta

from pipetransformer_contract.api.status import Reason, Share
from pipetransformer_contract.choose import OnPack
from pipetransformer_contract.words import counted
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.quota.requests import admitted

#: How long other jobs make no room for a job that found no nodes although they had made room. It doubles each time in a
#: row.
FIRST_SIT_OUT = timedelta(minutes=10)
LONGEST_SIT_OUT = timedelta(days=1)
#: How long other jobs make no room for a job that has just released workers for another job.
RELEASE_SIT_OUT = timedelta(minutes=10)


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
    """Ends the wait before a resize if the share allows more workers, and tells the user of the new share."""
    message = "The job's share is unlimited, because no job has to make room for another"
    if share is not None:
        message = f"The job's share is {counted(share.workers, 'worker')}, because other jobs need workers too"
        _grow_into(draft, share.workers, before)
    if draft.view.on_pack is OnPack.AUTO:
        draft.tell(Reason.SHARE_CHANGED, message)


def _grow_into(draft: Draft, workers: int, before: Share | None) -> None:
    """If the share allows more workers than the job has, ends its wait. If the share grew, restarts a preparation."""
    if workers > len(draft.view.members):
        draft.update(next_resize_time=None)
    so_far = before.workers if before and not before.for_others else 0
    if workers > so_far and is_open(draft):
        draft.restart_preparation(draft.now)  # other jobs make room from now on


def _workers(share: Share | None) -> int | None:
    return share.workers if share is not None else None


def takes_part(draft: Draft) -> bool:
    """Whether the job can share: this operator manages it, it has not stopped or ended, and its spec is valid."""
    return draft.view.active and not draft.view.spec_errors


def has_quota(draft: Draft) -> bool:
    """Whether the job's queue admitted some of its workers, or it has no queue."""
    return draft.observed.queue is None or bool(admitted(draft.status))


def is_refused(draft: Draft) -> bool:
    """Whether the cluster refuses to create workers that the job wants to join."""
    return bool(draft.observed.refusal) and len(draft.view.joiners) < len(draft.view.joining_ids)


def ceiling(draft: Draft) -> int:
    """How many workers the job may grow to: `maxWorkers`, or its share with `onPack: Auto`."""
    most, share = draft.spec.elastic_policy.ceiling, draft.view.share_workers
    return most if share is None or draft.view.on_pack is not OnPack.AUTO else min(most, share)


def is_open(draft: Draft) -> bool:
    """Whether the job has fewer workers with nodes than its share allows."""
    share = draft.view.share_workers
    return share is not None and draft.view.num_placed < share


def note_no_nodes(draft: Draft) -> None:
    """Lets the job sit out for a while, if other jobs made room for it and it still found no nodes."""
    if not is_open(draft) and draft.observed.preferred_since is None:
        return
    times = draft.status.unused_shares
    wait = min(LONGEST_SIT_OUT, FIRST_SIT_OUT * (1 << min(times, 16)))
    draft.update(unused_shares=times + 1, sits_out_until=draft.now + wait)


def sit_out_after_release(draft: Draft) -> None:
    """Lets the job sit out for a while, because it just released workers for another."""
    before, until = draft.status.sits_out_until, draft.now + RELEASE_SIT_OUT
    draft.update(sits_out_until=until if before is None else max(before, until))


def sits_out(draft: Draft) -> bool:
    """Whether the job sits out: for now no other job makes room for it."""
    return draft.clock.is_ahead(draft.status.sits_out_until)
