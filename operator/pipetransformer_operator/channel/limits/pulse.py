"""How often workers are to speak, and statuses to change in words alone: the more there are, the more rarely, so that
one operator and one API server hear them all.

A worker opens a connection for each heartbeat, which costs the operator a millisecond; one that stayed open would cost
it memory instead. A report of mere progress costs a write of the status besides, for which the API server needs up to
twenty milliseconds. What decides something is said at once, whatever the pace.
"""

from pipetransformer_operator.plan.types import SHORTEST_PACE

#: Of all workers together.
BEATS_PER_SECOND = 50
#: Mere progress, of all leaders together.
REPORTS_PER_SECOND = 10
#: Statuses, of all jobs together, of which only words for people differ.
WORDS_PER_SECOND = 10
#: Turns of all loops together, about, that nobody waits for.
NOTICES_PER_SECOND = 2000
SHORTEST_REPORT_SECONDS = 5.0
SHORTEST_WORDS_SECONDS = 1.0


class Pulse:
    """The pace of all workers and jobs of one operator. Boards say how many there are."""

    def __init__(self) -> None:
        self._workers = 0
        self._jobs = 0

    def add(self, *, workers: int, jobs: int = 0) -> None:
        """There are so many more, or fewer."""
        self._workers += workers
        self._jobs += jobs

    @property
    def beat_seconds(self) -> float:
        """Between two heartbeats of one worker."""
        return max(SHORTEST_PACE.total_seconds(), self._workers / BEATS_PER_SECOND)

    @property
    def report_seconds(self) -> float:
        """Between two reports of mere progress of one leader."""
        return max(SHORTEST_REPORT_SECONDS, self._jobs / REPORTS_PER_SECOND)

    @property
    def words_seconds(self) -> float:
        """Between two writes of one job's status of which only words for people differ."""
        return max(SHORTEST_WORDS_SECONDS, self._jobs / WORDS_PER_SECOND)

    @property
    def notice_seconds(self) -> float:
        """How long a job's loop waits for more before it looks at a change that nobody waits for an answer to."""
        return self._jobs / NOTICES_PER_SECOND
