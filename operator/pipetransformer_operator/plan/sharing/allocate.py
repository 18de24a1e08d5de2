"""Decides how many workers each job should have while several jobs compete.

Jobs with `onPack: Auto` on the same nodes and devices share what they hold, and make room for jobs that wait to start.
Each training job keeps its smallest layout. Then, by priority, the operator serves waiting jobs, starting sizes and
claims. No job releases workers for a job of lower priority. No job releases part of its starting size for a claim,
because its new pods would later preempt the claim. Among equal claims each pipeline goes to the job whose logarithm of
throughput, times its weight, grows most per worker. This is proportional fairness, so no job starves another.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

#: The gain of a worker that a job holds counts this much more, so that new measurements do not move workers back and
#: forth.
HYSTERESIS = 1.1
#: Priority of claimed workers until the operator has seen the pod of one: the chart's default.
CLAIMED_PRIORITY = -11
#: Accelerator resource and placement of workers. Only jobs of one pool share workers. See `demand.pool_of`.
Pool = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Demand:
    """Workers that one job has and could use.

    Attributes:
        key: `namespace/name` of the job. The order of keys decides between equals.
        pool: resource and placement of its workers.
        speeds: steps per second, by each number of workers with a valid layout. Larger sizes that the job would not
            take are missing. Empty for a job that does not train.
        held: number of workers that have a node and do not leave.
        share: the job's last share in workers; None without one.
        needs: workers of the smallest layout that the job can train or start with.
        starting: the job does not train yet.
        waiting: some of its workers have no node, it waits after an attempt that found no nodes, or it could use more.
        asleep: it waits before its next attempt, because its workers got no node, or because it released some.
        priority: priority of its pods up to its starting size.
        weight: `elasticPolicy.weight`.
        base: number of workers of its starting size. Workers beyond it are claims.
        leaving: number of workers that leave nodes which other jobs can then use.
        free: number of further workers that nodes would take now; None if nodes are not watched.
        claimed_priority: priority of its claimed workers.
    """

    key: str
    pool: Pool
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
        """Whether the job holds its smallest layout. A job that lost too many workers waits like one that starts."""
        return not self.starting and self.held >= self.needs

    @property
    def namespace(self) -> str:
        """Namespace of the job; empty if the key has none."""
        return self.key.rpartition("/")[0]

    @property
    def floor(self) -> int:
        """How many workers the job keeps in any case."""
        return self.needs if self.trains else 0

    @property
    def most(self) -> int:
        """The largest number of workers that the job could use."""
        return max(self.speeds, default=self.needs)

    @property
    def entitled(self) -> int:
        """How many workers of its last share the job got, or may still get."""
        if self.share is None:
            return 0
        return min(self.held, self.share) if self.asleep else self.share

    def largest(self, workers: int) -> int:
        """Size of the job's largest layout on at most this many workers; 0 without one."""
        return max((size for size in self.speeds if size <= workers), default=0)

    def lacks_own(self, share: int) -> bool:
        """Whether this share is below the starting size, so that the job's pods may preempt claims to regain it."""
        return share < self.largest(self.base) and self.priority > self.claimed_priority


class _Pooled(Protocol):
    @property
    def pool(self) -> Pool:
        """Resource and placement of its workers."""
        ...


_P = TypeVar("_P", bound=_Pooled)


def by_pool(items: Iterable[_P]) -> list[list[_P]]:
    """Groups jobs by pool, and keeps their order."""
    pools: dict[Pool, list[_P]] = defaultdict(list)
    for item in items:
        pools[item.pool].append(item)
    return list(pools.values())


def allocate(demands: Sequence[Demand], *, weigh_namespaces: bool = False) -> dict[str, int | None]:
    """Returns the share of each job, in workers. None means as many as it can get.

    All jobs of a pool get None if nothing is to be shared: no job waits, no training job could make room, or nodes have
    room for all. They also get None if no job's share would exceed what it holds. A job that holds its whole share
    claims none of the workers that others release.

    Args:
        demands: demands of all jobs.
        weigh_namespaces: weights also count between namespaces. Otherwise only the ratio of weights within a namespace
            counts, so larger numbers give a namespace nothing.
    """
    shares: dict[str, int | None] = {}
    for pool in by_pool(sorted(demands, key=lambda demand: demand.key)):
        shares |= _share_out(pool if weigh_namespaces else _within_namespaces(pool))
    return shares


