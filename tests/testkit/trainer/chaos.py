"""Scripts of jobs in which workers die at chosen moments, drawn from a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipetransformer.hooks import HookPoint
from tests.testkit.trainer.harness import Faults, Scripted

OF_A_ROUND = [
    HookPoint.COMPUTED,
    HookPoint.REDUCED,
    HookPoint.VOTED,
    HookPoint.STEPPED,
    HookPoint.COMMITTED,
    HookPoint.ENDED,
]
OF_A_REGROUP = [HookPoint.FOUND, HookPoint.MET, HookPoint.MOVING, HookPoint.ASSEMBLED, HookPoint.AGREED]
KILLS = 4
_SPARES = 2
_MAX_PIPELINES = 4


@dataclass
class Chaos:
    """A script in which `KILLS` workers die, one after another."""

    script: list[Scripted] = field(default_factory=list)
    faults: dict[int, Faults] = field(default_factory=dict)

    def __str__(self) -> str:
        layouts = [f"{entry.stages}x{entry.pipelines} of {[*entry.members]}" for entry in self.script]
        kills = [f"w{worker} at {fault.killed_at}" for worker, fault in self.faults.items()]
        return f"{' -> '.join(layouts)}; {', '.join(kills)}"


def draw(seed: int, num_steps: int) -> Chaos:
    """Four workers and two spares lose four of them by (worker, step or generation, point), regrouping each time."""
    choose = random.Random(seed)
    alive, spares = list(range(4)), list(range(4, 4 + _SPARES))
    chaos = Chaos([_layout(choose, alive)])
    step = 0
    leavers: list[int] = []
    for _ in range(KILLS):
        step += choose.randint(2, num_steps // KILLS)
        if choose.random() < 0.5:
            point, at, leavers = choose.choice(OF_A_ROUND), step, []
        else:
            # Half of these die in a regroup that follows a death, the others in one that changes the size.
            if choose.random() < 0.5 or len(chaos.script) == 1:
                alive, leavers = _resize(choose, alive, spares)
                chaos.script.append(_layout(choose, alive, at_step=step, leavers=leavers))
            # Once all have agreed, leavers are gone and cannot be told of another generation.
            point = choose.choice([m for m in OF_A_REGROUP if not leavers or m is not HookPoint.AGREED])
            at = len(chaos.script)
        candidates = [*alive, *leavers]
        if point is HookPoint.FOUND:
            # A joiner knows its generation from the start and would die long before the others come to it.
            candidates = [w for w in candidates if any(w in entry.members for entry in chaos.script[:-1])]
        victim = choose.choice(candidates)
        chaos.faults[victim] = Faults(killed_at=(point, at))
        alive, leavers = [[w for w in workers if w != victim] for workers in (alive, leavers)]
        if spares and (len(alive) < 3 or choose.random() < 0.5):
            alive.append(spares.pop())
        choose.shuffle(alive)
        chaos.script.append(_layout(choose, alive, leavers=leavers, after_loss=victim))
    return chaos


def _resize(choose: random.Random, alive: list[int], spares: list[int]) -> tuple[list[int], list[int]]:
    """Members and leavers after one worker came, or one left, or all only changed places."""
    members, leavers = list(alive), []
    if spares and choose.random() < 0.3:
        members.append(spares.pop())
    elif len(members) > 3 and choose.random() < 0.5:
        leavers = [members.pop(choose.randrange(len(members)))]
    choose.shuffle(members)
    return members, leavers


def _layout(
    choose: random.Random,
    members: list[int],
    *,
    at_step: int = 0,
    leavers: Sequence[int] = (),
    after_loss: int | None = None,
) -> Scripted:
    size = len(members)
    stages = choose.choice([k for k in range(1, size + 1) if size % k == 0 and size // k <= _MAX_PIPELINES])
    return Scripted(stages, size // stages, list(members), at_step, leavers, after_loss)
