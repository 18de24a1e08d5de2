"""Times of a regroup, by phase."""

import time


class Phases:
    """Seconds of one regroup on one worker, from when it knew of the generation. A phase may have several laps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Add the time since the last lap to a phase."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def add(self, name: str, seconds: float) -> None:
        """Add a phase that came before the regroup."""
        self.seconds = {name: seconds, **self.seconds}

    def leave_out(self, seconds: float) -> None:
        """Exclude `seconds` of the time since the last lap from all phases."""
        self._last += seconds

    @property
    def total(self) -> float:
        """Seconds up to the last lap."""
        return sum(self.seconds.values())
