"""Decides by `choose()` and `allocate()` alone, with the waits of the operator's rules: quick, and without pods.

It follows `plan/rules` (prepare, commit, clean, claim, share) and `plan/sharing` (demand), for workers that neither
fail nor wait for a node. A test shows that `by_plan` gives the same layouts.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

from pipetransformer_contract.choose import Bounds, Packing, Present, choices, choose, pays_to_recut
from pipetransformer_contract.layout import Layout
from pipetransformer_operator.plan.rules.attempts import FIRST_BACKOFF, LONGEST_BACKOFF
from pipetransformer_operator.plan.rules.reports import PROGRESS_INTERVAL
from pipetransformer_operator.plan.rules.share import RELEASE_SIT_OUT
from pipetransformer_operator.plan.sharing.allocate import Demand, allocate
from pipetransformer_operator.plan.sharing.demand import MAX_WIDTHS, PATIENCE

from .engine import Cluster, Driver, Run
from .policies import Policy
from .scaling import Frozen, Scaling

#: All jobs use the same accelerators on the same nodes.
POOL = ("nvidia.com/gpu", "")
#: Fewer jobs of one size start between two decisions.
MOST_WAITING = 64
#: The progress of a job is reported before a decision between jobs only if less than this is left of it, because
#: otherwise the steps that are left decide nothing.
NEAR_END_SECONDS = 600


class Rigid:
    """A job that trains in one layout from its start to its end."""

    def __init__(self, cluster: Cluster[Any], run: Run) -> None:
        self.cluster, self.run = cluster, run
        self.granted: int | None = None
        self._demand: Demand | None = None

    def on_admitted(self) -> None:
        self.cluster.take(self.run, self.run.needs, lambda: self.cluster.regroup(self.run, self.run.layout))

    def on_trains(self) -> None:
        """Nothing to decide."""

    def on_frozen(self) -> None:
        """Nothing to decide."""

    def on_covered(self) -> None:
        """Nothing to decide."""

    def on_gone(self, workers: int) -> None:
        """Nothing to decide."""

    def on_ended(self) -> None:
        """Nothing to decide."""

    def demand(self) -> Demand | None:
        """What `allocate` has to know, except for free GPUs; None while it does not wait for GPUs."""
        if self._demand is None and self._is_late():
            self._demand = self._starting(waiting=True)
        return self._demand if self.run.admitted is None else None

    def refresh(self) -> None:
        """Reports the progress if that is due and the end is near."""

    def grant(self, workers: int | None) -> None:
        """Takes what `allocate` answered."""
        self.granted = workers

    def wake_times(self) -> Sequence[float]:
        """When time alone changes its demand. Times in the past do not matter."""
        return [self.run.job.arrival + PATIENCE.total_seconds()] if self.run.admitted is None else []

    def _is_late(self) -> bool:
        """Whether it waits for GPUs, and the operator noticed."""
        late = self.cluster.now >= self.run.job.arrival + PATIENCE.total_seconds()
        return self.run.admitted is None and (late or bool(self.granted))

    def _starting(self, *, waiting: bool) -> Demand:
        return Demand(
            key=self.run.job.key,
            pool=POOL,
            speeds={},
            held=0 if self.run.admitted is None else self.run.needs,
            share=None,
            needs=self.run.needs,
            starting=True,
            waiting=waiting,
            asleep=False,
            priority=0,
            weight=1.0,
            base=self.run.job.gpus,
            free=0,
        )


#: By number of workers: what `choose` said with no end in sight, and with how few steps left it said the same.
Answers = dict[int, tuple[Layout | None, float]]
#: Answers for jobs of one policy, by all else that they depend on.
Known = dict[object, Answers]


@dataclass(eq=False)
class _Batch:
    """Workers that were created together."""

    workers: int
    ready: bool = False


class Elastic(Rigid):
    """A job whose layout changes. The words are those of the operator's status.

    Args:
        cluster: the engine.
        run: what it does.
        policy: how it is run.
        known: what was asked before, by all jobs of the simulation.

    Attributes:
        generation: number of its newest layout; 0 before the first.
        members: workers of that layout.
        joining: workers that were created for the next one.
        leaving: workers that have left and wait for a checkpoint.
        ending: workers that were deleted and are not gone.
    """

    def __init__(self, cluster: Cluster[Any], run: Run, policy: Policy, known: Known) -> None:
        super().__init__(cluster, run)
        self.policy, self.bounds, self._known = policy, policy.bounds(run), known
        self.generation = self.members = self.leaving = self.ending = 0
        self.joining: list[_Batch] = []
        self._layout = run.layout
        self._trains = self._claims = self._wants_room = False
        self._granted_in = 0
        self._remaining, self._reported = run.total, 0.0
        self._failures, self._next_resize, self._sits_out_until, self._published = 0, 0.0, 0.0, 0.0
        self._turned = 0.0
        self._answers: Answers | None = None  # in the present situation
        self._chosen_for, self._saved = 0, -1  # boundaries: of the layout, and of the newest checkpoint

    def on_admitted(self) -> None:
        self._demand = None
        self.cluster.take(self.run, self.run.needs, self._start)

    def on_trains(self) -> None:
        self._trains, self._answers = True, None
        if self._claims:
            self._forget_failures()
        self._report(decides=True)
        if self.leaving and self._saved >= self._chosen_for:
            self.on_covered()
            return
        if self.leaving:
            self.cluster.save(self.run)
        self._turn()

    def on_frozen(self) -> None:
        self._answers = None
        self._report(decides=True)
        self._turn()

    def on_covered(self) -> None:
        self._saved = self.run.frozen.boundary
        self.cluster.delete(self.run, self.leaving)
        self.ending += self.leaving
        self.leaving = 0
        if self._next_resize:  # other jobs can only now have what it gave up
            self._next_resize += self.cluster.now - self._published
        self._report(decides=True)
        self._turn()

    def on_gone(self, workers: int) -> None:
        self.ending -= workers
        self._turn()

    # -- between jobs

    def refresh(self) -> None:
        if self._trains and self._remaining * self.run.seconds_of_step() < NEAR_END_SECONDS and self._is_due():
            self._turn()

    def demand(self) -> Demand | None:
        if self._demand is None or self._is_woken():
            self._demand = self._training() if self.generation else self._starting(waiting=self._is_late())
        return self._demand

    def grant(self, workers: int | None) -> None:
        before, woken = (self.granted, self._granted_in), self._is_woken()
        self.granted, self._granted_in = workers, self.generation
        if workers != before[0] and workers is not None and workers > self.members:
            self._next_resize = 0.0
        if before != (self.granted, self._granted_in) or self._wants_room or woken:
            self._turn()

    def wake_times(self) -> Sequence[float]:
        return [*super().wake_times(), self._next_resize, self._sits_out_until]

    def _is_woken(self) -> bool:
        """Whether a time has come since its last turn that it waited for."""
        return any(self._turned < time <= self.cluster.now for time in self.wake_times())

    def _training(self) -> Demand:
        speeds, rests = self._speeds(), self._rests()
        needs = min(speeds)
        if rests:
            speeds = {workers: speed for workers, speed in speeds.items() if workers <= max(self._held, needs)}
        return Demand(
            key=self.run.job.key,
            pool=POOL,
            speeds=speeds,
            held=self._held,
            share=None,
            needs=needs,
            starting=False,
            waiting=(self._sleeps() and not rests) or max(speeds) > self._held,
            asleep=False,
            priority=0,
            weight=1.0,
            base=self.run.job.gpus,
            leaving=self.leaving + self.ending,
            free=0,
        )

    @property
    def _held(self) -> int:
        """Workers that have a GPU and do not leave."""
        return self.members + self._joining

    @property
    def _joining(self) -> int:
        return sum(batch.workers for batch in self.joining)

    # -- one turn

    def _start(self) -> None:
        self.generation, self.members, self._published = 1, self.run.needs, self.cluster.now
        self._demand = None
        self._forget_failures()
        self.cluster.regroup(self.run, self._layout)

    def _turn(self) -> None:
        """Moves the job one step closer to its best layout."""
        self._turned, self._demand = self.cluster.now, None
        if not self._trains or self.leaving:
            return
        self._report()
        if not self._publish():
            self._prepare()

    def _publish(self) -> bool:
        """Regroups to a better layout, or a better cut, if the members carry one, with all joiners or with none."""
        complete = all(batch.ready for batch in self.joining)
        number = self.members + (self._joining if complete and not self._sleeps() else 0)
        layout = self._best(self._limited(number)) or self._best(number)
        if layout is None or (layout == self._layout and not self._pays_to_recut()):
            return False
        limited = self._limited(self.members) < self.members
        shrinks = layout.workers <= self._layout.workers
        self._claims = not shrinks
        if not shrinks:
            self.joining = []
        self.leaving = max(0, self.members - layout.workers)
        self._layout, self.members, self._trains, self._answers = layout, layout.workers, False, None
        self.generation, self._published = self.generation + 1, self.cluster.now
        self._chosen_for = self.run.frozen.boundary
        if shrinks and limited:
            self._back_off()
            self._sits_out_until = max(self._sits_out_until, self.cluster.now + RELEASE_SIT_OUT.total_seconds())
            self._drop_joiners(0)
        self.cluster.regroup(self.run, layout)
        return True

    def _prepare(self) -> None:
        """Creates the workers of the next larger layout."""
        to = self._target()
        self._drop_joiners(max(0, to.workers - self.members))
        missing = to.workers - self.members - self._joining
        if missing > 0:
            batch = _Batch(missing)
            self.joining.append(batch)
            self.cluster.take(self.run, missing, lambda: self._take_in(batch))

    def _take_in(self, batch: _Batch) -> None:
        batch.ready = True
        if batch.workers:
            self._turn()

    def _target(self) -> Layout:
        """The next larger layout to try."""
        self._wants_room = False
        if self._sleeps():
            return self._layout
        ceiling = self._ceiling()
        best = self._larger(ceiling)
        if best is None:
            return self._layout
        base = self.run.job.gpus
        if self.members < base:
            self._wants_room = True
            own = self._larger(min(base, ceiling, self._held + self.cluster.free))
            if own is not None:
                return own
        most = self._held + self.cluster.room
        self._wants_room |= most < best.workers
        return self._larger(min(ceiling, most)) or self._layout

    def _drop_joiners(self, keep: int) -> None:
        """Deletes all but the first `keep` workers that were created for the next layout."""
        dropped = self._joining - keep
        while dropped > 0:
            batch = self.joining[-1]
            part = min(dropped, batch.workers)
            batch.workers -= part
            dropped -= part
            self.ending += part
            self.cluster.delete(self.run, part)
            if not batch.workers:
                self.joining.pop()

    # -- what the rules ask

    def _larger(self, workers: int) -> Layout | None:
        layout = self._best(workers)
        return layout if layout is not None and layout.workers > self._layout.workers else None

    def _best(self, workers: int) -> Layout | None:
        """What `choose` says. It is asked only where fewer steps are left than in an answer that had no end in sight.

        All changes cost the same pause. So the steps that are left do not decide which layout is best, but whether it
        is worth the pause; and if it is, it is with more steps left."""
        if self._answers is None:
            situation = (self.run.scaling, self.run.frozen, self.run.cut_when, self._layout, self._trains)
            self._answers = self._known.setdefault(situation, {})
        if workers not in self._answers:
            endless = replace(self._present(), remaining_steps=None)
            self._answers[workers] = self._choose(workers, endless), math.inf
        without_end, least = self._answers[workers]
        remaining = self._remaining if self._trains else math.inf
        if remaining >= least:
            return without_end
        found = self._choose(workers, self._present())
        if found == without_end:
            self._answers[workers] = without_end, remaining
        return found

    def _choose(self, workers: int, present: Present) -> Layout | None:
        return choose(
            self.policy.offers(self.run),
            workers,
            self.bounds,
            on_pack=self.policy.on_pack,
            packing=Packing.MEASURED,
            present=present,
        )

    def _pays_to_recut(self) -> bool:
        """Whether the stages are not cut for what is frozen, and cutting them again pays."""
        is_cut = self.run.cut_when == self.run.frozen
        return not is_cut and pays_to_recut(self.policy.offers(self.run), self._present(), Packing.MEASURED)

    def _present(self) -> Present:
        """The layout that trains, by the newest report; only its size while it does not train yet."""
        if not self._trains:
            return Present(self._layout)
        return Present(self._layout, self.run.seconds_of_step(), self._remaining)

    def _limited(self, workers: int) -> int:
        """At most the job's share, if that was computed for this generation."""
        if self.granted is None or self._granted_in != self.generation:
            return workers
        return min(workers, self.granted)

    def _ceiling(self) -> int:
        return self.bounds.max_workers if self.granted is None else min(self.bounds.max_workers, self.granted)

    def _speeds(self) -> Mapping[int, float]:
        """Steps per second at each number of workers, without larger ones that the job would not take."""
        assert self.run.scaling is not None
        speeds = _speeds(self.policy, self.run.scaling, self.run.frozen, self.bounds)
        present = self._layout.workers
        larger = sorted(workers for workers in speeds if workers > present)

        def grows(workers: int) -> bool:
            best = self._best(workers)
            return best is not None and best.workers > present

        first = bisect_left(larger, True, key=grows)
        return {workers: speed for workers, speed in speeds.items() if workers not in larger[:first]}

    def _sleeps(self) -> bool:
        return self.cluster.now < self._next_resize

    def _rests(self) -> bool:
        return self.cluster.now < self._sits_out_until

    def _back_off(self) -> None:
        wait = min(LONGEST_BACKOFF, FIRST_BACKOFF * (1 << min(self._failures, 16)))
        self._failures += 1
        self._next_resize = self.cluster.now + wait.total_seconds()

    def _forget_failures(self) -> None:
        self._failures, self._next_resize, self._sits_out_until = 0, 0.0, 0.0

    def _report(self, *, decides: bool = False) -> None:
        """Notes the progress: at once if something else is new, otherwise now and then."""
        if decides or self._is_due():
            self._remaining, self._reported = self.run.remaining(self.cluster.now), self.cluster.now

    def _is_due(self) -> bool:
        return self.cluster.now >= self._reported + PROGRESS_INTERVAL.total_seconds()


