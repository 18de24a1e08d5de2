"""Measures on this worker whether reading outputs from the cache is faster than computing them."""

import statistics
import time
from collections import deque

import torch

_LEAST_MEASURED = 8
_MEASURED = 64


class SampleTimer:
    """Measures how long the device works on a sample, from `start` to `stop`. On a CPU that is known at once, on an
    accelerator only later."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._begun = 0.0
        self._begin: torch.cuda.Event | None = None
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event, int, deque[float]]] = deque()

    def start(self) -> None:
        if self._cuda:
            self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._begin.record()
        else:
            self._begun = time.perf_counter()

    def stop(self, samples: int, into: deque[float]) -> None:
        """End a measurement of `samples` samples. The seconds of one sample are appended to `into`, now or later."""
        if self._begin is not None:
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end.record()
            self._running.append((self._begin, end, samples, into))
            while self._running and self._running[0][1].query():  # type: ignore[no-untyped-call]
                begin, end, samples, into = self._running.popleft()
                into.append(begin.elapsed_time(end) / 1000 / samples)
        else:
            into.append((time.perf_counter() - self._begun) / samples)


class Choice:
    """Chooses between reading and computing, by the medians of the latest measurements, in seconds a sample. While
    there are few measurements, it chooses to read.

    Attributes:
        computing: seconds to compute all frozen units.
        gathering: seconds to bring entries from host memory to the device.
        waiting: seconds to read entries from disk into host memory.
    """

    def __init__(self, always: bool) -> None:
        self._always = always
        self.computing: deque[float] = deque(maxlen=_MEASURED)
        self.gathering: deque[float] = deque(maxlen=_MEASURED)
        self.waiting: deque[float] = deque(maxlen=_MEASURED)

    def forget_computing(self) -> None:
        """Measure `computing` again. The measurements of reading stay valid."""
        self.computing = deque(maxlen=_MEASURED)  # a new one: a running measurement may still append to the old one

    @property
    def is_made(self) -> bool:
        """Whether there are enough measurements of reading to compare."""
        return self._always or len(self.gathering) >= _LEAST_MEASURED

    @property
    def memory_pays(self) -> bool:
        return self._pays(self.gathering)

    @property
    def disk_pays(self) -> bool:
        return self._pays(self.gathering, self.waiting)

    def _pays(self, *reading: deque[float]) -> bool:
        if self._always or min(map(len, (self.computing, *reading))) < _LEAST_MEASURED:
            return True
        return sum(map(statistics.median, reading)) < statistics.median(self.computing)
