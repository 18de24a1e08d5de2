"""Ends waits that nothing else would end: on a peer that hangs, or for a generation that has been given up.

A dead peer closes its connections and is noticed at once. One that is stopped, or whose node lost its network, says
nothing; so a thread watches this worker's own progress and, when that is overdue, shuts the connections that it waits
on. To the worker that looks like any other broken connection.
"""

import contextlib
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Protocol

from .connections import Connections

logger = logging.getLogger(__name__)

#: How many times the longest of its last runs an activity may take, and no less than the floor.
MULTIPLE = 10.0
FLOOR_SECONDS = 30.0
#: What an activity may take that was never done before: kernels compile, files are read.
FIRST_SECONDS = 300.0
#: No network that one would train over is slower.
SLOWEST_BYTES_PER_SECOND = 50e6
#: The activity by which others may be judged before they were done once.
ROUND = "round"
_LOOK_SECONDS = 0.05
_RUNS = 16


class Limit(Protocol):
    """Says when a wait has to end."""

    def is_past(self) -> bool:
        """Asked by the watchdog's thread, many times a second."""
        ...


class Watchdog:
    """Watches what the training thread does, one thing at a time."""

    def __init__(self, *, floor_seconds: float = FLOOR_SECONDS, first_seconds: float = FIRST_SECONDS) -> None:
        self._floor_seconds = floor_seconds
        self._first_seconds = first_seconds
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_RUNS))
        #: How often an activity was overdue, or nearly, since it last ended well.
        self._overdue: dict[str, int] = defaultdict(int)
        self._lock = threading.Lock()
        self._watched: tuple[Connections, Limit] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def limit(self, activity: str, like: str | None = None) -> float:
        """Seconds that an activity may take, by the last runs of the same name that ended well.

        Twice as many each time that it was overdue since: it may only be slower now, as a round in which blocks train
        again, or in fewer pipelines. One that broke when more than half of its time was over counts, too: limits differ
        a little, and whoever's is the shortest breaks the others'.

        Args:
            activity: its name.
            like: another one by which it is judged before it was done once.
        """
        seconds = self._seconds[activity] or (() if like is None else self._seconds[like])
        limit = max(self._floor_seconds, MULTIPLE * max(seconds)) if seconds else self._first_seconds
        return limit * 2.0 ** self._overdue[activity]

    def limit_to_move(self, num_bytes: int) -> float:
        """Seconds that moving state between workers may take."""
        return self._floor_seconds + num_bytes / SLOWEST_BYTES_PER_SECOND

    @contextlib.contextmanager
    def timing(self, activity: str, connections: Connections, like: str | None = None) -> Iterator["Timing"]:
        """Shut `connections` if the block takes longer than its activity may; see `limit`.

        Gives what a block that does it several times calls in between: each time counts by itself, and what was
        overdue before doubles the limit of all until the block has ended well.
        """
        timing = Timing(self, activity, like)
        try:
            with self.watching(connections, timing.deadline):
                yield timing
        except BaseException:
            self._overdue[activity] += timing.nearly_overdue
            raise
        self._overdue[activity] = 0
        timing.lap()

    def note(self, activity: str, seconds: float) -> None:
        """An activity took so long, and ended well."""
        self._seconds[activity].append(seconds)

    @contextlib.contextmanager
    def watching(self, connections: Connections, limit: Limit) -> Iterator[None]:
        """Shut `connections` once the limit is past while the block runs, and whatever it opens from then on."""
        with self._lock:
            self._watched = (connections, limit)
        try:
            yield
        finally:
            with self._lock:
                self._watched = None

    def _run(self) -> None:
        fired: object = None
        while not self._stop.wait(_LOOK_SECONDS):
            with self._lock:
                if self._watched is None or not self._watched[1].is_past():
                    continue
                if fired is not self._watched:
                    fired = self._watched
                    logger.warning("no progress: breaking the connections that this worker waits on")
                self._watched[0].shut()


class Timing:
    """The runs of one activity in one block of `Watchdog.timing`, each of which counts by itself."""

    def __init__(self, watchdog: Watchdog, activity: str, like: str | None) -> None:
        self._watchdog, self._activity = watchdog, activity
        self._begun, self._limit = time.monotonic(), watchdog.limit(activity, like)
        self.deadline = Deadline(self._limit)

    def lap(self) -> None:
        """A run has ended well, and the next one begins."""
        now = time.monotonic()
        self._watchdog.note(self._activity, now - self._begun)
        self._begun, self._limit = now, self._watchdog.limit(self._activity)
        self.deadline.put_off(self._limit)

    @property
    def nearly_overdue(self) -> bool:
        """Whether more than half of the present run's time is over."""
        return time.monotonic() - self._begun > self._limit / 2


class Deadline:
    """A moment some seconds from now, that may be put off."""

    def __init__(self, seconds: float) -> None:
        self.put_off(seconds)

    def put_off(self, seconds: float) -> None:
        """Begin again, with so many seconds."""
        self._at = time.monotonic() + seconds

    def is_past(self) -> bool:
        return time.monotonic() > self._at
