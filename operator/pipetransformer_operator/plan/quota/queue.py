"""A job that asks a queue for its workers: it waits to be admitted, asks again for more, and gives back what it must.

The first request is for the starting size. If its quota is wanted back, the job leaves a checkpoint, gives all workers
back and waits again, in the size that the checkpoint needs. Each claim is a request of its own: if that quota is wanted
back, its workers leave and the job goes on narrower. So are replacements of cordoned workers, for both hold quota at a
time; where they replace some of the starting size theirs is no claim. Nor is what a start asks for that cannot wait for
pods on a lost node. As long as nothing is known of the queue, nothing changes.
"""

from pipetransformer_contract.api.job import QUEUE_LABEL
from pipetransformer_contract.api.status import ConditionType, QuotaRequest, Reason, ResizePhase
from pipetransformer_contract.messages import ResizeReason
from pipetransformer_operator.plan import layouts, workforce
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.rules import stop
from pipetransformer_operator.plan.rules.prepare import cancel, is_recovery, queue_says
from pipetransformer_operator.plan.types import Answer, EventType

from . import quota


def follow(draft: Draft) -> None:
    """Takes what the queue says, and notes which workers are gone; what they gave back is the queue's again."""
    status, queue = draft.status, draft.observed.queue
    if queue is None or not status.quota_requests:
        return
    there = {worker.id for worker in draft.observed.workers} | set(status.worker_ids)
    releasing = set(status.releasing_ids)
    requests = []
    for request in status.quota_requests:
        answer = None if queue.problem else queue.answers.get(request.name)
        if answer is not None and not request.admitted:
            if answer.withdrawn:
                continue
            if answer.admitted:
                draft.tell(Reason.QUOTA_RESERVED, f"{request.queue} admits {request.granted} workers")
                request = request.model_copy(update={"admitted": True})
        gone = [key for key in request.worker_ids if key not in there]
        returned = request.returned + sum(key in releasing for key in gone)
        kept = [key for key in request.worker_ids if key in there]
        requests.append(request.model_copy(update={"worker_ids": kept, "returned": returned}))
    draft.update(quota_requests=requests)
    _drop_joiners(draft)


def admits(draft: Draft, needed: int) -> bool:
    """Whether the job may start with the workers that it needs, by its queue; asks it first."""
    queue, status = draft.observed.queue, draft.status
    name = draft.observed.labels.get(QUEUE_LABEL, "")
    base = status.quota_requests[0] if status.quota_requests else None
    if base is not None and base.admitted:
        return True
    if base is not None and (base.queue != name or base.granted != needed):
        base = None
        draft.update(quota_requests=[])
    if queue is None or not name or draft.view.asleep:
        return True
    if base is None and not queue.problem:
        workforce.ask_queue(draft, name, needed)
    draft.update(start_time=None)  # who waits in a queue is not active, as a Job that Kueue suspends
    running = status.condition(ConditionType.RUNNING)
    if running is not None and running.reason in (Reason.NO_LEGAL_START, Reason.INVALID_SPEC):
        draft.set_condition(ConditionType.RUNNING, False, Reason.WAITING_FOR_QUOTA, queue_says(draft.view))
    return False


def sends_back(draft: Draft) -> bool:
    """Whether the job has to start over, for the queue wants back what it cannot go on without; it ends all workers.
    What else is wanted back is forgotten once nobody uses it."""
    lost = quota.lost(draft.status, draft.observed)
    stops = draft.status.stop is not None and bool(draft.status.quota_requests)
    if not lost and not stops:
        return False
    if not stops and not _is_vital(draft, lost):
        first, *others = draft.status.quota_requests
        draft.update(quota_requests=[first, *(one for one in others if one.worker_ids or one not in lost)])
        return False
    base = draft.status.quota_requests[0]
    if draft.status.is_true(ConditionType.ADMITTED):
        draft.tell(
            Reason.QUOTA_LOST,
            f"{base.queue} wants the job's quota back: {quota.words(lost, draft.observed.queue)}",
            EventType.WARNING,
        )
    stop.give_back(draft, f"{base.queue} wants the job's quota back")
    if not draft.observed.workers:
        kept = _again(draft, base) if base in lost else _own(draft, lost)
        draft.update(start_time=None, quota_requests=kept)
    return True


