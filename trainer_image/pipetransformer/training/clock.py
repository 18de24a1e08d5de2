"""The clock by which a pause is measured, although it may begin under one leader and end under another."""

import time


def wall_clock() -> float:
    """Return seconds since the Unix epoch. A new leader compares them with the old leader's; a monotonic clock cannot
    be compared between hosts."""
    return time.time()
