"""How changes of layout went, told from a job's status before and after each turn."""

import time
from collections.abc import Callable
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Histogram

from pipetransformer_contract.api import JobStatus
from pipetransformer_contract.api.status import Resize, ResizePhase
from pipetransformer_contract.messages import ResizeReason
from pipetransformer_operator.controller.ports import JobKey

from .names import PREFIX

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Direction(StrEnum):
    """Where a change of layout leads, in workers."""

    START = "Start"  #: from nothing
    GROW = "Grow"
    SHRINK = "Shrink"
    KEEP = "Keep"  #: as many workers, otherwise arranged


class Result(StrEnum):
    """How a change of layout ended."""

    COMMITTED = "Committed"  #: its members train in the new layout
    CANCELLED = "Cancelled"  #: before it was published: its workers did not come in time, or nobody wants it any more
    UNDONE = "Undone"  #: published, and its members went back to the layout before it
    SUPERSEDED = "Superseded"  #: a failure or a drain was more urgent


class Resizes:
    """Counts them and times their phases. What began before this operator did is counted and not timed.

    Args:
        registry: for the metrics.
        clock: seconds that only grow.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entered: dict[JobKey, tuple[ResizePhase, float]] = {}
        self._ended = Counter(
            f"{PREFIX}_resizes",
            f"Changes of layout that have ended, by direction ({_values(Direction)}) and result ({_values(Result)}).",
            ("direction", "result"),
            registry=registry,
        )
        self._seconds = Histogram(
            f"{PREFIX}_resize_phase_seconds",
            f"Seconds that changes of layout spent in a phase: {_values(ResizePhase)}.",
            ("phase",),
            buckets=_SECONDS,
            registry=registry,
        )

    def turned(self, key: JobKey, before: JobStatus, after: JobStatus) -> None:
        """Notes what a turn did to the job."""
        result = result_of(before, after)
        if result is not None and before.resize is not None:
            self._ended.labels(direction_of(before.resize).value, result.value).inc()
        phase = None if after.resize is None or after.finished else after.resize.phase
        known = self._entered.get(key)
        if known is not None and known[0] is not phase:
            self._seconds.labels(known[0].value).observe(self._clock() - known[1])
            del self._entered[key]
        began = before.resize is None or before.resize.phase is not phase
        if phase is not None and key not in self._entered and began:
            self._entered[key] = phase, self._clock()

    def gone(self, key: JobKey) -> None:
        """Nothing more is to be noted of the job."""
        self._entered.pop(key, None)


def direction_of(resize: Resize) -> Direction:
    """Where the change leads."""
    if resize.from_ is None:
        return Direction.START
    before, after = resize.from_.layout.workers, resize.to.layout.workers
    return Direction.GROW if after > before else Direction.SHRINK if after < before else Direction.KEEP


def result_of(before: JobStatus, after: JobStatus) -> Result | None:
    """How the change that was under way ended in this turn, or None when none did."""
    resize, old, new = before.resize, before.generation, after.generation
    if resize is None:
        return None
    if resize.phase is ResizePhase.PREPARE:
        if after.layout_generation > before.layout_generation:
            return None if new is not None and new.reason is resize.reason else Result.SUPERSEDED
        return Result.CANCELLED if after.resize is None or after.finished else None
    if old is None or old.confirmed:
        return None
    if new is not None and new.confirmed_generation >= old.layout_generation:
        return Result.COMMITTED
    if new is None or new.layout_generation != old.layout_generation:
        return Result.UNDONE if new is not None and new.reason is ResizeReason.UNDO else Result.SUPERSEDED
    return None


def _values(kind: type[StrEnum]) -> str:
    return ", ".join(member.value for member in kind)