def tidy(draft: Draft) -> None:
    """Gives back what a job does not need that has the layout it wants. Quota of its starting size is kept for another
    attempt that is slept over. A start needs none of claims."""
    status = draft.status
    if not status.quota_requests:
        return
    if status.generation is None:
        _give_up_claims(draft)
        if status.resize is None and draft.view.asleep and not any(one.worker_ids for one in status.quota_requests):
            draft.update(quota_requests=[])
        return
    if status.resize is not None and not (is_recovery(draft.view) and draft.view.asleep):
        if status.resize.reason is not ResizeReason.DRAIN:
            _return_excess(draft)
        return
    if draft.view.asleep:
        _return_excess(draft)
    kept = {request.name for request in draft.status.own_requests} if draft.view.asleep else set()
    first, *others = draft.status.quota_requests
    admitted = [first, *(request for request in others if request.admitted)]
    base, *extras = [one if one.name in kept else _without_free(one) for one in admitted]
    draft.update(quota_requests=[base, *(extra for extra in extras if extra.returned < extra.workers)])


def _is_vital(draft: Draft, lost: list[QuotaRequest]) -> bool:
    generation, base = draft.status.generation, draft.status.quota_requests[0]
    if base in lost and base.granted:
        return True
    if generation is None:
        misses = any(request.granted for request in draft.status.own_requests if request in lost)
        return misses and not _own(draft, lost)
    leaving = set(quota.lost_ids(draft.status, draft.observed)) & set(draft.view.ids_of(generation.members))
    return bool(leaving) and layouts.best(draft.view, len(generation.members) - len(leaving)) is None


def _again(draft: Draft, base: QuotaRequest) -> list[QuotaRequest]:
    """The first request as it has to be made again; empty if a new one has to take its place."""
    assert draft.observed.queue is not None
    answer = draft.observed.queue.answers.get(base.name, Answer(False, withdrawn=True))
    draft.update(quota_requests=[])
    layout = layouts.starting(draft.view)
    if answer.withdrawn or layout is None or layout.workers > base.workers:
        return []
    return [base.model_copy(update={"admitted": False, "worker_ids": [], "returned": base.workers - layout.workers})]


def _own(draft: Draft, lost: list[QuotaRequest]) -> list[QuotaRequest]:
    """What is left of the quota of the starting size; nothing if that is too little for a start."""
    own = [request for request in draft.status.own_requests if request.admitted and request not in lost]
    layout = layouts.starting(draft.view)
    return own if layout is not None and layout.workers <= sum(request.granted for request in own) else []


def _drop_joiners(draft: Draft) -> None:
    """Workers that were to join on quota that is wanted back are given up, and the change that they were for."""
    going = quota.lost_ids(draft.status, draft.observed) & set(draft.view.joining_ids)
    if not going:
        return
    resize = draft.status.resize
    if resize is not None and resize.phase is ResizePhase.PREPARE and draft.status.generation is not None:
        cancel(draft, Reason.QUOTA_LOST, quota.words(quota.lost(draft.status, draft.observed), draft.observed.queue))
    draft.keep_workers(set(draft.status.worker_ids) - going, "the queue wants the quota back before they joined")


def _return_excess(draft: Draft) -> None:
    """Gives back quota that cordoned workers of the starting size had, now that others hold what replaced it."""
    status = draft.status
    excess = sum(request.granted for request in status.own_requests if request.admitted) - status.initial_workers
    draft.update(quota_requests=quota.give_back(status, excess, own=True))


def _give_up_claims(draft: Draft) -> None:
    """Gives back what nobody uses of claims, and asks for no more of them."""
    draft.update(quota_requests=quota.without_waiting(draft.status, own=False))
    free = sum(request.free for request in draft.status.quota_requests)
    draft.update(quota_requests=quota.give_back(draft.status, free, own=False))


def _without_free(request: QuotaRequest) -> QuotaRequest:
    return request.model_copy(update={"returned": request.returned + request.free})
