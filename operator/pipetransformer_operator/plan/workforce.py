"""Decides which workers a job wants: workers that it has, and new ones within its quota."""

from collections.abc import Sequence

from pipetransformer_contract.api.status import QuotaRequest, Reason
from pipetransformer_contract.words import counted

from .draft import Draft
from .quota import balance
from .view import View


def want(draft: Draft, ids: Sequence[int], count: int, replaced: Sequence[int] = ()) -> None:
    """Wants the workers `ids`, and as many new workers as are missing to `count`. Leaving and `replaced` workers stay.

    A new worker beyond the job's starting size is claimed: its pod has a lower priority. A new worker that replaces one
    of the starting size is not claimed. A job with a queue first asks for missing quota. It creates no new worker until
    the queue admits the request.

    Args:
        draft: draft of the job's plan.
        ids: ids of workers that stay.
        count: how many workers the job needs, without `replaced` and leaving ones.
        replaced: ids of workers that new ones will replace. They train until then.
    """
    # `base` of the missing workers belong to the starting size, the others are claims.
    missing = max(0, count - len(ids))
    least, base = _of_starting_size(draft.view, ids, missing, replaced)
    if draft.status.quota_requests:
        base, missing = _within_quota(draft, missing, least, base)
    # A status that another client emptied does not know the ids of its pods, which the job then does not want.
    first = max(draft.status.next_worker_id, *(known + 1 for known in draft.view.workers.ids), 0)
    created = range(first, first + missing)
    if missing:
        if draft.status.quota_requests:
            for part, starting in ((created[:base], True), (created[base:], False)):
                draft.update(quota_requests=balance.assign(draft.status, draft.observed, part, starting=starting))
        draft.update(next_worker_id=created.stop, claimed_ids=[*draft.status.claimed_ids, *created[base:]])
        draft.tell(
            Reason.WORKERS_CREATED, f"Creating {counted(missing, 'worker')}, so the job has {len(ids) + missing}"
        )
    draft.keep_workers(
        [*ids, *created, *draft.status.leaving_ids, *replaced], "not needed for the layout that is being prepared"
    )


def _of_starting_size(view: View, ids: Sequence[int], missing: int, replaced: Sequence[int]) -> tuple[int, int]:
    """How many of the `missing` workers must belong to the starting size, and how many may. The others are claims."""
    claimed = view.claimed_ids
    if view.status.generation is None:  # a start has no claims
        return missing, missing
    joining = set(view.joining_ids) - claimed
    least = max(0, sum(key not in claimed for key in replaced) - sum(key in joining for key in ids))
    size = sum(key not in claimed for key in ids)
    return least, min(missing, max(least, view.status.initial_workers - size))


def _within_quota(draft: Draft, missing: int, least: int, most: int) -> tuple[int, int]:
    """How many of the `missing` workers may be created now: those of the starting size, and all.

    Both are 0 while the queue must still grant quota for some of them. At least `least` workers use quota of the
    starting size, and up to `most` if that quota suffices. Requests that are no longer needed are withdrawn.
    """
    stuck = draft.view.workers.that(draft.view.is_stuck).ids
    own, claims = (
        balance.available(draft.status, draft.observed, stuck, starting=starting) for starting in (True, False)
    )
    base = min(missing, max(least, min(own.granted, most)))
    queue, may_create = draft.status.quota_requests[0].queue, True
    for kind, part, starting in ((own, base, True), (claims, missing - base, False)):
        may_create = may_create and part <= kind.granted
        if part <= kind.granted:
            draft.update(quota_requests=balance.without_waiting(draft.status, starting=starting))
        elif part > kind.granted + kind.waiting:
            ask_queue(draft, queue, part - kind.granted - kind.waiting, starting=starting)
    if base > own.granted:  # return unused quota of claims: the queue may have no other room for the starting size
        draft.update(quota_requests=balance.after_return(draft.status, claims.free - (missing - base), starting=False))
    if not may_create:
        return 0, 0
    now = min(base, own.free)
    return now, now + min(missing - base, claims.free)


def ask_queue(draft: Draft, queue: str, workers: int, *, starting: bool = False) -> None:
    """Asks the queue of that name for quota. `starting`: to replace workers of the starting size."""
    status = draft.status
    name = f"{draft.observed.name}-q{status.next_request_id}"
    request = QuotaRequest(name=name, queue=queue, workers=workers, own=starting)
    draft.update(quota_requests=[*status.quota_requests, request], next_request_id=status.next_request_id + 1)
    draft.tell(Reason.WAITING_FOR_QUOTA, f"Asking queue {queue} for quota for {counted(workers, 'worker')}")
