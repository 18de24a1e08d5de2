"""How long jobs take from asking for their workers until the first step."""

from datetime import datetime

from prometheus_client import CollectorRegistry, Histogram

from pipetransformer_contract.api import JobStatus
from pipetransformer_contract.messages import Report
from pipetransformer_operator.controller.ports import JobKey

from .names import PREFIX

_SECONDS = (1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200)


class Starts:
    """Times starts, also those after a suspension or after all workers were lost.

    A start whose generation was published before this operator began is not timed.

    Args:
        registry: where the metric is registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._began: dict[JobKey, datetime] = {}
        #: The first generation of a start, and the step with which its workers began; -1 before its first report.
        self._resumed: dict[JobKey, tuple[int, int]] = {}
        self._seconds = Histogram(
            f"{PREFIX}_first_step_seconds",
            "Seconds from when a job asked for its workers until the operator heard of the first step that they made.",
            buckets=_SECONDS,
            registry=registry,
        )

    def on_turned(self, key: JobKey, before: JobStatus, after: JobStatus, report: Report | None, now: datetime) -> None:
        """A turn changed the job's status. `report` is the newest one that the operator heard."""
        if after.generation is None or after.finished:
            self._resumed.pop(key, None)
            self._wait(key, before, after, now)
        elif key in self._began:
            first, step = self._resumed.setdefault(key, (after.generation.layout_generation, -1))
            if report is None or report.layout_generation < first:
                return  # a report of workers that are gone
            if step < 0:
                self._resumed[key] = first, report.step
            elif report.step > step:
                self._seconds.observe(max(0.0, (now - self._began[key]).total_seconds()))
                self.on_gone(key)

    def on_gone(self, key: JobKey) -> None:
        """The job is gone, or has started."""
        self._began.pop(key, None)
        self._resumed.pop(key, None)

    def _wait(self, key: JobKey, before: JobStatus, after: JobStatus, now: datetime) -> None:
        """Notes since when a job without a generation wants one."""
        if after.finished or after.start_time is None:
            self._began.pop(key, None)
        elif before.generation is not None:
            self._began[key] = now
        else:
            self._began[key] = max(after.start_time, self._began.get(key, after.start_time))
