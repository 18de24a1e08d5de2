"""The rules for a job with a queue: it waits for admission, asks for more, and returns quota that the queue reclaims.

The first request is for the starting size. If the queue reclaims it, the job writes a checkpoint, releases all workers
and waits again, with the size that the checkpoint needs. Each claim has its own request: if the queue reclaims it, its
workers leave and the job continues. Replacements of workers on cordoned or lost nodes need requests too, because the
old pods still hold quota. These requests are no claims if they replace workers of the starting size. While the operator
cannot read the queue's answers, nothing changes.
"""

from collections.abc import Set

from pipetransformer_contract.api.labels import QUEUE_LABEL
from pipetransformer_contract.api.status import ConditionType, QuotaRequest, Reason
from pipetransformer_contract.messages import ResizeReason
from pipetransformer_contract.words import counted
from pipetransformer_operator.plan import layouts, workforce
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.quota import balance
from pipetransformer_operator.plan.quota.requests import Requests, admitted, of_kind
from pipetransformer_operator.plan.types import Answer, EventType, Queue

from . import stop
from .prepare import cancel, is_recovery
from .readiness import queue_says


def follow(draft: Draft) -> None:
    """Writes the queue's answers to the status, and returns the quota of released workers whose pods are gone."""
    status, queue = draft.status, draft.observed.queue
    if queue is None:
        return
    there = draft.view.workers.ids | draft.view.wanted_ids
    answered = filter(None, [_answered(draft, queue, request) for request in status.quota_requests])
    draft.update(quota_requests=[_without_gone(draft, request, there) for request in answered])
    _drop_joiners(draft)


def _answered(draft: Draft, queue: Queue, request: QuotaRequest) -> QuotaRequest | None:
    """The request with the queue's answer; None if it was withdrawn before the queue admitted it."""
    answer = None if queue.problem else queue.answers.get(request.name)
    if answer is None or request.admitted:
        return request
    if answer.withdrawn:
        return None
    if answer.admitted:
        draft.tell(Reason.QUOTA_RESERVED, f"Queue {request.queue} admits {counted(request.granted, 'worker')}")
    return request.model_copy(update={"admitted": answer.admitted})


def _without_gone(draft: Draft, request: QuotaRequest, there: Set[int]) -> QuotaRequest:
    """The request without workers that are gone. Quota of those that the job released counts as returned.

    `there`: ids of workers that exist or are wanted."""
    gone = set(request.worker_ids) - there
    kept = [key for key in request.worker_ids if key in there]
    returned = request.returned + len(gone & set(draft.status.releasing_ids))
    return request.model_copy(update={"worker_ids": kept, "returned": returned})


def await_admission(draft: Draft, needed: int) -> bool:
    """Asks the queue for quota for `needed` workers if the job needs it. Returns whether the job may start."""
    queue, status = draft.observed.queue, draft.status
    name = draft.observed.labels.get(QUEUE_LABEL, "")
    asked = [(first.queue, first.granted) for first in status.quota_requests[:1]]
    if status.quota_requests and status.quota_requests[0].admitted:
        return True
    if asked != [(name, needed)]:
        draft.update(quota_requests=[])
    if queue is None or not name or draft.view.asleep:
        return True
    if not draft.status.quota_requests and not queue.problem:
        workforce.ask_queue(draft, name, needed)
    draft.update(start_time=None)  # a job that waits in a queue is not active, like a Job that Kueue suspends
    if status.condition(ConditionType.RUNNING):  # it says why an earlier start or training ended
        draft.set_condition(ConditionType.RUNNING, False, Reason.WAITING_FOR_QUOTA, queue_says(draft.view))
    return False


def release_if_reclaimed(draft: Draft) -> bool:
    """Releases all workers if the queue reclaims quota that the job cannot train without. Returns whether it does.

    Drops other reclaimed requests once no worker uses them."""
    requests, lost = draft.status.quota_requests, balance.lost(draft.status, draft.observed)
    if not requests:
        return False
    if draft.status.stop is None and not _is_vital(draft, lost):
        _drop_unused(draft, lost)
        return False
    base = requests[0]
    if draft.status.is_true(ConditionType.ADMITTED):
        draft.tell(
            Reason.QUOTA_LOST,
            f"Queue {base.queue} reclaims the job's quota: {balance.words(lost, draft.observed.queue)}",
            EventType.WARNING,
        )
    stop.release_workers(draft, f"queue {base.queue} reclaims the job's quota")
    if not draft.observed.workers:
        kept = _base_that_waits_again(draft, base) if base in lost else _starting_quota_that_stays(draft, lost)
        draft.update(start_time=None, quota_requests=kept)
    return True


