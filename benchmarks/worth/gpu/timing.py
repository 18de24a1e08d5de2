"""Seconds of work on a device: by CUDA events on a GPU, by the clock on a CPU."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

#: Products in TensorFloat32 of float32 weights, or in bfloat16. Weights are float32 in both.
PRECISIONS = ("tf32", "bf16")


@dataclass(frozen=True)
class Effort:
    """How often each thing is measured.

    Attributes:
        warm_ups: runs before the first that counts.
        repeats: runs of which the median counts.
        budget_seconds: a thing that takes longer is measured less often, but at least once.
    """

    warm_ups: int = 3
    repeats: int = 15
    budget_seconds: float = 0.5


class Clock:
    """Measures on one device.

    Args:
        device: the GPU, or the CPU.
        effort: how often.
    """

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self.device = device
        self._effort = effort

    def wait(self) -> None:
        """Waits until the device has done all work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def median(self, work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        """Median seconds of `work` on the device. `before` runs ahead of each, and does not count."""
        return statistics.median(self._all(work, before))

    def wall(self, work: Callable[[], object]) -> float:
        """Median seconds of `work` by the host's clock, until the device has done it."""
        found = []
        for _ in self._times(work):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            found.append(time.perf_counter() - began)
        return statistics.median(found)

    def launch(self, work: Callable[[], object]) -> float:
        """Median seconds until `work` has handed everything to the device."""
        found = []
        for _ in self._times(work):
            self.wait()
            began = time.perf_counter()
            work()
            found.append(time.perf_counter() - began)
        self.wait()
        return statistics.median(found)

    def _all(self, work: Callable[[], object], before: Callable[[], object]) -> list[float]:
        found = []
        for _ in self._times(work, before):
            before()
            self.wait()
            with self._span() as elapsed:
                work()
            found.append(elapsed())
        return found

    def _times(self, work: Callable[[], object], before: Callable[[], object] = lambda: None) -> range:
        """Runs `work` until it is warm. Returns as many turns as the budget has room for."""
        took = 0.0
        for _ in range(self._effort.warm_ups):
            before()
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            took = time.perf_counter() - began
        return range(max(1, min(self._effort.repeats, int(self._effort.budget_seconds / max(took, 1e-9)))))

    @contextlib.contextmanager
    def _span(self) -> Iterator[Callable[[], float]]:
        if self.device.type != "cuda":
            ended = [0.0]
            began = time.perf_counter()
            yield lambda: ended[0] - began
            ended[0] = time.perf_counter()
            return
        first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        first.record()
        yield lambda: _between(first, last)
        last.record()


def _between(first: torch.cuda.Event, last: torch.cuda.Event) -> float:
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000


def products(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Within it, products are computed in a precision of `PRECISIONS`."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def line_through(counts: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Least squares of `seconds = fixed + per * count`, both at least 0.

    Raises:
        ValueError: there is no point.
    """
    if not counts:
        raise ValueError("a line needs at least one point")
    middle, mean = statistics.fmean(counts), statistics.fmean(seconds)
    spread = sum((count - middle) ** 2 for count in counts)
    slope = sum((count - middle) * (one - mean) for count, one in zip(counts, seconds, strict=True))
    per = slope / spread if spread else 0.0
    if per <= 0:  # it costs the same at every count
        return mean, 0.0
    if mean - per * middle >= 0:
        return mean - per * middle, per
    through_origin = sum(count * one for count, one in zip(counts, seconds, strict=True))
    return 0.0, through_origin / sum(count**2 for count in counts)
