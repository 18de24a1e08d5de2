"""Who should have how many workers while jobs compete: the one decision that sees several jobs.

Jobs with `onPack: Auto` share what they hold together, and make room for jobs that wait to start, among those whose
workers run on the same nodes and devices. Each job that trains keeps its smallest layout. Then jobs are served by
priority: those that wait to start, then starting sizes. No job gives workers to a job of lower priority, and nobody's
starting size makes room for a claim, because the starting size would preempt it later. What is left are claims: the
higher priority first, and among equals, pipeline by pipeline, the job whose weighted logarithm of throughput grows most
by a worker. That is proportional fairness: twice as quick counts the same wherever a job began, so no job starves
another, and one that gains little from more pipelines gives them up.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

#: What a job holds counts for this much more than what another would gain by it, so that figures which are measured
#: anew do not pass workers to and fro.
HYSTERESIS = 1.1
#: Of claimed workers, where none has told yet: the chart's default.
CLAIMED_PRIORITY = -11


@dataclass(frozen=True, slots=True)
class Demand:
    """What one job has and could use.

    Attributes:
        key: of the job, `namespace/name`; the order of keys decides between equals.
        pool: what its workers run on, see `demand`.
        speeds: steps a second at each number of workers that it has a legal layout for, and would take if it were more
            than it has; empty for a job that does not train.
        held: workers that have a node and do not leave.
        share: what it was granted last; None if nothing.
        needs: workers of the smallest layout that it can train with, or start with.
        starting: it does not train yet.
        waiting: workers that it wants have no node, or it is asleep, or sees that there is no room for more.
        asleep: it sleeps over an attempt that failed because its workers got no node, or over what it gave up.
        priority: of its pods up to its starting size.
        weight: `elasticPolicy.weight`.
        base: its starting size: further workers are claims.
        leaving: workers that are on their way out and whose nodes other jobs may have then.
        free: how many more of its workers nodes would take now; None where nodes are not seen.
        claimed_priority: of its claimed workers.
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
    base: int = 0
    leaving: int = 0
    free: int | None = None
    claimed_priority: int = CLAIMED_PRIORITY

    @property
    def trains(self) -> bool:
        """Whether it has its smallest layout; one that lost too many workers waits like one that starts."""
        return not self.starting and self.held >= self.needs


def allocate(demands: Sequence[Demand], *, weigh_namespaces: bool = False) -> dict[str, int | None]:
    """The share of each job, in workers; None, as many as it can get, for all of a pool where no job has fewer than its
    share: while no job there waits, none trains that could make room, or each has what it should.

    A job that has its share keeps away from what is being freed for one that has not, until that one has it.

    Args:
        demands: of all jobs.
        weigh_namespaces: weights count between namespaces as well. Otherwise only the ratio of weights within a
            namespace counts, so nobody gains against another namespace by a larger number.
    """
    pools: dict[tuple[str, str], list[Demand]] = {}
    for demand in sorted(demands, key=lambda demand: demand.key):
        pools.setdefault(demand.pool, []).append(demand)
    shares: dict[str, int | None] = {}
    for pool in pools.values():
        shares |= _share_out(pool if weigh_namespaces else _within_namespaces(pool))
    return shares


def _within_namespaces(demands: Sequence[Demand]) -> list[Demand]:
    """The demands with weights whose mean is 1 in each namespace."""
    weights: dict[str, list[float]] = defaultdict(list)
    for demand in demands:
        weights[_namespace(demand)].append(demand.weight)
    means = {namespace: sum(given) / len(given) for namespace, given in weights.items()}
    return [replace(demand, weight=demand.weight / means[_namespace(demand)]) for demand in demands]


def _namespace(demand: Demand) -> str:
    return demand.key.partition("/")[0] if "/" in demand.key else ""


