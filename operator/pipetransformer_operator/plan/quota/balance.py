"""Counts how much of its granted quota a job may use, and assigns workers to requests.

Quota counts as used until the worker's pod is gone, so a replacement waits until the old pod ends. A start does not
wait for a pod that may stay for days, such as one on a lost node. All its other workers would wait too.
"""

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from pipetransformer_contract.api.status import JobStatus, QuotaRequest
from pipetransformer_operator.plan.types import Observed, Queue

from .requests import Requests, admitted, of_kind, waiting


def lost(status: JobStatus, observed: Observed) -> Requests:
    """Admitted requests whose quota the queue reclaims or has withdrawn. None while the queue's answers are unknown."""
    queue = observed.queue
    if queue is None or queue.problem:
        return Requests()
    kept = {name for name, answer in queue.answers.items() if answer.admitted}
    return admitted(status).without(kept)


def lost_ids(status: JobStatus, observed: Observed) -> frozenset[int]:
    """Ids of workers that must leave because the queue reclaims their quota."""
    return frozenset(lost(status, observed).worker_ids)


class Available(NamedTuple):
    """Quota of one kind, in workers. The kinds are quota of the starting size, and quota of claims.

    Attributes:
        free: granted and unused.
        coming: granted, and used by workers that are no longer wanted, but whose pods still exist.
        waiting: requested, but not granted yet.
    """

    free: int
    coming: int
    waiting: int

    @property
    def granted(self) -> int:
        """How many new workers may use granted quota, now or soon."""
        return self.free + self.coming


def available(status: JobStatus, observed: Observed, stuck: Set[int], *, starting: bool) -> Available:
    """Quota of the starting size (`starting`), or of claims. `stuck`: ids of workers whose pods may stay for days."""
    may_use = usable(status, observed, starting=starting)
    others = {*status.worker_ids, *status.releasing_ids, *(stuck if status.generation is None else ())}
    return Available(
        free=may_use.free,
        coming=len(set(may_use.worker_ids) - others),
        waiting=sum(request.workers for request in of_kind(status, waiting(status), starting=starting)),
    )


def assign(status: JobStatus, observed: Observed, created: Sequence[int], *, starting: bool) -> list[QuotaRequest]:
    """The job's requests after the `created` workers took free quota of one kind, from the oldest request first."""
    left, changed = list(created), {}
    for request in usable(status, observed, starting=starting):
        taken, left = left[: request.free], left[request.free :]
        changed[request.name] = request.model_copy(update={"worker_ids": [*request.worker_ids, *taken]})
    assert not left, "more workers than quota"
    return [changed.get(request.name, request) for request in status.quota_requests]


def without_waiting(status: JobStatus, *, starting: bool) -> list[QuotaRequest]:
    """The job's requests without those of one kind that are not admitted yet. The first request always stays."""
    withdrawn = of_kind(status, waiting(status), starting=starting).names
    return [*status.quota_requests[:1], *Requests(status.quota_requests[1:]).without(withdrawn)]


def after_return(status: JobStatus, most: int, *, starting: bool) -> list[QuotaRequest]:
    """The job's requests after up to `most` workers' unused quota of one kind was returned.

    Requests without remaining quota are left out, except the first request, which always stays."""
    most, changed = max(0, most), {}
    for request in of_kind(status, admitted(status), starting=starting):
        given = min(most, request.free)
        most -= given
        changed[request.name] = request.less(given)
    return list(Requests(changed.get(request.name, request) for request in status.quota_requests).needed)


def words(requests: Iterable[QuotaRequest], queue: Queue | None) -> str:
    """The queue's messages about these requests, as one text."""
    answers = queue.answers if queue else {}
    each = dict.fromkeys(answers[request.name].message for request in requests if request.name in answers)
    return "; ".join(filter(None, each))


def usable(status: JobStatus, observed: Observed, *, starting: bool) -> Requests:
    """Admitted requests of one kind that the queue does not reclaim."""
    return of_kind(status, admitted(status), starting=starting).without(lost(status, observed).names)
