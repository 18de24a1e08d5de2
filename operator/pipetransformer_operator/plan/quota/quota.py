"""What a job may use of the quota that its queue granted, and which worker uses which request.

Quota counts as used until the worker's pod is gone, so a replacement waits until the pod that it replaces ends. A start
does not wait for a pod that may stay for days, because all its other workers would wait with it.
"""

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from pipetransformer_contract.api.status import JobStatus, QuotaRequest
from pipetransformer_operator.plan.types import Observed, Queue

from .requests import Requests, admitted, of_kind, waiting


def lost(status: JobStatus, observed: Observed) -> Requests:
    """Admitted requests whose quota the queue reclaims or has taken. A silent queue takes nothing."""
    queue = observed.queue
    if queue is None or queue.problem:
        return Requests()
    kept = {name for name, answer in queue.answers.items() if answer.admitted}
    return admitted(status).without(kept)


def lost_ids(status: JobStatus, observed: Observed) -> frozenset[int]:
    """Ids of workers that must leave because the queue reclaims their quota."""
    return frozenset(lost(status, observed).worker_ids)


class Room(NamedTuple):
    """How many workers have quota of one kind: of the starting size, or of claims.

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
    may_use = usable(status, observed, own=own)
    others = {*status.worker_ids, *status.releasing_ids, *(stuck if status.generation is None else ())}
    return Room(
        free=may_use.free,
        coming=len(set(may_use.worker_ids) - others),
        waiting=sum(request.workers for request in of_kind(status, waiting(status), own=own)),
    )


def assign(status: JobStatus, observed: Observed, created: Sequence[int], *, own: bool) -> list[QuotaRequest]:
    """The requests, with new workers on free quota of one kind; the oldest request is filled first."""
    left, changed = list(created), {}
    for request in usable(status, observed, own=own):
        taken, left = left[: request.free], left[request.free :]
        changed[request.name] = request.model_copy(update={"worker_ids": [*request.worker_ids, *taken]})
    assert not left, "more workers than quota"
    return [changed.get(request.name, request) for request in status.quota_requests]


def without_waiting(status: JobStatus, *, own: bool) -> list[QuotaRequest]:
    """The requests without those of one kind that wait; the first request always stays."""
    withdrawn = of_kind(status, waiting(status), own=own).names
    return [*status.quota_requests[:1], *Requests(status.quota_requests[1:]).without(withdrawn)]


def give_back(status: JobStatus, most: int, *, own: bool) -> list[QuotaRequest]:
    """The requests after returning up to `most` unused quota of one kind, without those that are empty then. The first
    request always stays."""
    most, changed = max(0, most), {}
    for request in of_kind(status, admitted(status), own=own):
        given = min(most, request.free)
        most -= given
        changed[request.name] = request.less(given)
    return list(Requests(changed.get(request.name, request) for request in status.quota_requests).needed)


def words(requests: Iterable[QuotaRequest], queue: Queue | None) -> str:
    """The queue's messages about the requests."""
    answers = queue.answers if queue else {}
    each = dict.fromkeys(answers[request.name].message for request in requests if request.name in answers)
    return "; ".join(filter(None, each))


def usable(status: JobStatus, observed: Observed, *, own: bool) -> Requests:
    """Admitted requests of one kind that the queue does not reclaim."""
    return of_kind(status, admitted(status), own=own).without(lost(status, observed).names)
