"""Where the time of a regroup goes."""

import time


class Phases:
    """Laps of one regroup on one worker, from when it knew of the generation. A name may come again."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """What was done since the last lap was this phase."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def leave_out(self, seconds: float) -> None:
        """So many of those since the last lap belong to no phase."""
        self._last += seconds

    @property
    def total(self) -> float:
        """Seconds up to the last lap."""
        return sum(self.seconds.values())
