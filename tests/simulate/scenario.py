"""What a life is made of, as data: it can be shrunk, and printed as a few lines of Python."""

from dataclasses import dataclass, replace
from typing import Any

from .truth import Script

GPU = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something goes wrong.

    Attributes:
        kind: see `faults`.
        at: virtual seconds after the start.
        seconds: how long it lasts.
        pick: which of several victims; faults take it modulo their number.
    """

    kind: str
    at: float
    seconds: float = 0.0
    pick: int = 0

    @property
    def end(self) -> float:
        """When nothing of it is left to come."""
        return self.at + self.seconds


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A job as its user submits it."""

    name: str
    at: float = 0.0
    stages: int = 2
    workers: int = 2
    most: int = 2
    on_pack: str = "Widen"
    steps: int = 15
    freezes: tuple[tuple[int, int], ...] = ()
    saves_every: int = 5
    backoff: int = 3

    @property
    def script(self) -> Script:
        """What its trainers do."""
        return Script(steps=self.steps, freezes=self.freezes, saves_every=self.saves_every)

    def manifest(self) -> dict[str, Any]:
        """The object to create."""
        container = {"name": "trainer", "image": "trainer", "resources": {"limits": {GPU: "1"}}}
        spec: dict[str, Any] = {
            "model": {"name": "vit"},
            "data": {"name": "digits"},
            "training": {"steps": self.steps},
            "pipeline": {"stages": self.stages},
            "elasticPolicy": {
                "workers": self.workers,
                "minWorkers": 1,
                "maxWorkers": self.most,
                "onPack": self.on_pack,
            },
            "runPolicy": {
                "backoffLimit": self.backoff,
                "startTimeoutSeconds": 60,
                "resizeTimeoutSeconds": 60,
                "claimTimeoutSeconds": 30,
                "drainTimeoutSeconds": 60,
                "stopTimeoutSeconds": 30,
                "stallTimeoutSeconds": 60,
            },
            "acceleratorResource": GPU,
            "podTemplate": {"spec": {"containers": [container]}},
        }
        if self.freezes:
            points = [{"step": step, "boundary": boundary} for step, boundary in self.freezes]
            spec["freeze"] = {"policy": "Explicit", "boundaries": points}
        if self.saves_every:
            spec["checkpoint"] = {"location": "/checkpoints"}
        return {
            "apiVersion": "training.pipetransformer.io/v1alpha1",
            "kind": "PipeTrainingJob",
            "metadata": {},
            "spec": spec,
            "status": {},
        }


@dataclass(frozen=True, slots=True)
class Scenario:
    """One life.

    Attributes:
        seed: of every interleaving.
        nodes: GPUs of each node.
        operators: that run from the start.
        late_answers: seconds that answers to writes of pods take at most, because admission webhooks are slow.
        again: another life with the same jobs and faults.
    """

    seed: int = 0
    jobs: tuple[JobPlan, ...] = (JobPlan("a"),)
    faults: tuple[Fault, ...] = ()
    nodes: tuple[int, ...] = (2, 2)
    operators: int = 1
    late_answers: float = 0.0
    again: int = 0

    def without(self, *, job: str = "", fault: Fault | None = None) -> "Scenario":
        """The same without one of its parts."""
        jobs = tuple(one for one in self.jobs if one.name != job)
        faults = tuple(one for one in self.faults if one is not fault)
        return replace(self, jobs=jobs, faults=faults)