def _drop_unused(draft: Draft, lost: Requests) -> None:
    """Drops reclaimed requests that no worker uses; the first request always stays."""
    unused = lost.that(lambda request: not request.worker_ids).names
    first, *others = draft.status.quota_requests
    draft.update(quota_requests=[first, *Requests(others).without(unused)])


def tidy(draft: Draft) -> None:
    """Returns quota that the job does not need.

    A start needs no quota of claims. A training job that waits after a failed attempt keeps the quota of its starting
    size for the next attempt."""
    resize = draft.status.resize
    if not draft.status.quota_requests:
        return
    if draft.status.generation is None:
        _tidy_start(draft)
    elif resize is None or (is_recovery(draft.view) and draft.view.asleep):
        _tidy_training(draft)
    elif resize.reason is not ResizeReason.DRAIN:
        _return_excess(draft)


def _tidy_start(draft: Draft) -> None:
    used = Requests(draft.status.quota_requests).worker_ids
    _return_claims(draft)
    if draft.status.resize is None and draft.view.asleep and not used:
        draft.update(quota_requests=[])


def _tidy_training(draft: Draft) -> None:
    if draft.view.asleep:
        draft.update(quota_requests=balance.without_waiting(draft.status, starting=True))
        _return_excess(draft)
        _return_claims(draft)
        return
    kept = Requests(draft.status.quota_requests[1:]).that(lambda request: request.admitted)
    kept = Requests((draft.status.quota_requests[0], *kept))
    draft.update(quota_requests=list(Requests(request.less(request.free) for request in kept).needed))


def _is_vital(draft: Draft, lost: Requests) -> bool:
    """Whether the job cannot train without the quota that the queue reclaims."""
    generation, base = draft.status.generation, draft.status.quota_requests[0]
    if base in lost and base.granted:
        return True
    if generation is None:
        return of_kind(draft.status, lost, starting=True).granted > 0 and not _starting_quota_that_stays(draft, lost)
    leaving = set(balance.lost_ids(draft.status, draft.observed)) & set(draft.view.ids_of(generation.members))
    return bool(leaving) and layouts.best(draft.view, len(generation.members) - len(leaving)) is None


def _base_that_waits_again(draft: Draft, base: QuotaRequest) -> list[QuotaRequest]:
    """The first request in the form that waits for admission again; empty if a new request must replace it."""
    assert draft.observed.queue is not None
    answer = draft.observed.queue.answers.get(base.name, Answer(False, withdrawn=True))
    draft.update(quota_requests=[])
    layout = layouts.starting(draft.view)
    if answer.withdrawn or layout is None or layout.workers > base.workers:
        return []
    return [base.model_copy(update={"admitted": False, "worker_ids": [], "returned": base.workers - layout.workers})]


def _starting_quota_that_stays(draft: Draft, lost: Requests) -> list[QuotaRequest]:
    """Requests for the starting size that the queue does not reclaim; empty if they are too few for a start."""
    own = of_kind(draft.status, admitted(draft.status), starting=True).without(lost.names)
    layout = layouts.starting(draft.view)
    return list(own) if layout is not None and layout.workers <= own.granted else []


def _drop_joiners(draft: Draft) -> None:
    """Deletes joiners whose quota the queue reclaims, and cancels the resize that needs them."""
    going = balance.lost_ids(draft.status, draft.observed) & set(draft.view.joining_ids)
    if not going:
        return
    if draft.view.prepared_resize:
        cancel(
            draft, Reason.QUOTA_LOST, balance.words(balance.lost(draft.status, draft.observed), draft.observed.queue)
        )
    draft.keep_workers(set(draft.status.worker_ids) - going, "the queue reclaims their quota before they joined")


def _return_excess(draft: Draft) -> None:
    """Returns quota that exceeds the starting size, because replacements of cordoned workers have separate quota."""
    status = draft.status
    excess = of_kind(status, admitted(status), starting=True).granted - status.initial_workers
    draft.update(quota_requests=balance.after_return(status, excess, starting=True))


def _return_claims(draft: Draft) -> None:
    """Returns unused quota of claims, and withdraws requests for claims that the queue has not admitted."""
    draft.update(quota_requests=balance.without_waiting(draft.status, starting=False))
    free = Requests(draft.status.quota_requests).free
    draft.update(quota_requests=balance.after_return(draft.status, free, starting=False))
