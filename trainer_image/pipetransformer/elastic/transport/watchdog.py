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
from collections.abc import Callable, Iterator

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


class Watchdog:
    """Watches what the training thread does, one thing at a time."""

    def __init__(self, *, floor_seconds: float = FLOOR_SECONDS, first_seconds: float = FIRST_SECONDS) -> None:
        self._floor_seconds = floor_seconds
        self._first_seconds = first_seconds
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_RUNS))
        #: How often an activity was overdue, or nearly, since it last ended well.
        self._overdue: dict[str, int] = defaultdict(int)
        self._lock = threading.Lock()
        self._watched: tuple[Connections, Callable[[], bool]] | None = None
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
    def timing(self, activity: str, connections: Connections, like: str | None = None) -> Iterator[Callable[[], None]]:
        """Shut `connections` if the block takes longer than its activity may; see `limit`.

        Gives what a block that does it several times calls in between: each time counts by itself, and what was
        overdue before doubles the limit of all until the block has ended well.
        """
        begun, limit = time.monotonic(), self.limit(activity, like)
        deadline = Deadline(limit)

        def ended() -> None:
            nonlocal begun, limit
            now = time.monotonic()
            self._seconds[activity].append(now - begun)
            begun, limit = now, self.limit(activity)
            deadline.put_off(limit)

        try:
            with self.watching(connections, deadline.is_past):
                yield ended
        except BaseException:
            self._overdue[activity] += time.monotonic() - begun > limit / 2
            raise
        self._overdue[activity] = 0
        ended()

    @contextlib.contextmanager
    def watching(self, connections: Connections, overdue: Callable[[], bool]) -> Iterator[None]:
        """Shut `connections` once `overdue()` holds while the block runs, and whatever it opens from then on."""
        with self._lock:
            self._watched = (connections, overdue)
        try:
            yield
        finally:
            with self._lock:
                self._watched = None

    def _run(self) -> None:
        fired: object = None
        while not self._stop.wait(_LOOK_SECONDS):
            with self._lock:
                if self._watched is None or not self._watched[1]():
                    continue
                if fired is not self._watched:
                    fired = self._watched
                    logger.warning("no progress: breaking the connections that this worker waits on")
                self._watched[0].shut()


class Deadline:
    """A moment some seconds from now, that may be put off."""

    def __init__(self, seconds: float) -> None:
        self.put_off(seconds)

    def put_off(self, seconds: float) -> None:
        """Begin again, with so many seconds."""
        self._at = time.monotonic() + seconds

    def is_past(self) -> bool:
        return time.monotonic() > self._at
