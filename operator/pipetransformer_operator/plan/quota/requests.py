"""A tuple of a job's quota requests with the filters and sums that rules need."""

from collections.abc import Callable, Container

from pipetransformer_contract.api.status import JobStatus, QuotaRequest


class Requests(tuple[QuotaRequest, ...]):
    """Some of a job's requests, the oldest first. Filters keep the order, and return another `Requests`."""

    __slots__ = ()

    @property
    def names(self) -> frozenset[str]:
        """Names of these requests."""
        return frozenset(request.name for request in self)

    @property
    def worker_ids(self) -> list[int]:
        """Ids of workers that use quota of these requests."""
        return [key for request in self for key in request.worker_ids]

    @property
    def granted(self) -> int:
        """How many workers these requests are for, without those whose quota was returned."""
        return sum(request.granted for request in self)

    @property
    def free(self) -> int:
        """How many more workers may use quota of these requests."""
        return sum(request.free for request in self)

    def that(self, holds: Callable[[QuotaRequest], bool]) -> "Requests":
        """The requests for which `holds` returns true."""
        return Requests(filter(holds, self))

    def without(self, names: Container[str]) -> "Requests":
        """The requests whose names are not in `names`."""
        return self.that(lambda request: request.name not in names)

    @property
    def needed(self) -> "Requests":
        """The requests without those whose quota was all returned. The first one always stays."""
        return Requests((*self[:1], *filter(lambda request: request.granted, self[1:])))


def admitted(status: JobStatus) -> Requests:
    """Requests that the queue admitted."""
    return Requests(status.quota_requests).that(lambda request: request.admitted)


def waiting(status: JobStatus) -> Requests:
    """Requests that the queue has not admitted yet."""
    return Requests(status.quota_requests).that(lambda request: not request.admitted)


def of_kind(status: JobStatus, requests: Requests, *, starting: bool) -> Requests:
    """The requests that are for workers of the starting size (`starting`), or those that are for claims."""
    names = {request.name for request in status.own_requests}
    return requests.that(lambda request: (request.name in names) is starting)
