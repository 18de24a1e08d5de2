"""Ends waits for a peer that hangs, or for a generation that is void.

When a peer dies, its connections close, and this worker sees that at once. If the process of the peer is stopped, or
its node has lost the network, they stay open. So a thread watches the progress of this worker, and shuts the
connections when progress is overdue. The worker then sees broken connections, as after a death.
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

#: An activity may take this many times as long as the longest of its last runs, and at least `FLOOR_SECONDS`.
MULTIPLE = 10.0
FLOOR_SECONDS = 30.0
#: Limit of an activity's first run, because kernels are compiled and files are read in it.
FIRST_SECONDS = 300.0
#: A move of state may be as slow as this network, and gets `FLOOR_SECONDS` more.
SLOWEST_BYTES_PER_SECOND = 50e6
#: The activity whose runs set the limit of other activities before their first run.
ROUND = "round"
_LOOK_SECONDS = 0.05
#: Number of last runs that count.
_RUNS = 16


class Limit(Protocol):
    """Says when a wait has to end, and why."""

    def why_past(self) -> str:
        """Why the wait has to end now; empty if it may continue. The watchdog's thread asks many times a second. It may
        also ask just after the wait has ended, and then ignores the answer."""
        ...


class Watchdog:
    """Watches the activities of the training thread, one at a time."""

    def __init__(self, *, floor_seconds: float = FLOOR_SECONDS, first_seconds: float = FIRST_SECONDS) -> None:
        self._floor_seconds = floor_seconds
        self._first_seconds = first_seconds
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_RUNS))
        #: How often an activity was overdue, or nearly so, since it last ended well.
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

    def limit(self, activity: str, like: str | None = None, runs: int = 1) -> float:
        """Return how many seconds an activity may take, by its last runs that ended well.

        The limit doubles with each time that the activity was overdue since then. It may be slower now: a round, for
        example, when layers train again. A run that broke after half of its limit also counts as overdue, because
        another worker with a shorter limit may have broken it.

        Args:
            activity: name of the activity.
            like: name of another activity. Its runs count before the first run of this one.
            runs: number of runs that the limit is for, one after another.
        """
        seconds = self._seconds[activity] or (() if like is None else self._seconds[like])
        limit = max(self._floor_seconds, MULTIPLE * runs * max(seconds)) if seconds else self._first_seconds
        return limit * 2.0 ** self._overdue[activity]

    def limit_to_move(self, num_bytes: int) -> float:
        """Return how many seconds it may take to move `num_bytes` of state between workers."""
        return self._floor_seconds + num_bytes / SLOWEST_BYTES_PER_SECOND

    @contextlib.contextmanager
    def timing(
        self, activity: str, connections: Connections, like: str | None = None, runs: int = 1
    ) -> Iterator["Timing"]:
        """Shut `connections` if the block takes longer than `limit` allows. The arguments are also those of `limit`.

        A block may call `Timing.lap` between its runs. Then each part has its own limit. A doubled limit stays
        doubled until the whole block has ended well.
        """
        timing = Timing(self, activity, like, runs)
        try:
            with self.watching(connections, timing.deadline):
                yield timing
        except BaseException:
            self._overdue[activity] += timing.nearly_overdue
            raise
        self._overdue[activity] = 0
        timing.lap()

    def note(self, activity: str, seconds: float) -> None:
        """Note that a run of an activity ended well and took this long."""
        self._seconds[activity].append(seconds)

    @contextlib.contextmanager
    def watching(self, connections: Connections, limit: Limit) -> Iterator[None]:
        """While the block runs, shut `connections` once the limit is past. Those that it opens later are shut too."""
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
            if (watched := self._watched) is None:
                continue
            connections, limit = watched
            # Ask without the lock, which the training thread takes: a limit may have to ask another worker's store.
            if not (why := limit.why_past()):
                continue
            with self._lock:
                if self._watched is not watched:  # the wait ended meanwhile, and the next one may share its connections
                    continue
                if fired is not watched:
                    fired = watched
                    logger.warning("breaking connections: %s", why)
                connections.shut()


class Timing:
    """Times one block of `Watchdog.timing`, in parts of `runs` runs each."""

    def __init__(self, watchdog: Watchdog, activity: str, like: str | None, runs: int) -> None:
        self._watchdog, self._activity, self._runs = watchdog, activity, runs
        self._begun, self._limit = time.monotonic(), watchdog.limit(activity, like, runs)
        self.deadline = Deadline(activity, self._limit)

    def lap(self) -> None:
        """Note that this part of the block ended well, and begin the next part."""
        now = time.monotonic()
        self._watchdog.note(self._activity, (now - self._begun) / self._runs)
        self._begun, self._limit = now, self._watchdog.limit(self._activity, runs=self._runs)
        self.deadline.put_off(self._limit)

    @property
    def nearly_overdue(self) -> bool:
        """Whether more than half of the time for this part of the block is over."""
        return time.monotonic() - self._begun > self._limit / 2


class Deadline:
    """A point in time that can be put off. Implements `Limit`.

    Args:
        activity: what has to end by then, as `the {activity}` in the log.
        seconds: seconds from now.
    """

    def __init__(self, activity: str, seconds: float) -> None:
        self._activity = activity
        self.put_off(seconds)

    def put_off(self, seconds: float) -> None:
        """Set the deadline to `seconds` from now."""
        self._seconds = seconds
        self._at = time.monotonic() + seconds

    def why_past(self) -> str:
        if time.monotonic() <= self._at:
            return ""
        return f"no progress in the {self._activity} for {self._seconds:.1f} s"
