"""Who should have how many workers while jobs compete: the one decision that sees several jobs.

Jobs with `onPack: Auto` share what they hold together, and make room for jobs that wait to start, among those whose
workers run on the same: the accelerator, and what their templates say of nodes. Each one that trains
keeps its smallest layout; then jobs that wait get theirs, by priority; what is left goes, pipeline by pipeline, to the
job whose weighted logarithm of throughput grows most by a worker. That is proportional fairness: twice as quick counts
the same wherever a job began, so no job starves another, and one that gains little from more pipelines gives them up.

The capacity is not asked of the cluster but learnt: what these jobs hold, or were granted and did not fail to get.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """What one job has and could use.

    Attributes:
        key: of the job; the order of keys decides between equals.
        pool: what its workers run on: the accelerator's resource, and what the template says of nodes.
        speeds: steps a second at each number of workers that it has a legal layout for, and would take if it were more
            than it has; empty for a job that does not train.
        held: workers that have a node and do not leave.
        share: what it was granted last; None if nothing.
        needs: workers of the smallest layout that it can train with, or start with.
        starting: it does not train yet.
        waiting: workers that it wants have no node, or it is asleep.
        asleep: it sleeps over an attempt that failed because its workers got no node, or over what it gave up.
        priority: of its pods; among jobs that wait the higher one is served first.
        weight: `elasticPolicy.weight`.
    """

    key: str
    pool: tuple[str, str]
    speeds: Mapping[int, float]
    held: int
    share: int | None
    needs: int
    starting: bool
    waiting: bool
    asleep: bool
    priority: int
    weight: float


def allocate(demands: Sequence[Demand]) -> dict[str, int | None]:
    """The share of each job, in workers; None, as many as it can get, for all of a pool where no job has fewer than its
    share: while none there waits in vain, none trains that could make room, or each has what it should.

    A job that has its share keeps away from what is being freed for one that has not, until that one has it."""
    pools: dict[tuple[str, str], list[Demand]] = {}
    for demand in demands:
        pools.setdefault(demand.pool, []).append(demand)
    return {key: share for pool in pools.values() for key, share in _share_out(pool).items()}


def _share_out(demands: Sequence[Demand]) -> dict[str, int | None]:
    if not any(demand.waiting for demand in demands) or all(demand.starting for demand in demands):
        return dict.fromkeys((demand.key for demand in demands), None)
    left = _capacity(demands)
    shares: dict[str, int] = {}
    for demand in sorted(demands, key=lambda demand: (demand.starting, -demand.priority, demand.key)):
        grant = demand.needs if not demand.starting or demand.needs <= left else 0
        shares[demand.key] = grant
        left -= grant
    growing = [(_steps(demand, shares[demand.key]), demand) for demand in demands if not demand.starting]
    queue = [(-steps[0].gain, demand.key, 0, steps) for steps, demand in growing if steps]
    heapq.heapify(queue)
    while queue:
        _, key, index, steps = heapq.heappop(queue)
        step = steps[index]
        if step.workers <= left:
            left -= step.workers
            shares[key] += step.workers
            if index + 1 < len(steps):
                heapq.heappush(queue, (-steps[index + 1].gain, key, index + 1, steps))
    if all(shares[demand.key] <= demand.held for demand in demands):
        return dict.fromkeys(shares, None)
    return dict(shares)


def _capacity(demands: Sequence[Demand]) -> int:
    """Workers to share out. While one gives up workers and the other claims them, the grants say how many there are;
    who comes then, and has some already, has them of those."""
    return max(sum(demand.held for demand in demands), sum(map(_granted, demands)))


def _granted(demand: Demand) -> int:
    if demand.share is None:
        return 0
    return min(demand.held, demand.share) if demand.asleep else demand.share


@dataclass(frozen=True, slots=True)
class _Step:
    """From one legal size to a larger one: so many more workers, at so much gain each."""

    workers: int
    gain: float


def _steps(demand: Demand, size: int) -> list[_Step]:
    """The steps from `size` on along the upper hull of the logarithm of speed: their gains fall."""
    steps: list[_Step] = []
    speed = demand.speeds.get(size, 0.0)
    larger = sorted(workers for workers, quick in demand.speeds.items() if workers > size and quick > 0)
    while larger and speed > 0:
        best = max(larger, key=lambda workers: (_gain(demand, size, speed, workers), -workers))
        gain = _gain(demand, size, speed, best)
        if gain <= 0:
            break
        steps.append(_Step(best - size, gain))
        size, speed = best, demand.speeds[best]
        larger = [workers for workers in larger if workers > size]
    return steps


def _gain(demand: Demand, size: int, speed: float, workers: int) -> float:
    return demand.weight * math.log(demand.speeds[workers] / speed) / (workers - size)
