"""What a life is made of, as data: it can be drawn from a seed, shrunk, and printed as a few lines of Python."""

from dataclasses import dataclass, replace
from random import Random
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
        again: another life with the same jobs and faults.
    """

    seed: int = 0
    jobs: tuple[JobPlan, ...] = (JobPlan("a"),)
    faults: tuple[Fault, ...] = ()
    nodes: tuple[int, ...] = (2, 2)
    operators: int = 1
    again: int = 0

    def without(self, *, job: str = "", fault: Fault | None = None) -> "Scenario":
        """The same without one of its parts."""
        jobs = tuple(one for one in self.jobs if one.name != job)
        faults = tuple(one for one in self.faults if one is not fault)
        return replace(self, jobs=jobs, faults=faults)


def draw(seed: int) -> Scenario:
    """The life of a seed: one or two jobs, and up to five faults while they train."""
    from .faults import KINDS, SECONDS

    random = Random(f"{seed}/scenario")
    nodes = random.choice(((2, 2), (4,), (2, 2, 2), (4, 4), (3, 2)))
    jobs = tuple(_draw_job(random, "ab"[number], sum(nodes)) for number in range(random.choice((1, 1, 2))))
    faults = []
    for _ in range(random.choice((0, 1, 2, 2, 3, 3, 4, 5))):
        kind = random.choice(sorted(KINDS))
        shortest, longest = SECONDS.get(kind, (0.0, 0.0))
        seconds = round(random.uniform(shortest, longest), 1)
        faults.append(Fault(kind, round(random.uniform(0.0, 30.0), 3), seconds, random.randrange(12)))
    return Scenario(seed, jobs, tuple(sorted(faults, key=lambda one: one.at)), nodes, random.choice((1, 1, 2)))


def _draw_job(random: Random, name: str, room: int) -> JobPlan:
    stages = random.choice((1, 2, 2, 4)) if room >= 4 else random.choice((1, 2))
    workers = stages * random.choice((1, 1, 2)) if stages < 4 else stages
    workers = min(workers, room // stages * stages)
    saves = random.choice((0, 3, 5, 5))
    steps = random.choice((6, 10, 15))
    freezes: tuple[tuple[int, int], ...] = ()
    if random.random() < 0.6:
        first = random.randrange(1, steps - 2)
        freezes = ((first, random.choice((6, 8, 11))),)
    packs = ("Widen", "Hold", "Release", "Release", "Auto") if saves else ("Widen", "Hold")
    return JobPlan(
        name=name,
        at=round(random.uniform(0.0, 4.0), 3),
        stages=stages,
        workers=workers,
        most=workers + stages * random.choice((0, 0, 1, 2)),
        on_pack=random.choice(packs),
        steps=steps,
        freezes=freezes,
        saves_every=saves,
        backoff=random.choice((3, 6)),
    )
