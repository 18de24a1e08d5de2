"""Draws a life from a seed."""

from dataclasses import replace
from random import Random

from .faults import KINDS, SECONDS
from .scenario import Fault, JobPlan, Scenario

_STEPS_OF_A_LOSS = 90


def draw(seed: int) -> Scenario:
    """The life of a seed: one or two jobs, and up to five faults while they train."""
    random = Random(f"{seed}/scenario")
    nodes = random.choice(((2, 2), (4,), (2, 2, 2), (4, 4), (3, 2)))
    jobs = tuple(_draw_job(random, "ab"[number], sum(nodes)) for number in range(random.choice((1, 1, 2))))
    faults = []
    for _ in range(random.choice((0, 1, 2, 2, 3, 3, 4, 5))):
        kind = random.choice(sorted(KINDS))
        shortest, longest = SECONDS.get(kind, (0.0, 0.0))
        seconds = round(random.uniform(shortest, longest), 1)
        faults.append(Fault(kind, round(random.uniform(0.0, 30.0), 3), seconds, random.randrange(12)))
    if seed % 2 and any(fault.kind == "kill_node" for fault in faults):
        # These jobs train on until the cluster says that the node is lost.
        jobs = tuple(replace(job, steps=job.steps + _STEPS_OF_A_LOSS) for job in jobs)
    faults.sort(key=lambda one: one.at)
    late = 5.0 if seed % 5 == 3 else 0.0
    return Scenario(seed, jobs, tuple(faults), nodes, random.choice((1, 1, 2)), late)


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
