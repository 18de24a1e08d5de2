"""Accelerators counted a second time, from the pods alone, and compared with what the job's status says of them."""

from dataclasses import dataclass, field
from datetime import datetime

from .watch import Object

#: Between a pod's end and the turn that counts it, while the operator can read and write.
LAG_SECONDS = 1.0


@dataclass
class Account:
    """One job's accelerators over time.

    Attributes:
        stages: of a pipeline by its spec.
        problems: where the status contradicts itself.
    """

    job: str
    stages: int
    problems: list[str] = field(default_factory=list)
    saved: float = 0.0
    changes: int = 0
    _pods: set[str] = field(default_factory=set)
    _status: Object = field(default_factory=dict)
    _time: float | None = None

    def pod(self, kind: str, pod: Object, time: float) -> None:
        """A pod of the job came, changed or went."""
        before = len(self._pods)
        self._count(time)
        (self._pods.discard if kind == "DELETED" else self._pods.add)(pod["metadata"]["uid"])
        self.changes += len(self._pods) != before

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

    def check(self, outages: float) -> list[str]:
        """Where the status is further from the pods than it had time to see, `outages` seconds of which it saw
        nothing."""
        workers = self._status.get("initialWorkers", 0)
        allowed = LAG_SECONDS * (1 + self.changes) + workers * outages
        difference = abs(self._status.get("gpuSecondsSaved", 0.0) - self.saved)
        if difference > allowed:
            said = f"{self.job}: {self._status.get('gpuSecondsSaved')} s saved, {self.saved:.1f} s by its pods"
            return [*self.problems, f"{said}; {allowed:.1f} s may be missed"]
        return self.problems

    def _count(self, time: float) -> None:
        if self._time is not None and "gpuSecondsTime" in self._status:
            pipelines = self._status["initialWorkers"] // self.stages
            spared = pipelines * (self.stages - self._status["plan"]["stages"])
            fewer = min(spared, pipelines * self.stages - len(self._pods))
            self.saved += max(0, fewer) * (time - self._time)
        self._time = time


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
