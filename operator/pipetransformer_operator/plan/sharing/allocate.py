"""Decides how many workers each job should have while several jobs compete.

Jobs with `onPack: Auto` on the same nodes and devices share what they hold, and make room for jobs that wait to start.
Each training job keeps its smallest layout. Then, by priority, the operator serves waiting jobs, starting sizes and
claims. No job releases workers for a job of lower priority. A starting size makes no room for a claim, because it would
preempt the claim later. Among equal claims each pipeline goes to the job whose weighted logarithm of throughput grows
most per worker. This is proportional fairness, so no job starves another.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

#: A held worker counts this much more than a gained one, so that new measurements do not move workers back and forth.
HYSTERESIS = 1.1
#: Priority of claimed workers before the operator has seen any: the chart's default.
CLAIMED_PRIORITY = -11
#: Resource and placement of workers, see `demand.pool_of`.
Pool = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Demand:
    """Workers that one job has and could use.

    Attributes:
        key: `namespace/name` of the job. The order of keys decides between equals.
        pool: resource and placement of its workers.
        speeds: steps per second at each number of workers with a legal layout, without larger sizes that the job would
            not take. Empty for a job that does not train.
        held: number of workers that have a node and do not leave.
        share: its last share; None without one.
        needs: workers of the smallest layout that it can train or start with.
        starting: it does not train yet.
        waiting: some of its workers have no node, it sleeps for lack of workers, or it sees no room for more.
        asleep: it sleeps because its workers got no node, or because it released some.
        priority: priority of its pods up to its starting size.
        weight: `elasticPolicy.weight`.
        base: its starting size. Workers beyond it are claims.
        leaving: workers that leave, so that other jobs can use their nodes.
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
        """Whether it has at least its smallest layout. A job that lost too many workers waits like one that starts."""
        return not self.starting and self.held >= self.needs

    @property
    def namespace(self) -> str:
        """Namespace of the job; empty if the key has none."""
        namespace, slash, _ = self.key.partition("/")
        return namespace if slash else ""

    @property
    def floor(self) -> int:
        """Workers that it keeps in any case."""
        return self.needs if self.trains else 0

    @property
    def most(self) -> int:
        """Workers that it could use at most."""
        return max(self.speeds, default=self.needs)

    @property
    def granted(self) -> int:
        """Workers of its share that it did not fail to get."""
        if self.share is None:
            return 0
        return min(self.held, self.share) if self.asleep else self.share

    def largest(self, workers: int) -> int:
        """Workers of its largest layout on at most this many; 0 if there is none."""
        return max((size for size in self.speeds if size <= workers), default=0)

    def lacks_own(self, share: int) -> bool:
        """Whether it may preempt claims to regain its starting size, because the share is less than that."""
        return share < self.largest(self.base) and self.priority > self.claimed_priority


class _Pooled(Protocol):
    @property
    def pool(self) -> Pool:
        """Resource and placement of its workers."""
        ...


_P = TypeVar("_P", bound=_Pooled)


def by_pool(items: Iterable[_P]) -> list[list[_P]]:
    """The items of each pool, in their order."""
    pools: dict[Pool, list[_P]] = defaultdict(list)
    for item in items:
        pools[item.pool].append(item)
    return list(pools.values())


