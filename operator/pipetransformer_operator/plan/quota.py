"""What a job may have by what its queue said: who uses which request's quota, and when to ask for more.

Quota counts as used until the worker's pod is gone, so a replacement waits for the end of the one that it replaces. A
start does not wait for a pod that may stay for days: all its other workers would wait with it, warm.
"""

from collections.abc import Iterable, Sequence, Set

from ..api.status import JobStatus, QuotaRequest
from .types import Observed, Queue


def lost(status: JobStatus, observed: Observed) -> list[QuotaRequest]:
    """Requests whose quota is wanted back, or was taken. Silence of the queue takes nothing."""
    queue = observed.queue
    if queue is None or queue.problem:
        return []
    admitted = {name for name, answer in queue.answers.items() if answer.admitted}
    return [request for request in status.quota_requests if request.admitted and request.name not in admitted]


def lost_ids(status: JobStatus, observed: Observed) -> frozenset[int]:
    """Workers that have to leave, for their quota is wanted back."""
    return frozenset(key for request in lost(status, observed) for key in request.worker_ids)


def allowed(status: JobStatus, observed: Observed, missing: int, stuck: Set[int]) -> int:
    """How many of `missing` workers may be created now: none as long as quota for some of them has to be asked for.

    `stuck` are ids of workers whose pods may not end for long.
    """
    free, coming = _free(status, observed), _coming(status, observed, stuck)
    return 0 if missing > free + coming else min(missing, free)


def short(status: JobStatus, observed: Observed, missing: int, stuck: Set[int]) -> int:
    """How much quota has to be asked for, besides what was asked for already, to have `missing` workers more."""
    waiting = sum(request.workers for request in status.quota_requests if not request.admitted)
    return max(0, missing - _free(status, observed) - _coming(status, observed, stuck) - waiting)


def assign(status: JobStatus, observed: Observed, created: Sequence[int]) -> list[QuotaRequest]:
    """The requests with new workers on their free quota, the oldest first."""
    left = list(created)
    gone = lost(status, observed)
    requests = []
    for request in status.quota_requests:
        if request.admitted and request not in gone:
            taken, left = left[: request.free], left[request.free :]
            request = request.model_copy(update={"worker_ids": [*request.worker_ids, *taken]})
        requests.append(request)
    assert not left, "more workers than quota"
    return requests


def words(requests: Iterable[QuotaRequest], queue: Queue | None) -> str:
    """What the queue says to the requests."""
    answers = queue.answers if queue else {}
    each = dict.fromkeys(answers[request.name].message for request in requests if request.name in answers)
    return "; ".join(filter(None, each))


def _usable(status: JobStatus, observed: Observed) -> list[QuotaRequest]:
    gone = lost(status, observed)
    return [request for request in status.quota_requests if request.admitted and request not in gone]


def _free(status: JobStatus, observed: Observed) -> int:
    return sum(request.free for request in _usable(status, observed))


def _coming(status: JobStatus, observed: Observed, stuck: Set[int]) -> int:
    """Quota of workers that are not wanted any more and whose pods are not gone yet."""
    others = {*status.worker_ids, *status.releasing_ids, *(stuck if status.plan is None else ())}
    used = (key for request in _usable(status, observed) for key in request.worker_ids)
    return sum(key not in others for key in used)
