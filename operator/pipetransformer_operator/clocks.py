"""Clocks as arguments, so that tests set the time."""

from collections.abc import Callable
from datetime import UTC, datetime

#: The present time, with its time zone.
Clock = Callable[[], datetime]
#: Seconds that only grow, such as `time.monotonic`.
Stopwatch = Callable[[], float]


def utc_now() -> datetime:
    """The present time in UTC."""
    return datetime.now(UTC)
