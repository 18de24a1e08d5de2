"""How often one sender may ask: a token bucket for each key."""

import time
from collections.abc import Hashable

from pipetransformer_operator.clocks import Stopwatch

MAX_KEYS = 32768


class Rate:
    """Each key may act `burst` times at once and `per_second` times in the long run.

    Args:
        per_second: actions a second.
        burst: actions at once.
        clock: seconds that only grow.
    """

    def __init__(self, per_second: float, burst: int, clock: Stopwatch = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._full_at: dict[Hashable, float] = {}

    def take(self, key: Hashable) -> float:
        """Counts one action and returns 0 if it is allowed now; otherwise returns the seconds until it is."""
        wait = self.wait(key)
        if not wait:
            if len(self._full_at) >= MAX_KEYS:
                now = self._clock()
                self._full_at = {known: full for known, full in self._full_at.items() if full > now}
            self._full_at[key] = max(self._full_at.get(key, 0.0), self._clock()) + 1 / self._per_second
        return wait

    def undo(self, key: Hashable) -> None:
        """Takes back one action, as if it had not been counted."""
        if key in self._full_at:
            self._full_at[key] -= 1 / self._per_second

    def wait(self, key: Hashable) -> float:
        """Seconds until the key may act again."""
        ahead = self._full_at.get(key, 0.0) - self._clock()
        return max(0.0, ahead - (self._burst - 1) / self._per_second)