def _within_namespaces(demands: Sequence[Demand]) -> list[Demand]:
    """Scales the weights so that their mean is 1 in each namespace."""
    weights: dict[str, list[float]] = defaultdict(list)
    for demand in demands:
        weights[demand.namespace].append(demand.weight)
    means = {namespace: sum(given) / len(given) for namespace, given in weights.items()}
    return [replace(demand, weight=demand.weight / means[demand.namespace]) for demand in demands]


def _share_out(demands: Sequence[Demand]) -> Mapping[str, int | None]:
    if _compete(demands):
        shares = _Sharing(demands).compute()
        if _adds_workers(demands, shares) and not _is_room_for_all(demands, shares):
            return shares
    return dict.fromkeys((demand.key for demand in demands), None)


def _compete(demands: Sequence[Demand]) -> bool:
    """Whether at least one job waits and another trains."""
    waits, trains = any(demand.waiting for demand in demands), any(demand.trains for demand in demands)
    return len(demands) > 1 and waits and trains


def _adds_workers(demands: Sequence[Demand], shares: Mapping[str, int]) -> bool:
    return any(shares[demand.key] > demand.held for demand in demands)


def _is_room_for_all(demands: Sequence[Demand], shares: Mapping[str, int]) -> bool:
    """Whether free nodes are known to have room for all workers that the jobs could use."""
    return all(demand.free is not None and shares[demand.key] == demand.most >= demand.held for demand in demands)


@dataclass(slots=True)
class _Tier:
    """Jobs of one priority.

    Attributes:
        training: jobs that train.
        waiting: jobs that do not, in the order of service.
        kept: workers that training jobs of the tier hold beyond their shares so far. Jobs of lower priority get none.
    """

    priority: int
    training: list[Demand] = field(default_factory=list)
    waiting: list[Demand] = field(default_factory=list)
    kept: int = 0


def _tiers(demands: Sequence[Demand]) -> list[_Tier]:
    """Groups jobs into tiers, the highest priority first."""
    tiers: dict[int, _Tier] = {}
    for demand in sorted(demands, key=lambda demand: (demand.starting, demand.key)):
        tier = tiers.setdefault(demand.priority, _Tier(demand.priority))
        (tier.training if demand.trains else tier.waiting).append(demand)
    return [tiers[priority] for priority in sorted(tiers, reverse=True)]


class _Sharing:
    """Computes the shares of one pool.

    Attributes:
        shares: share of each job so far, in workers.
        left: number of workers that are in no share yet.
        turned_away: at least one job does not get its starting size. Its pods will try to preempt claims.
    """

    def __init__(self, demands: Sequence[Demand]) -> None:
        self.tiers = _tiers(demands)
        self.training = [demand for tier in self.tiers for demand in tier.training]
        self.shares = {demand.key: demand.floor for demand in demands}
        self.left = _capacity(demands) - sum(self.shares.values())
        self.turned_away = False

    def compute(self) -> dict[str, int]:
        """Computes the share of each job, by the job's key."""
        for tier in self.tiers:
            self._serve(tier)
        limits = self._limits()
        for tier in self.tiers:
            self._add_claims(tier, limits)
        return self.shares

    def _serve(self, tier: _Tier) -> None:
        """Lets waiting jobs of the tier start, and then gives its training jobs their starting sizes."""
        for demand in tier.waiting:
            self._start(demand)
        self.left = _grow(tier.training, self.shares, self.left, {d.key: min(d.base, d.held) for d in tier.training})
        self.left = _grow(tier.training, self.shares, self.left, {d.key: d.base for d in tier.training})
        self.turned_away |= any(demand.lacks_own(self.shares[demand.key]) for demand in tier.training)
        surplus = sum(max(0, demand.held - self.shares[demand.key]) for demand in tier.training)
        tier.kept = min(max(0, self.left), surplus)
        self.left -= tier.kept

    def _start(self, demand: Demand) -> None:
        if demand.needs <= self.left:
            self.shares[demand.key] = demand.needs
            self.left -= demand.needs
            return
        self.left -= min(self.left, demand.held)  # the job keeps holding these
        self.turned_away |= any(demand.priority > one.claimed_priority for one in self.training)

    def _limits(self) -> Mapping[str, float]:
        """Largest share of each training job, by key.

        If a job does not get its starting size (`turned_away`), no job gets more claims. The pods of the job that was
        turned away would preempt these claims."""
        if not self.turned_away:
            return dict.fromkeys(self.shares, math.inf)
        return {demand.key: max(demand.held, self.shares[demand.key]) for demand in self.training}

    def _add_claims(self, tier: _Tier, limits: Mapping[str, float]) -> None:
        lower = [other for other in self.tiers if other.priority <= tier.priority]
        room = self.left + sum(other.kept for other in lower)
        taken = room - _grow(tier.training, self.shares, room, limits)
        taken += self._leave_unused(tier, tier.kept - taken)
        self._take(taken, tier, lower)

    def _leave_unused(self, tier: _Tier, unused: int) -> int:
        """Leaves workers with the job that holds them if no job of the same or a higher priority can use them.

        `unused` is how many there are. Returns how many stay with their jobs."""
        left = 0
        for demand in tier.training:
            more = demand.largest(demand.held) - self.shares[demand.key]
            if 0 < more <= unused - left:
                left += more
                self.shares[demand.key] += more
        return left

    def _take(self, taken: int, tier: _Tier, lower: Sequence[_Tier]) -> None:
        """Subtracts `taken` workers, given as claims: first from those that jobs of this tier hold beyond their shares.

        Next come workers that no job holds, and then lower tiers, the lowest priority first."""
        taken = _take_kept(taken, [tier])
        free = min(taken, self.left)
        self.left -= free
        _take_kept(taken - free, reversed(lower))