def allocate(demands: Sequence[Demand], *, weigh_namespaces: bool = False) -> dict[str, int | None]:
    """Returns the share of each job, in workers. None means as many as it can get.

    All jobs of a pool get None if no job has less than its share. Then no job waits, no training job could make room,
    or each job has its share. A job with its full share leaves released workers to jobs below their share.

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
    """Whether free nodes are known to have room for everything that the jobs want."""
    return all(demand.free is not None and shares[demand.key] == demand.most >= demand.held for demand in demands)


@dataclass(slots=True)
class _Tier:
    """Jobs of one priority.

    Attributes:
        training: jobs that train.
        waiting: jobs that do not, in the order of service.
        kept: workers that its training jobs hold beyond their shares. Jobs of lower priority get none of them.
    """

    priority: int
    training: list[Demand] = field(default_factory=list)
    waiting: list[Demand] = field(default_factory=list)
    kept: int = 0


def _tiers(demands: Sequence[Demand]) -> list[_Tier]:
    """The tiers of the demands, the highest priority first."""
    tiers: dict[int, _Tier] = {}
    for demand in sorted(demands, key=lambda demand: (demand.starting, demand.key)):
        tier = tiers.setdefault(demand.priority, _Tier(demand.priority))
        (tier.training if demand.trains else tier.waiting).append(demand)
    return [tiers[priority] for priority in sorted(tiers, reverse=True)]


class _Sharing:
    """Computes the shares of one pool.

    Attributes:
        shares: workers of each job so far.
        left: workers that no job has yet.
        turned_away: at least one job does not get its starting size, and will try to preempt claims.
    """

    def __init__(self, demands: Sequence[Demand]) -> None:
        self.tiers = _tiers(demands)
        self.training = [demand for tier in self.tiers for demand in tier.training]
        self.shares = {demand.key: demand.floor for demand in demands}
        self.left = _capacity(demands) - sum(self.shares.values())
        self.turned_away = False

    def compute(self) -> dict[str, int]:
        """The share of each job by its key."""
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

    def _limits(self) -> Mapping[str, int] | None:
        """Maximum number of workers of each training job; None without a limit.

        Once a job is turned away, no job gets more claims, because that job's pods would preempt them."""
        if not self.turned_away:
            return None
        return {demand.key: max(demand.held, self.shares[demand.key]) for demand in self.training}

    def _add_claims(self, tier: _Tier, limits: Mapping[str, int] | None) -> None:
        lower = [other for other in self.tiers if other.priority <= tier.priority]
        room = self.left + sum(other.kept for other in lower)
        taken = room - _grow(tier.training, self.shares, room, limits)
        taken += self._leave_unused(tier, tier.kept - taken)
        self._take(taken, tier, lower)

    def _leave_unused(self, tier: _Tier, unused: int) -> int:
        """Leaves workers with the job that holds them if no job of its priority or above can use them.

        Returns how many."""
        left = 0
        for demand in tier.training:
            more = demand.largest(demand.held) - self.shares[demand.key]
            if 0 < more <= unused - left:
                left += more
                self.shares[demand.key] += more
        return left

    def _take(self, taken: int, tier: _Tier, lower: Sequence[_Tier]) -> None:
        """Takes workers that jobs of the tier hold, then those that are left, then those of lower tiers from below."""
        taken = _take_kept(taken, [tier])
        free = min(taken, self.left)
        self.left -= free
        _take_kept(taken - free, [other for other in reversed(lower) if other is not tier])


def _take_kept(taken: int, tiers: Iterable[_Tier]) -> int:
    """Takes workers that jobs of the tiers hold, tier by tier. Returns how many are still to be taken."""
    for tier in tiers:
        part = min(taken, tier.kept)
        tier.kept -= part
        taken -= part
    return taken


def _capacity(demands: Sequence[Demand]) -> int:
    """Number of workers to share out.

    If nodes are watched, it is the number that these jobs hold, that leave them, and that are free. Otherwise it is
    learnt: the number that they hold, or were granted and did not fail to get. The grants keep the number stable while
    one job releases workers and another claims them. A new job adds the workers that it holds."""
    held = sum(demand.held for demand in demands)
    free = [demand.free for demand in demands if demand.free is not None]
    if len(free) == len(demands):
        return held + sum(demand.leaving for demand in demands) + max(free)
    return max(held, sum(demand.granted for demand in demands))


def _grow(demands: Sequence[Demand], shares: dict[str, int], left: int, limits: Mapping[str, int] | None) -> int:
    """Gives the remaining workers to the jobs that gain most, up to each job's limit. Returns the rest."""
    growing = {demand.key: _steps(demand, shares[demand.key], _limit(limits, demand.key)) for demand in demands}
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


def _limit(limits: Mapping[str, int] | None, key: str) -> float:
    return math.inf if limits is None else limits[key]


@dataclass(frozen=True, slots=True)
class _Step:
    """A step from one legal size to a larger one: the number of added workers, and the gain per worker."""

    workers: int
    gain: float


def _steps(demand: Demand, size: int, limit: float) -> list[_Step]:
    """The steps from `size` up to `limit`, along the upper hull of the logarithm of speed, so that gains fall."""
    steps: list[_Step] = []
    if demand.speeds.get(size, 0.0) <= 0:
        return steps
    larger = sorted(workers for workers, speed in demand.speeds.items() if size < workers <= limit and speed > 0)
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
