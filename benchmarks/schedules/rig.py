"""Runs rounds on virtual devices: one process a worker, real gloo messages, and ways that alternate in the same run."""

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from tests.testkit.trainer.ranks import run_ranks

from .measured import Measured
from .ways import Way
from .worker import Runner

#: Seconds by pair, then by way, then by round.
_Seconds = list[list[list[float]]]


def measure(ways: Sequence[Way], pairs: int, rounds: int = 2) -> Measured:
    """Run all ways in turns: `pairs` blocks of `rounds` rounds each, after one block that warms up.

    A round lasts until its last worker is done. Of a block the median round counts, because a disturbance of the
    machine lengthens single rounds.
    """
    workers = ways[0].shape.workers
    declared = (pairs + 1) * rounds * sum(way.declared_seconds for way in ways)
    by_rank: list[_Seconds] = run_ranks(workers, _blocks, tuple(ways), pairs + 1, rounds, within=120 + 3 * declared)
    found: dict[str, list[float]] = {way.name: [] for way in ways}
    for pair in range(1, pairs + 1):
        for number, way in enumerate(ways):
            lasted = [max(of_ranks) for of_ranks in zip(*(rank[pair][number] for rank in by_rank), strict=True)]
            found[way.name].append(statistics.median(lasted))
    return Measured(found)


def _blocks(group: dist.ProcessGroup, ways: Sequence[Way], pairs: int, rounds: int) -> _Seconds:
    """All blocks of one worker, with the seconds from the common start of each round to this worker's end."""
    torch.manual_seed(0)
    runners = [Runner(way, group) for way in ways]
    meeting = torch.zeros(1)
    found: _Seconds = []
    for pair in range(pairs):
        found.append([[] for _ in ways])
        order = range(len(ways)) if pair % 2 == 0 else reversed(range(len(ways)))
        for number in order:
            for _ in range(rounds):
                dist.all_reduce(meeting, group=group)
                begun = time.perf_counter()
                runners[number].run()
                found[pair][number].append(time.perf_counter() - begun)
    return found
