"""A queue for `plan()`: it admits what fits, in order, and takes back what it is told to; never before it is given."""

from pipetransformer_contract.api import JobStatus
from pipetransformer_operator.plan import Answer, Queue

QUEUE = "team-a"


class FakeQueue:
    """See the module.

    Attributes:
        size: workers that it has quota for.
        problem: why nothing is known of it.
        evicted: names of requests whose quota it wants back.
        withdrawn: names of requests that somebody deleted.
    """

    def __init__(self, size: int = 8192) -> None:
        self.size = size
        self.problem = ""
        self.evicted: set[str] = set()
        self.withdrawn: set[str] = set()
        self._held: dict[str, int] = {}

    @property
    def held(self) -> int:
        """Quota that the job has, in workers; until it gives it back."""
        return sum(self._held.values())

    def look(self, status: JobStatus) -> Queue:
        """What it says to the requests of a status."""
        if not self.problem:
            self._follow(status)
        answers = {}
        for request in status.quota_requests:
            name = request.name
            if name in self.withdrawn:
                answers[name] = Answer(False, "deleted", withdrawn=True)
            elif name in self.evicted:
                answers[name] = Answer(False, "preempted by another job")
            else:
                answers[name] = Answer(name in self._held, "" if name in self._held else "no quota is left")
        return Queue(problem=self.problem, answers=answers)

    def _follow(self, status: JobStatus) -> None:
        """Does what the job asks, as after each write of its status."""
        wanted = {request.name: request for request in status.quota_requests}
        for name in self._held.keys() - wanted.keys():
            del self._held[name]
        for name, request in wanted.items():
            size = request.workers - request.returned
            if name in self._held and request.admitted:
                assert size <= self._held[name], "returned quota never comes back"
                self._held[name] = size
            elif name in self.evicted:  # it waits again
                self._held.pop(name, None)
                self.evicted.discard(name)
        for name, request in wanted.items():
            size = request.workers - request.returned
            if name not in self._held and name not in self.withdrawn and self.held + size <= self.size:
                self._held[name] = size