def _take_kept(taken: int, tiers: Iterable[_Tier]) -> int:
    """Subtracts `taken` workers from `kept` of the tiers, one tier after the other. Returns how many were too many."""
    for tier in tiers:
        part = min(taken, tier.kept)
        tier.kept -= part
        taken -= part
    return taken


def _capacity(demands: Sequence[Demand]) -> int:
    """Number of workers to share out.

    If the operator watches nodes, it is the sum of what these jobs hold, what leaves them, and what is free. Otherwise
    it is the larger of two sums: what the jobs hold, and what their last shares gave them. The shares keep it stable
    while one job releases workers and another claims them."""
    held = sum(demand.held for demand in demands)
    free = [demand.free for demand in demands if demand.free is not None]
    if len(free) == len(demands):
        return held + sum(demand.leaving for demand in demands) + max(free)
    return max(held, sum(demand.entitled for demand in demands))


def _grow(demands: Sequence[Demand], shares: dict[str, int], left: int, limits: Mapping[str, float]) -> int:
    """Adds the `left` workers to the shares of the jobs that gain most, up to each job's limit. Returns the rest."""
    growing = {demand.key: _steps(demand, shares[demand.key], limits[demand.key]) for demand in demands}
    queue = [(-steps[0].gain, key, 0) for key, steps in growing.items() if steps]
    heapq.heapify(queue)
    while queue:
        _, key, index = heapq.heappop(queue)
        step, later = growing[key][index], growing[key][index + 1 :]
        if step.workers > left:
            continue
        left -= step.workers
        shares[key] += step.workers
        if later:
            heapq.heappush(queue, (-later[0].gain, key, index + 1))
    return left


@dataclass(frozen=True, slots=True)
class _Step:
    """A step from one number of workers to a larger one: how many workers it adds, and the gain per worker."""

    workers: int
    gain: float


def _steps(demand: Demand, size: int, limit: float) -> list[_Step]:
    """The steps from `size` workers up to `limit`, along the upper convex hull of log(speed), so gains decrease."""
    steps: list[_Step] = []
    if size not in demand.speeds:
        return steps
    larger = sorted(workers for workers in demand.speeds if size < workers <= limit)
    while larger:
        best = max(larger, key=lambda workers: (_gain(demand, size, workers), -workers))
        gain = _gain(demand, size, best)
        if gain <= 0:
            break
        steps.append(_Step(best - size, gain * (HYSTERESIS if best <= demand.held else 1.0)))
        size, larger = best, larger[larger.index(best) + 1 :]
    return steps


def _gain(demand: Demand, size: int, workers: int) -> float:
    return demand.weight * math.log(demand.speeds[workers] / demand.speeds[size]) / (workers - size)