def _share_out(demands: Sequence[Demand]) -> dict[str, int | None]:
    nothing: dict[str, int | None] = dict.fromkeys((demand.key for demand in demands), None)
    if not any(demand.waiting for demand in demands) or not any(demand.trains for demand in demands):
        return nothing
    if len(demands) == 1:
        return nothing
    training = [demand for demand in demands if demand.trains]
    shares = {demand.key: demand.needs if demand.trains else 0 for demand in demands}
    left = _capacity(demands) - sum(shares.values())
    tiers = sorted({demand.priority for demand in demands}, reverse=True)
    kept: dict[int, int] = {}
    turned_away = False
    for priority in tiers:
        mine = [demand for demand in training if demand.priority == priority]
        for demand in sorted(demands, key=lambda demand: (demand.starting, demand.key)):
            if not demand.trains and demand.priority == priority:
                fits = demand.needs <= left
                shares[demand.key] = demand.needs if fits else 0
                left -= shares[demand.key] if fits else min(left, demand.held)  # that part stays bound to it
                turned_away |= not fits and any(priority > one.claimed_priority for one in training)
        left = _grow(mine, shares, left, {demand.key: min(demand.base, demand.held) for demand in mine})
        left = _grow(mine, shares, left, {demand.key: demand.base for demand in mine})
        turned_away |= any(_lacks_own(demand, shares[demand.key]) for demand in mine)
        kept[priority] = min(max(0, left), sum(max(0, demand.held - shares[demand.key]) for demand in mine))
        left -= kept[priority]
    # A job that is turned away, or lacks some of its starting size, tries by itself. Its pods preempt claims, so no job
    # is granted more of those.
    limits = {demand.key: max(demand.held, shares[demand.key]) for demand in training} if turned_away else None
    for priority in tiers:
        mine = [demand for demand in training if demand.priority == priority]
        lower = sum(kept[other] for other in tiers if other <= priority)
        taken = left + lower - _grow(mine, shares, left + lower, limits)
        for demand in mine:  # what nobody of its priority or above can use stays with it
            most = max((size for size in demand.speeds if size <= demand.held), default=0)
            if shares[demand.key] < most <= shares[demand.key] + kept[priority] - taken:
                taken += most - shares[demand.key]
                shares[demand.key] = most
        left = _take(taken, left, kept, priority)
    nobody_gets = all(shares[demand.key] <= demand.held for demand in demands)
    return nothing if nobody_gets or _is_room_for_all(demands, shares) else dict(shares)


def _is_room_for_all(demands: Sequence[Demand], shares: Mapping[str, int]) -> bool:
    """Whether each job can have all that it wants of what nodes are seen to have free."""
    most = {demand.key: max(demand.speeds, default=demand.needs) for demand in demands}
    return all(demand.free is not None and shares[demand.key] == most[demand.key] >= demand.held for demand in demands)


def _lacks_own(demand: Demand, share: int) -> bool:
    """Whether the job may preempt claims to have its starting size again, because its share does not give it that."""
    own = max((size for size in demand.speeds if size <= demand.base), default=0)
    return share < own and demand.priority > demand.claimed_priority


def _take(taken: int, left: int, kept: dict[int, int], priority: int) -> int:
    """Takes workers from what jobs of that priority held, then from what is left, then from the lowest priorities.
    Returns what is left; what nobody took of their own is locked for those below."""
    for other in [priority, None, *sorted(lower for lower in kept if lower < priority)]:
        part = min(taken, left if other is None else kept[other])
        taken -= part
        if other is None:
            left -= part
        else:
            kept[other] -= part
    return left


def _capacity(demands: Sequence[Demand]) -> int:
    """Workers to share out. Where nodes are seen, that is what these jobs hold, what leaves them, and what is free.

    Elsewhere it is learnt: what they hold, or were granted and did not fail to get. While one job gives up workers and
    another claims them, the grants say how many there are. A job that comes then brings what it holds."""
    held = sum(demand.held for demand in demands)
    free = [demand.free for demand in demands if demand.free is not None]
    if len(free) == len(demands):
        return held + sum(demand.leaving for demand in demands) + max(free)
    return max(held, sum(map(_granted, demands)))


def _granted(demand: Demand) -> int:
    if demand.share is None:
        return 0
    return min(demand.held, demand.share) if demand.asleep else demand.share


def _grow(demands: Sequence[Demand], shares: dict[str, int], left: int, limits: Mapping[str, int] | None) -> int:
    """Gives what is left to the jobs that gain most by it, and no job more than its limit. Returns the rest."""
    growing = [
        (_steps(demand, shares[demand.key], math.inf if limits is None else limits[demand.key]), demand.key)
        for demand in demands
    ]
    queue = [(-steps[0].gain, key, 0, steps) for steps, key in growing if steps]
    heapq.heapify(queue)
    while queue:
        _, key, index, steps = heapq.heappop(queue)
        step = steps[index]
        if step.workers <= left:
            left -= step.workers
            shares[key] += step.workers
            if index + 1 < len(steps):
                heapq.heappush(queue, (-steps[index + 1].gain, key, index + 1, steps))
    return left


@dataclass(frozen=True, slots=True)
class _Step:
    """From one legal size to a larger one: so many more workers, at so much gain each."""

    workers: int
    gain: float


def _steps(demand: Demand, size: int, limit: float) -> list[_Step]:
    """The steps from `size` on, up to `limit`, along the upper hull of the logarithm of speed: their gains fall."""
    steps: list[_Step] = []
    speed = demand.speeds.get(size, 0.0)
    larger = sorted(workers for workers, quick in demand.speeds.items() if size < workers <= limit and quick > 0)
    while larger and speed > 0:
        best = max(larger, key=lambda workers: (_gain(demand, size, speed, workers), -workers))
        gain = _gain(demand, size, speed, best)
        if gain <= 0:
            break
        steps.append(_Step(best - size, gain * (HYSTERESIS if best <= demand.held else 1.0)))
        size, speed = best, demand.speeds[best]
        larger = [workers for workers in larger if workers > size]
    return steps


def _gain(demand: Demand, size: int, speed: float, workers: int) -> float:
    return demand.weight * math.log(demand.speeds[workers] / speed) / (workers - size)
