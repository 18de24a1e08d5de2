"""The pace of heartbeats, progress reports and cosmetic status writes: the more workers and jobs, the slower.

One operator and one API server must serve them all. A heartbeat opens a connection, which costs the operator 1 ms; an
open one would cost memory instead. A progress report also costs a status write, up to 20 ms in the API server. Anything
that decides something is reported at once, whatever the pace.
"""

import asyncio

from pipetransformer_operator.plan.types import SHORTEST_PACE

from .rate import Rate

#: Heartbeats of all workers together.
BEATS_PER_SECOND = 50
#: Progress reports of all leaders together.
REPORTS_PER_SECOND = 10
#: Checks of all jobs together whether they may write a status that changes only text for people.
WORDS_PER_SECOND = 10
#: Such writes of all jobs together: how many a second in the long run, and how many at once. One costs the API server
#: more than a worker's pod.
WORDS_RATE = (1.0, 10)
#: Approximate limit of the turns of all loops together that no worker waits for.
NOTICES_PER_SECOND = 500
SHORTEST_REPORT_SECONDS = 5.0
SHORTEST_WORDS_SECONDS = 1.0


class Pulse:
    """The pace of all workers and jobs of one operator. Boards count them here."""

    def __init__(self) -> None:
        self._workers = 0
        self._jobs = 0
        self._words = Rate(*WORDS_RATE, lambda: asyncio.get_running_loop().time())

    def add(self, *, workers: int, jobs: int = 0) -> None:
        """Adds workers and jobs; negative numbers remove them."""
        self._workers += workers
        self._jobs += jobs

    @property
    def beat_seconds(self) -> float:
        """Seconds between two heartbeats of one worker."""
        return max(SHORTEST_PACE.total_seconds(), self._workers / BEATS_PER_SECOND)

    @property
    def report_seconds(self) -> float:
        """Seconds between two progress reports of one leader."""
        return max(SHORTEST_REPORT_SECONDS, self._jobs / REPORTS_PER_SECOND)

    @property
    def words_seconds(self) -> float:
        """Shortest time in seconds between two status writes of one job that change only text for people."""
        return max(SHORTEST_WORDS_SECONDS, self._jobs / WORDS_PER_SECOND)

    def take_words(self) -> bool:
        """Returns whether a job may write such a status now, and counts the write."""
        return not self._words.take(None)

    @property
    def notice_seconds(self) -> float:
        """Seconds that a job's loop collects further changes before a turn that no worker waits for."""
        return self._jobs / NOTICES_PER_SECOND
