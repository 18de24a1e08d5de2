"""The strongest rivals: a scheduler of elastic jobs by goodput, as Pollux (OSDI'21), and one that knows all durations.

Both decide for all jobs at once. They know no patience, no rest after a change and no starting size to keep, so they
move GPUs sooner than the operator does. A change of layout costs Pollux-like jobs what it costs ours.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pipetransformer_contract.choose import OnPack, Packing, Present, choose, pays_to_recut
from pipetransformer_contract.layout import Layout
from pipetransformer_operator.plan.sharing.allocate import HYSTERESIS

from .by_parts import MOST_WAITING, Rigid
from .engine import Cluster, Run
from .policies import Policy
from .scaling import Frozen, Scaling
from .trace import Job


class Malleable(Rigid):
    """A job that starts in its smallest layout and then has the size that `Goodput` decides.

    Attributes:
        target: GPUs that it should have.
        members: workers of its layout.
        joining: workers that were created and are not ready.
        going: workers that have left, until their GPUs are free.
    """

    def __init__(self, cluster: Cluster[Any], run: Run, policy: Policy) -> None:
        super().__init__(cluster, run)
        self.policy, self.bounds = policy, policy.bounds(run)
        self.target = run.needs
        self.members = self.joining = self.going = 0
        self._leaving = 0
        self._trains = False
        self._layout = Layout(run.needs, 1)

    def on_admitted(self) -> None:
        self.members = self.run.needs
        self.cluster.take(self.run, self.members, lambda: self.cluster.regroup(self.run, self._layout))

    def on_trains(self) -> None:
        self._trains = True
        if self._leaving:
            self.cluster.save(self.run)
        else:
            self.resize()

    def on_frozen(self) -> None:
        self.resize()

    def on_covered(self) -> None:
        self.cluster.delete(self.run, self._leaving)
        self._leaving = 0
        self.resize()

    def on_gone(self, workers: int) -> None:
        self.going -= workers

    def resize(self) -> None:
        """Moves towards the target, as far as GPUs are free."""
        if not self._trains or self._leaving or self.joining:
            return
        layout = self._best(min(self.members, self.target))
        recut = pays_to_recut(self.policy.offers(self.run), self._present(), Packing.MEASURED)
        if layout != self._layout or recut:
            self._regroup(layout)
            return
        larger = self._best(min(self.target, self.members + self.cluster.room))
        if larger.workers > self.members:
            self.joining = larger.workers - self.members
            self.cluster.take(self.run, self.joining, self._take_in)

    def speeds(self) -> Mapping[int, float]:
        """Steps per second at each number of GPUs, relative to the GPUs that its user asks for with nothing frozen."""
        assert self.run.scaling is not None
        return _speeds(self.run.scaling, self.run.frozen, self.policy)

    def _take_in(self) -> None:
        number, self.joining = self.members + self.joining, 0
        self._regroup(self._best(number), spare=number)

    def _regroup(self, layout: Layout, spare: int = 0) -> None:
        self._leaving = max(self.members, spare) - layout.workers
        self.going += self._leaving
        self._layout, self.members, self._trains = layout, layout.workers, False
        self.cluster.regroup(self.run, layout)

    def _best(self, workers: int) -> Layout:
        """The fastest layout; the present one if a change does not pay."""
        found = choose(
            self.policy.offers(self.run),
            workers,
            self.bounds,
            on_pack=OnPack.WIDEN,
            packing=Packing.MEASURED,
            present=self._present(),
        )
        return found or self._layout

    def _present(self) -> Present:
        return Present(self._layout, self.run.seconds_of_step(), self.run.remaining(self.cluster.now))


@cache
def _speeds(scaling: Scaling, frozen: Frozen, policy: Policy) -> Mapping[int, float]:
    offers = scaling.offers(frozen)
    most = policy.most_workers(scaling.gpus)
    seconds = {Layout(offer.stages, time.pipelines): time.seconds for offer in offers for time in offer.step_seconds}
    best: dict[int, float] = {}
    for layout, taken in sorted(seconds.items(), key=lambda item: item[0].workers):
        if layout.workers <= most and taken < min(best.values(), default=math.inf):
            best[layout.workers] = taken
    return {workers: scaling.starting_seconds / taken for workers, taken in best.items()}


class Goodput:
    """Gives each GPU to the job whose goodput gains most by it, as Pollux does.

    The global batch is the user's, so goodput is the speed. As in Pollux's section 4.2, speeds are relative to a fair
    allocation, here to what the user asks for, and a power mean of them grows. Each job keeps its smallest layout, and
    jobs that wait start in theirs, in the order of their arrival.

    Args:
        power: of the mean; Pollux recommends -1. 0 is the geometric mean, which is `allocate`'s.
    """

    def __init__(self, power: float) -> None:
        self._power = power

    def share(self, cluster: Cluster[Rigid]) -> None:
        """Decides the size of each elastic job that trains."""
        drivers = [driver for driver in cluster.elastic.values() if isinstance(driver, Malleable)]
        least = {driver: min(driver.speeds()) for driver in drivers}
        held = sum(driver.members + driver.joining + driver.going for driver in drivers)
        left = cluster.free + held - sum(least.values())
        for run in sorted(cluster.waiting(MOST_WAITING), key=lambda run: run.job.number):
            left -= run.needs if run.needs <= left else 0
        targets = self._spread(least, left)
        for driver in drivers:
            driver.target = targets[driver]
        for driver in sorted(drivers, key=lambda driver: driver.target - driver.members):
            if driver.target < driver.members or (driver.target > driver.members and cluster.room):
                driver.resize()

    def _spread(self, least: Mapping[Malleable, int], left: int) -> dict[Malleable, int]:
        """The sizes of all jobs, where `left` GPUs are beyond the smallest ones."""
        targets = dict(least)
        queue = []
        for number, driver in enumerate(least):
            steps = _steps(driver.run.scaling, driver.run.frozen, driver.policy, driver.members, self._power)
            if steps:
                queue.append((-steps[0][1], number, 0, driver, steps))
        heapq.heapify(queue)
        while queue:
            _, number, index, driver, steps = heapq.heappop(queue)
            workers = steps[index][0]
            if workers > left:
                continue
            left -= workers
            targets[driver] += workers
            if index + 1 < len(steps):
                heapq.heappush(queue, (-steps[index + 1][1], number, index + 1, driver, steps))
        return targets


@cache
def _steps(scaling: Scaling, frozen: Frozen, policy: Policy, held: int, power: float) -> Sequence[tuple[int, float]]:
    """(further GPUs, gain a GPU) from the smallest size on, along the upper hull, so that gains fall."""
    speeds = _speeds(scaling, frozen, policy)

    def worth(workers: int) -> float:
        return math.log(speeds[workers]) if power == 0 else speeds[workers] ** power / power

    sizes, steps = sorted(speeds), []
    while len(sizes) > 1:
        size, *larger = sizes
        gains = {workers: (worth(workers) - worth(size)) / (workers - size) for workers in larger}
        best = max(larger, key=lambda workers: (gains[workers], -workers))
        steps.append((best - size, gains[best] * (HYSTERESIS if best <= held else 1.0)))
        sizes = larger[larger.index(best) :]
    return steps


def shortest_remaining_first(jobs: Sequence[Job], gpus: int) -> Sequence[Run]:
    """At each arrival and end, gives the GPUs to the jobs with the fewest GPU-seconds left. Moving a job is free.

    No order of jobs that neither freeze nor change their size is known to have a lower mean time, so it stands for
    what order alone can do.
    """
    runs = [Run(job, job.gpus, None, []) for job in jobs]
    left = {run: run.job.seconds for run in runs}
    active: list[Run] = []
    training: list[Run] = []
    now, following = 0.0, 0
    while active or following < len(runs):
        ends = now + min((left[run] for run in training), default=math.inf)
        arrives = runs[following].job.arrival if following < len(runs) else math.inf
        passed = min(ends, arrives) - now
        now += passed
        for run in training:
            left[run] -= passed
        if arrives <= ends:
            active.append(runs[following])
            following += 1
        for run in [run for run in training if left[run] <= 1e-6]:
            run.ended = now
            active.remove(run)
        active.sort(key=lambda run: left[run] * run.needs)
        chosen, free = [], gpus
        for run in active:
            if run.needs <= free:
                free -= run.needs
                chosen.append(run)
                run.admitted = now if run.admitted is None else run.admitted
        for run in set(chosen) ^ set(training):
            run.hold(now, -run.held or run.needs)
        training = chosen
    return runs
