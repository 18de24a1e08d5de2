"""Times the phases of a regroup."""

import time


class Phases:
    """Times one regroup on one worker, from the moment when the worker knows of the generation.

    Attributes:
        seconds: seconds of each phase, by name. A phase may have several laps.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Add the time since the last lap to the phase `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def leave_out(self, seconds: float) -> None:
        """Exclude `seconds` of the time since the last lap from all phases."""
        self._last += seconds

    @property
    def total(self) -> float:
        """Seconds of all phases, up to the last lap."""
        return sum(self.seconds.values())
