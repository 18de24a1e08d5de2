"""Several requests of one job to its queue, and what rules ask of them together."""

from collections.abc import Callable, Container

from pipetransformer_contract.api.status import JobStatus, QuotaRequest


class Requests(tuple[QuotaRequest, ...]):
    """Some requests, the oldest first. Each question returns those that it names."""

    __slots__ = ()

    @property
    def names(self) -> frozenset[str]:
        """Their names."""
        return frozenset(request.name for request in self)

    @property
    def worker_ids(self) -> list[int]:
        """Ids of the workers that use their quota."""
        return [key for request in self for key in request.worker_ids]

    @property
    def granted(self) -> int:
        """Workers that they are for, without those whose quota was returned."""
        return sum(request.granted for request in self)

    @property
    def free(self) -> int:
        """Workers that their quota still allows, in addition to those that use it."""
        return sum(request.free for request in self)

    def that(self, holds: Callable[[QuotaRequest], bool]) -> "Requests":
        """Those for which `holds` is true."""
        return Requests(filter(holds, self))

    def without(self, names: Container[str]) -> "Requests":
        """Those with other names."""
        return self.that(lambda request: request.name not in names)

    @property
    def needed(self) -> "Requests":
        """Those whose quota was not returned as a whole. The first one always stays."""
        return Requests((*self[:1], *filter(lambda request: request.granted, self[1:])))


def admitted(status: JobStatus) -> Requests:
    """Requests that the queue admitted."""
    return Requests(status.quota_requests).that(lambda request: request.admitted)


def waiting(status: JobStatus) -> Requests:
    """Requests that the queue has not admitted yet."""
    return Requests(status.quota_requests).that(lambda request: not request.admitted)


def of_kind(status: JobStatus, requests: Requests, *, own: bool) -> Requests:
    """Those of the requests that are for workers of the starting size (`own`), or those that are claims."""
    names = {request.name for request in status.own_requests}
    return requests.that(lambda request: (request.name in names) is own)
