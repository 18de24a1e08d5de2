"""What a job may use of the quota that its queue granted, and which worker uses which request.

Quota counts as used until the worker's pod is gone, so a replacement waits until the pod that it replaces ends. A start
does not wait for a pod that may stay for days, because all its other workers would wait with it.
"""

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from pipetransformer_contract.api.status import JobStatus, QuotaRequest
from pipetransformer_operator.plan.types import Observed, Queue


def lost(status: JobStatus, observed: Observed) -> list[QuotaRequest]:
    """Admitted requests whose quota the queue reclaims or has taken. A silent queue takes nothing."""
    queue = observed.queue
    if queue is None or queue.problem:
        return []
    admitted = {name for name, answer in queue.answers.items() if answer.admitted}
    return [request for request in status.quota_requests if request.admitted and request.name not in admitted]


def lost_ids(status: JobStatus, observed: Observed) -> frozenset[int]:
    """Ids of workers that must leave because the queue reclaims their quota."""
    return frozenset(key for request in lost(status, observed) for key in request.worker_ids)


class Room(NamedTuple):
    """Quota of one kind, of the starting size or of claims, in workers.

    Attributes:
        free: unused.
        coming: of workers that are no longer wanted, but whose pods still exist.
        waiting: asked for, but not granted yet.
    """

    free: int
    coming: int
    waiting: int

    @property
    def granted(self) -> int:
        """Quota that new workers may use, now or soon."""
        return self.free + self.coming


def room(status: JobStatus, observed: Observed, stuck: Set[int], *, own: bool) -> Room:
    """Quota for workers of the starting size (`own`), or for claims. `stuck`: ids of workers whose pods may stay for
    days."""
    usable = _usable(status, observed, own=own)
    others = {*status.worker_ids, *status.releasing_ids, *(stuck if status.generation is None else ())}
    used = (key for request in usable for key in request.worker_ids)
    return Room(
        free=sum(request.free for request in usable),
        coming=sum(key not in others for key in used),
        waiting=sum(request.workers for request in _of_kind(status, own=own) if not request.admitted),
    )


def assign(status: JobStatus, observed: Observed, created: Sequence[int], *, own: bool) -> list[QuotaRequest]:
    """The requests, with new workers on free quota of one kind; the oldest request is filled first."""
    left, changed = list(created), {}
    for request in _usable(status, observed, own=own):
        taken, left = left[: request.free], left[request.free :]
        changed[request.name] = request.model_copy(update={"worker_ids": [*request.worker_ids, *taken]})
    assert not left, "more workers than quota"
    return [changed.get(request.name, request) for request in status.quota_requests]


def without_waiting(status: JobStatus, *, own: bool) -> list[QuotaRequest]:
    """The requests without those of one kind that wait; the first request always stays."""
    kind = _of_kind(status, own=own)
    others = (request for request in status.quota_requests[1:] if request.admitted or request not in kind)
    return [*status.quota_requests[:1], *others]


def give_back(status: JobStatus, most: int, *, own: bool) -> list[QuotaRequest]:
    """The requests after returning up to `most` unused quota of one kind, without those that are empty then. The first
    request always stays."""
    most, changed = max(0, most), {}
    for request in _of_kind(status, own=own):
        given = min(most, request.free) if request.admitted else 0
        most -= given
        changed[request.name] = request.model_copy(update={"returned": request.returned + given})
    requests = [changed.get(request.name, request) for request in status.quota_requests]
    return [*requests[:1], *(request for request in requests[1:] if request.granted)]


def words(requests: Iterable[QuotaRequest], queue: Queue | None) -> str:
    """The queue's messages about the requests."""
    answers = queue.answers if queue else {}
    each = dict.fromkeys(answers[request.name].message for request in requests if request.name in answers)
    return "; ".join(filter(None, each))


def _of_kind(status: JobStatus, *, own: bool) -> list[QuotaRequest]:
    names = {request.name for request in status.own_requests}
    return [request for request in status.quota_requests if (request.name in names) is own]


def _usable(status: JobStatus, observed: Observed, *, own: bool) -> list[QuotaRequest]:
    """Admitted requests of one kind that the queue does not reclaim."""
    gone = lost(status, observed)
    return [request for request in _of_kind(status, own=own) if request.admitted and request not in gone]
