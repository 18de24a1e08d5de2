"""How changes of layout end and how long their phases take, from a job's status before and after each turn."""

import time
from enum import StrEnum
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Histogram

from pipetransformer_contract.api import JobStatus
from pipetransformer_contract.api.status import Resize, ResizePhase
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import ResizeReason
from pipetransformer_operator.controller.ports import JobKey

from .names import PREFIX

#: Changes that the operator chose because another layout seemed better.
_CHOSEN = (ResizeReason.PACK, ResizeReason.DEEPEN, ResizeReason.RELEASE, ResizeReason.CLAIM)
_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Direction(StrEnum):
    """How a change of layout changes the number of workers."""

    START = "Start"  #: the first layout
    GROW = "Grow"
    SHRINK = "Shrink"
    KEEP = "Keep"  #: the same number of workers, in another layout


class Result(StrEnum):
    """How a change of layout ended."""

    COMMITTED = "Committed"  #: its members train in the new layout
    CANCELLED = "Cancelled"  #: before it was published: its workers were not ready in time, or it is no longer wanted
    UNDONE = "Undone"  #: published, but its members returned to the layout before it
    SUPERSEDED = "Superseded"  #: a failure or a drain came first


class Resizes:
    """Counts changes of layout and times their phases. A phase that began before this operator is not timed.

    Args:
        registry: where the metrics are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._entered: dict[JobKey, tuple[ResizePhase, float]] = {}
        self._ended = Counter(
            f"{PREFIX}_resizes",
            f"Changes of layout that have ended, by direction ({', '.join(Direction)})"
            f" and result ({', '.join(Result)}).",
            ("direction", "result"),
            registry=registry,
        )
        for direction, result in product(Direction, Result):
            self._ended.labels(direction.value, result.value)
        self._seconds = Histogram(
            f"{PREFIX}_resize_phase_seconds",
            f"Seconds that changes of layout spent in a phase: {', '.join(ResizePhase)}.",
            ("phase",),
            buckets=_SECONDS,
            registry=registry,
        )

    def on_turned(self, key: JobKey, before: JobStatus, after: JobStatus) -> None:
        """A turn changed the job's status."""
        result = result_of(before, after)
        if result is not None and before.resize is not None:
            self._ended.labels(direction_of(before.resize).value, result.value).inc()
        phase = None if after.resize is None or after.finished else after.resize.phase
        known = self._entered.get(key)
        if known is not None and known[0] is not phase:
            self._seconds.labels(known[0].value).observe(time.monotonic() - known[1])
            del self._entered[key]
        began = before.resize is None or before.resize.phase is not phase
        if phase is not None and key not in self._entered and began:
            self._entered[key] = phase, time.monotonic()

    def on_gone(self, key: JobKey) -> None:
        """The job is gone."""
        self._entered.pop(key, None)


class Returns:
    """Counts layouts that a job returns to: it changed, by choice, to the layout that it had chosen to leave last.

    A job that does so again and again pays for each pause and gains nothing. Changes that a failure, a drain or an edit
    of the spec brought about do not count.
    """

    def __init__(self) -> None:
        self._left: dict[JobKey, Layout] = {}
        self._counts: dict[JobKey, int] = {}

    def on_turned(self, key: JobKey, before: JobStatus, after: JobStatus) -> None:
        """A turn changed the job's status."""
        old, new = before.generation, after.generation
        if old is not None and new is not None and new.layout_generation == old.layout_generation:
            return
        if old is None or new is None or new.reason not in _CHOSEN:
            self._left.pop(key, None)
            return
        if self._left.get(key) == new.layout:
            self._counts[key] = self.count(key) + 1
        self._left[key] = old.layout

    def on_gone(self, key: JobKey) -> None:
        """The job is gone."""
        self._left.pop(key, None)
        self._counts.pop(key, None)

    def count(self, key: JobKey) -> int:
        """How often the job returned, since this operator began."""
        return self._counts.get(key, 0)


def direction_of(resize: Resize) -> Direction:
    """How the change changes the number of workers."""
    if resize.from_ is None:
        return Direction.START
    before, after = resize.from_.layout.workers, resize.to.layout.workers
    return Direction.GROW if after > before else Direction.SHRINK if after < before else Direction.KEEP


def result_of(before: JobStatus, after: JobStatus) -> Result | None:
    """How the change of layout in `before` ended in this turn; None if it did not end, or there was none."""
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
