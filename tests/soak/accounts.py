"""Accelerators counted a second time, from the pods alone, and compared with what the job's status says of them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from .watch import Object

#: Between a pod's end and the turn that counts it, while the operator can read and write.
LAG_SECONDS = 1.0
#: Until a job trains, the number of its pods alone may wait this much longer in the status, as its messages may.
START_LAG_SECONDS = 1.0


@dataclass
class Account:
    """One job's accelerators over time.

    Attributes:
        stages: of a pipeline by its spec.
        problems: where the status contradicts itself.
        saved: accelerator seconds by the pods, of what a packed job spares.
        held: the same, of what it holds until it ends.
        said_held: the same, as the status said meanwhile.
    """

    job: str
    stages: int
    problems: list[str] = field(default_factory=list)
    saved: float = 0.0
    held: float = 0.0
    said_held: float = 0.0
    _changes: list[float] = field(default_factory=list)
    _lag: float = LAG_SECONDS
    _pods: set[str] = field(default_factory=set)
    _status: Object = field(default_factory=dict)
    _time: float | None = None

    def pod(self, kind: str, pod: Object, time: float) -> None:
        """A pod of the job came, changed or went."""
        before = len(self._pods)
        self._count(time)
        (self._pods.discard if kind == "DELETED" else self._pods.add)(pod["metadata"]["uid"])
        if len(self._pods) != before:
            self._changes.append(time)
            self._lag += LAG_SECONDS + (0.0 if self._status.get("generation") else START_LAG_SECONDS)

    def status(self, status: Object, time: float) -> None:
        """The job's status as it was written."""
        self._count(time)
        before, self._status = self._status, status
        expected = before.get("gpuSecondsSaved", 0.0)
        if "gpuSecondsTime" in before and before != status:
            fewer = before["gpus"]["saved"]
            if status.get("gpuSecondsTime") != before["gpuSecondsTime"]:
                end = status.get("gpuSecondsTime") or status.get("completionTime")
                expected = None if end is None else expected + fewer * (_time(end) - _time(before["gpuSecondsTime"]))
        if expected is not None and abs(status.get("gpuSecondsSaved", 0.0) - expected) > LAG_SECONDS:
            self.problems.append(f"{self.job}: {status.get('gpuSecondsSaved')} s saved, {expected} by its own figures")

    @property
    def said_saved(self) -> float:
        """Accelerator seconds that the job spared, by its status."""
        return float(self._status.get("gpuSecondsSaved", 0.0))

    def allowed(self, blind: Iterable[tuple[float, float]]) -> float:
        """Accelerator seconds that the status may miss: a lag for each change, and for one that was not seen before one
        of the `blind` times as long as that still was, and as long as that had been: so far a job's next try may be.
        Those times may overlap.
        """
        unseen = sum(
            2 * end - begin - time
            for begin, end in _merged(blind)
            for time in self._changes
            if begin - LAG_SECONDS <= time <= end
        )
        return self._lag + unseen

    def check(self, blind: Iterable[tuple[float, float]]) -> list[str]:
        """Where the status is further from the pods than it had time to see."""
        allowed = self.allowed(blind)
        figures = (("saved", self.said_saved, self.saved), ("held", self.said_held, self.held))
        return self.problems + [
            f"{self.job}: {said:.1f} s {what}, {by_pods:.1f} s by its pods; {allowed:.1f} s may be missed"
            for what, said, by_pods in figures
            if abs(said - by_pods) > allowed
        ]

    def _count(self, time: float) -> None:
        if self._time is not None and "completionTime" not in self._status:
            seconds = time - self._time
            self.held += len(self._pods) * seconds
            self.said_held += self._status.get("gpus", {}).get("held", 0) * seconds
            if "gpuSecondsTime" in self._status:
                pipelines = self._status["initialWorkers"] // self.stages
                spared = pipelines * (self.stages - self._status["generation"]["stages"])
                fewer = min(spared, pipelines * self.stages - len(self._pods))
                self.saved += max(0, fewer) * seconds
        self._time = time


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times, none of them twice."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            begin, end = merged[-1][0], max(end, merged.pop()[1])
        merged.append((begin, end))
    return merged


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