@cache
def _speeds(policy: Policy, scaling: Scaling, frozen: Frozen, bounds: Bounds) -> Mapping[int, float]:
    """Steps per second at each number of workers with a layout that `choose` would take."""
    offers = scaling.offers(frozen)
    bounds = replace(bounds, max_pipelines=min(bounds.max_pipelines, MAX_WIDTHS))
    found = choices(offers, bounds, on_pack=policy.on_pack, packing=Packing.MEASURED)
    seconds = {Layout(offer.stages, time.pipelines): time.seconds for offer in offers for time in offer.step_seconds}
    return {layout.workers: 1 / seconds[layout] for layout in found}


class Sharer(Driver, Protocol):
    """A driver of a job that shares GPUs with others."""

    def refresh(self) -> None:
        """Reports the progress if that is due and the end is near."""
        ...

    def demand(self) -> Demand | None:
        """What `allocate` has to know, except for free GPUs; None if the job does not share."""
        ...

    def grant(self, workers: int | None) -> None:
        """Takes what `allocate` answered."""
        ...

    def wake_times(self) -> Sequence[float]:
        """When time alone changes its demand. Times in the past do not matter."""
        ...


class Shares:
    """Shares GPUs out among jobs by `allocate`, as the operator does."""

    def share(self, cluster: Cluster[Sharer]) -> None:
        """Tells each job its share."""
        runs = sorted([*cluster.waiting(MOST_WAITING), *cluster.elastic], key=lambda run: run.job.number)
        drivers = [cluster.drivers[run] for run in runs]
        for driver in drivers:
            driver.refresh()
        demands = [driver.demand() for driver in drivers]
        known = [demand for demand in demands if demand is not None]
        if known:  # `allocate` believes the job that sees most free GPUs
            known[0] = replace(known[0], free=cluster.free)
        # All jobs have the same weight and namespace, so it does not matter how weights count.
        shares = allocate(known, weigh_namespaces=True)
        for driver, demand in zip(drivers, demands, strict=True):
            driver.grant(None if demand is None else shares[demand.key])
        wakes = [time for driver in drivers for time in driver.wake_times() if time > cluster.now]
        if wakes:
            cluster.look_again(min(wakes))
