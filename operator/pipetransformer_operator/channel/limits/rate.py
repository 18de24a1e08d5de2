"""How often one sender may ask: token buckets, one a key."""

import time
from collections.abc import Callable, Hashable

MAX_KEYS = 32768


class Rate:
    """Each key may do `burst` things at once and `per_second` in the long run.

    Args:
        per_second: things a second.
        burst: things at once.
        clock: seconds that only grow.
    """

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._full_at: dict[Hashable, float] = {}

    def take(self, key: Hashable) -> float:
        """Does one thing: 0 when it may be done now, else seconds until it may."""
        wait = self.wait(key)
        if not wait:
            if len(self._full_at) >= MAX_KEYS:
                now = self._clock()
                self._full_at = {known: full for known, full in self._full_at.items() if full > now}
            self._full_at[key] = max(self._full_at.get(key, 0.0), self._clock()) + 1 / self._per_second
        return wait

    def give_back(self, key: Hashable) -> None:
        """One thing that was taken does not count."""
        if key in self._full_at:
            self._full_at[key] -= 1 / self._per_second

    def wait(self, key: Hashable) -> float:
        """Seconds until the key may do one more thing."""
        ahead = self._full_at.get(key, 0.0) - self._clock()
        return max(0.0, ahead - (self._burst - 1) / self._per_second)
