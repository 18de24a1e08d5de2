"""Has every generator of schedules judged: `python -m tests.testkit.trainer.judged_schedules`.

It prints how many lists the judge accepted, and how many broken ones it refused, as a line of JSON.
"""

import json
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch.distributed import pipelining

from pipetransformer.schedules import (
    Action,
    ActionKind,
    Asynchronous,
    GPipe,
    MessageKind,
    OneForwardOneBackward,
    Operation,
    RoundShape,
    Schedule,
    ScheduleError,
    Send,
    TeraPipe,
    planned,
)
from pipetransformer.schedules.from_torch import FromTorch, Interleaved, ZeroBubble, ZeroBubbleV

from .judge_schedule import judge
from .schedule_mutants import mutants

MOST_WORKERS, MOST_SPANS = 8, 3
_KINDS = {
    ActionKind.FORWARD: "F",
    ActionKind.BACKWARD: "B",
    ActionKind.INPUT_GRADIENT: "I",
    ActionKind.WEIGHT_GRADIENT: "W",
    ActionKind.STEP: "S",
}
_VALUES = {
    MessageKind.ACTIVATION: "a",
    MessageKind.GRADIENT: "g",
    MessageKind.PREFIX: "p",
    MessageKind.WEIGHT: "w",
}


def generators() -> list[tuple[Schedule, int]]:
    """Every generator, and spans of each worker. GPipe and TeraPipe run over any spans."""
    several: list[tuple[Schedule, int]] = [
        (kind, spans)
        for spans in range(1, MOST_SPANS + 1)
        for kind in (
            GPipe(),
            TeraPipe(),
            Interleaved(spans),
            ZeroBubble(spans),
            FromTorch(pipelining.ScheduleLoopedBFS, spans),
        )
    ]
    two: list[tuple[Schedule, int]] = [(ZeroBubbleV(), 2), (FromTorch(pipelining.ScheduleDualPipeV, 2), 2)]
    one: list[tuple[Schedule, int]] = [
        (OneForwardOneBackward(), 1),
        (Asynchronous(), 1),
        (FromTorch(pipelining.ScheduleGPipe), 1),
    ]
    return [*several, *two, *one]


def owners_of(schedule: Schedule, spans: int, workers: int) -> tuple[int, ...]:
    """The worker of each span."""
    if isinstance(schedule, FromTorch | Interleaved | ZeroBubble | ZeroBubbleV):
        return schedule.owners(workers)
    return tuple(range(workers)) * spans


def shape_of(schedule: Schedule, owners: tuple[int, ...], micro_batches: int, frozen: int) -> RoundShape:
    """A round of these micro-batches, for TeraPipe with three slices each. `Asynchronous` takes three steps of unequal
    numbers of them, or as many as there are."""
    slices = 3 if isinstance(schedule, TeraPipe) else 1
    ends = sorted({1, -(-micro_batches // 3), micro_batches}) if isinstance(schedule, Asynchronous) else []
    steps = tuple(end - start for start, end in pairwise([0, *ends]))
    return RoundShape(owners, micro_batches * slices, frozen, slices, steps=steps)


def document(lists: Sequence[Sequence[Operation]], shape: RoundShape) -> str:
    """A round as the judge reads it."""
    return json.dumps(
        {
            "owners": shape.owners,
            "chunks": shape.chunks,
            "first_trained": shape.first_trained,
            "slices": shape.slices,
            "steps": shape.steps,
            "prefix": {"units": shape.prefix_units, "made": shape.prefix_made, "next": shape.next_chunks},
            "lists": [[_written(operation) for operation in mine] for mine in lists],
        }
    )


def _written(operation: Operation) -> list[str | int]:
    if isinstance(operation, Action) and operation.kind is ActionKind.PREFIX:
        return ["P", operation.chunk, operation.units.start, operation.units.stop]
    if isinstance(operation, Action):
        return [_KINDS[operation.kind], operation.span, operation.chunk]
    value = operation.value
    kind = "send" if isinstance(operation, Send) else "receive"
    return [kind, _VALUES[value.kind], value.span, value.chunk, operation.peer]


def rounds(seed: int = 0) -> Iterator[tuple[Schedule, RoundShape]]:
    """Rounds of every generator: all workers, some chunks up to 4 K, some frozen prefixes up to all spans."""
    draw = random.Random(seed)
    for schedule, spans in generators():
        for workers in range(1, MOST_WORKERS + 1):
            owners = owners_of(schedule, spans, workers)
            for chunks in {1, workers, 2 * workers * spans, draw.randint(1, 4 * workers)}:
                for frozen in {0, draw.randint(0, len(owners)), len(owners)}:
                    yield schedule, shape_of(schedule, owners, min(chunks, 4 * workers), frozen)


def main() -> dict[str, int]:
    """Judge all rounds that a generator can run, and mutants of some of them.

    Raises:
        AssertionError: the judge refuses a generator's list, or accepts a mutant.
    """
    checked = rejected = 0
    draw = random.Random(0)
    for schedule, shape in rounds():
        try:
            written = document(planned(schedule, shape), shape)
        except ScheduleError:
            continue  # it says so before the round
        faults = judge(written).faults
        assert not faults, (schedule, shape, faults)
        checked += 1
        if checked % 10 == 0:
            for reason, mutant in mutants(written, draw):
                assert judge(mutant).faults, (schedule, shape, reason)
                rejected += 1
    return {"lists_checked": checked, "mutants_rejected": rejected}


if __name__ == "__main__":
    print(json.dumps(main()))
