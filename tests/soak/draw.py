"""All choices of a soak, made before it begins: a seed repeats them, whatever the machine's pace."""

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tests.testkit.operator.builders import JobBuilder, make_job

ACCELERATOR = "nvidia.com/gpu"
SAMPLES = 1433
EPOCHS = 8
GLOBAL_BATCH = 64
BLOCKS = 4
FREEZES = 5
_STEPS = EPOCHS * -(-SAMPLES // GLOBAL_BATCH)
#: Of so many faults one is of a given kind at least.
SHARE = 13
#: (stages, workers)
_SHAPES = ((2, 4), (2, 2), (4, 4), (1, 3))
_MAX_PIPELINES = 8
#: Those that grow with their ceiling outnumber the others, which change their layout only as they freeze.
_ON_PACK = ("Widen", "Widen", "Auto", "Auto", "Release", "Hold")


class Moment(StrEnum):
    """When it goes wrong."""

    ANY = "any"  #: a while after the last recovery
    PREPARED = "prepared"  #: as a change of the layout is being prepared
    PUBLISHED = "published"  #: as one is published, and its workers have not all moved, or left


#: Those in a resize outnumber the others, for they are what nobody can try by hand.
_MOMENTS = (Moment.ANY, Moment.ANY, Moment.PREPARED, Moment.PUBLISHED, Moment.PUBLISHED)


class Kind(StrEnum):
    """What goes wrong."""

    KILL_WORKER = "kill worker"
    KILL_LEADER = "kill leader"
    KILL_OPERATOR = "kill operator"
    CUT_API = "cut the API"
    EVICT = "evict"
    DELETE = "delete a pod"
    STOP = "stop a process"
    LOSE_NODE = "lose a node"


#: Kinds that the job may count against its `backoffLimit`.
FAILURES = (Kind.KILL_WORKER, Kind.KILL_LEADER, Kind.STOP, Kind.LOSE_NODE)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: what goes wrong.
        moment: what the job has to be doing.
        delay: seconds to wait first, once the job trains, or once it is doing that.
        victim: chooses among the workers that may be hit.
        seconds: how long it lasts, where something comes back.
    """

    kind: Kind
    moment: Moment
    delay: float
    victim: int
    seconds: float


def draw_faults(seed: int, count: int) -> list[Fault]:
    """So many faults, at least one in `SHARE` of each kind, most of them in the middle of a resize."""
    choose = random.Random(f"{seed}/faults")
    kinds = list(Kind) * (count // SHARE)
    kinds += [choose.choice(list(Kind)) for _ in range(count - len(kinds))]
    choose.shuffle(kinds)
    return [_draw_fault(choose, kind) for kind in kinds]


def _draw_fault(choose: random.Random, kind: Kind) -> Fault:
    moment = choose.choice(_MOMENTS)
    delay = choose.uniform(0, 3) if moment is Moment.ANY else choose.choice([0.0, 0.05, 0.2])
    seconds = choose.choice([4.0, 90.0]) if kind is Kind.STOP else choose.uniform(0.5, 10)
    return Fault(kind, moment, delay, choose.randrange(2**16), seconds)


def draw_job(seed: int, slot: int, number: int, folder: str) -> JobBuilder:
    """The `number`-th job of a slot: its shape, when it freezes, and how its state is kept."""
    choose = random.Random(f"{seed}/{slot}/{number}")
    stages, workers = choose.choice(_SHAPES)
    name = f"soak-{slot}-{number}"
    steps = sorted(choose.sample(range(10, _STEPS - 10), FREEZES))
    job = (
        make_job(name)
        .stages(stages)
        .workers(workers, least=2)
        .set("elasticPolicy.maxPipelines", _MAX_PIPELINES)
        .on_pack(choose.choice(_ON_PACK))
        .checkpoint(f"{folder}/checkpoints/{name}")
        .set("checkpoint.everySteps", choose.choice([10, 40]))
        .set("model", {"name": "vit", "numLayers": BLOCKS, "hiddenSize": 16, "numHeads": 2, "mlpSize": 32})
        .set("model.patchSize", 4)
        .set("data", {"name": "tests.soak.data:slow_digits"})
        .set("training", {"epochs": EPOCHS, "globalBatchSize": GLOBAL_BATCH, "seed": choose.randrange(2**16)})
        .set("pipeline.microBatchSize", 8)
        .set("evaluation", {"everyEpochs": EPOCHS})
        .set("freeze", {"policy": "Explicit", "boundaries": [_point(choose, step) for step in steps]})
        .set("runPolicy", {"backoffLimit": 10000, "resizeTimeoutSeconds": 40, "claimTimeoutSeconds": 20})
        .set("runPolicy.stallTimeoutSeconds", 60)
        .set("acceleratorResource", ACCELERATOR)
        .set("output", {"location": f"{folder}/output"})
    )
    if choose.random() < 0.5:
        job.set("mirror", {"everySteps": choose.choice([1, 5])})
    trainer = {"name": "trainer", "image": "trainer", "resources": {"limits": {ACCELERATOR: 1}}}
    return job.set("podTemplate", {"spec": {"containers": [trainer], "terminationGracePeriodSeconds": 8}})


def _point(choose: random.Random, step: int) -> dict[str, Any]:
    return {"step": step, "boundary": choose.randrange(BLOCKS)}
