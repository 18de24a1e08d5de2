"""Measures how long a worker's computations take in a round. It waits for the device once, after the round."""

import time

import torch


class Stopwatch:
    """Sums the spans of time between `start` and `stop`, by the host's clock."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._started = 0.0

    def start(self) -> None:
        """Call when a computation begins, or continues after a wait."""
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Call when a computation ends, or begins to wait."""
        self._seconds += time.perf_counter() - self._started

    def reset(self) -> None:
        """Forget all measurements, for example those of a round that broke."""
        self._seconds = 0.0

    def take(self) -> float:
        """Wait until the device has finished all computations. Returns their seconds since the last `take` or
        `reset`."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class DeviceStopwatch(Stopwatch):
    """Measures on a GPU, by CUDA events in the current stream. The host's clock would only measure the launches.

    After a receive the stream waits for the message. So an event that is recorded then has the time of its arrival.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        #: Events in the order of their recording. Each round uses the same events again.
        self._events: list[torch.cuda.Event] = []
        self._used = 0

    def start(self) -> None:
        self._note()

    def stop(self) -> None:
        self._note()

    def reset(self) -> None:
        self._used = 0

    def take(self) -> float:
        noted = self._events[: self._used]
        self._used = 0
        if noted:
            # A worker whose layers are all frozen has no gradients to wait for, so its device may still compute.
            noted[-1].synchronize()
        milliseconds: float = sum(start.elapsed_time(stop) for start, stop in zip(noted[::2], noted[1::2], strict=True))
        return milliseconds / 1000

    def _note(self) -> None:
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._events[self._used].record(torch.cuda.current_stream(self._device))
        self._used += 1


def make_stopwatch(device: torch.device) -> Stopwatch:
    """A stopwatch for computations on this device."""
    return DeviceStopwatch(device) if device.type == "cuda" else Stopwatch()
