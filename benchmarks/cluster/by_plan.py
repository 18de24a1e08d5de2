"""Decides by the operator's own `plan()`, and by `allocate()` on what `demand_of` sees: slow, and leaves out no rule.

Each job is a world of `tests.testkit.operator`, which executes plans on pods and checks what must always hold. Its pods
get GPUs from the engine, and its leader reports what the engine trains.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from typing import Any

from pipetransformer_contract.api.status import Share
from pipetransformer_contract.choose import OnPack, Packing
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import DurableCheckpoint, Outcome, Report
from pipetransformer_operator.plan import Demand, Plan, WorkerPhase, demand_of
from pipetransformer_operator.plan.rules.reports import PROGRESS_INTERVAL
from pipetransformer_operator.plan.sharing.demand import PATIENCE
from tests.testkit.operator.builders import JobBuilder, make_job
from tests.testkit.operator.world import World

from .by_parts import NEAR_END_SECONDS, POOL
from .engine import Cluster, Run
from .policies import Policy
from .scaling import LAYERS, STAGES

#: A start waits for its GPUs, however long that takes, because the engine places all pods of a start at once.
_LONGEST_START_SECONDS = 10**9


class Planned(World):
    """The driver of one job, rigid or elastic."""

    def __init__(self, cluster: Cluster[Any], run: Run, policy: Policy) -> None:
        super().__init__(_builder(run.job.gpus, run.job.elastic, policy))
        self.cluster, self.run, self.policy = cluster, run, policy
        self.unschedulable = self.lingering = True
        self.sees_drains = False
        self._start = self.now
        self._announced = 0
        self._boundary_step = 0
        self._checkpoint: DurableCheckpoint | None = None
        self._turned = 0.0
        self._demand: Demand | None = None
        self._is_known = self._waits_for_room = self._trains = False
        self._act()

    # -- what the engine says

    def on_admitted(self) -> None:
        self._place()

    def on_trains(self) -> None:
        self._trains = True
        for member in self.generation.members:
            self._committed[member.uid] = self.generation.layout_generation
        self._act()
        if self.status.leaving_ids:
            self.cluster.save(self.run)

    def on_frozen(self) -> None:
        self._boundary_step = self._step
        self._act()

    def on_covered(self) -> None:
        self._checkpoint = DurableCheckpoint(
            step=self._step,
            boundary=self.run.frozen.boundary,
            min_stages=self.generation.stages,
            layout_generation=self.generation.layout_generation,
        )
        self._act()

    def on_gone(self, workers: int) -> None:
        ended = [name for name, worker in self.workers.items() if worker.terminating]
        for name in ended[:workers]:
            self.kill(name)
        self._act()

    def on_ended(self) -> None:
        assert self.report is not None
        self._look()
        self.finish(Outcome.SUCCEEDED)

    # -- between jobs

    def refresh(self) -> None:
        """Reports the progress if that is due and the end is near."""
        last = self.status.last_report
        near = self._trains and last and (last.remaining_steps or 0) * self.run.seconds_of_step() < NEAR_END_SECONDS
        if near and last and self._time >= last.time + PROGRESS_INTERVAL:
            self._act()

    def demand(self) -> Demand | None:
        if not self._is_known or self._is_woken():
            self._look()
            found = demand_of(self.spec, replace(self.observed(), name=self.run.job.key.split("/")[1]), self.now)
            self._demand = None if found is None else replace(found, pool=POOL, free=0)
            self._is_known = True
        return self._demand

    def grant(self, workers: int | None) -> None:
        before, generation = self.share, self.status.layout_generation
        self.share = None if workers is None else Share(workers=workers, layout_generation=generation)
        if self.share != before or self._waits_for_room or self._is_woken():
            self._act()

    def wake_times(self) -> Sequence[float]:
        times = [self.status.next_resize_time, self.status.sits_out_until]
        known = [(time - self._start).total_seconds() for time in times if time is not None]
        if self.run.admitted is None:
            known.append(self.run.job.arrival + PATIENCE.total_seconds())
        return known

    def _is_woken(self) -> bool:
        """Whether a time has come since its last turn that it waited for."""
        return any(self._turned < time <= self.cluster.now for time in self.wake_times())

    # -- a turn, and what follows from it

    @property
    def _time(self) -> datetime:
        return self._start + timedelta(seconds=self.cluster.now)

    @property
    def _step(self) -> int:
        return self.run.total - self.run.remaining(self.cluster.now)

    def turn(self, *, executed: bool = True) -> Plan:
        decided = super().turn(executed=executed)
        self._waits_for_room = decided.waits_for_room
        return decided

    def _look(self) -> None:
        """What the operator sees now."""
        self.now = self._time
        self.free, self.room, self.reach = self.cluster.free, self.cluster.room, self.cluster.free
        if self._trains:
            self.report = self._said()

    def _said(self) -> Report:
        """What the leader reports."""
        elastic = self.run.scaling is not None
        return Report(
            job_uid="job-uid",
            layout_generation=self._announced,
            step=self._step,
            boundary=self.run.frozen.boundary,
            boundary_step=self._boundary_step,
            num_layers=LAYERS,
            bytes_budget=0,
            offers=self.policy.offers(self.run) if elastic else [],
            checkpoint=self._checkpoint,
            step_seconds=self.run.seconds_of_step(),
            starting_step_seconds=self.run.scaling.starting_seconds if self.run.scaling else None,
            total_steps=self.run.total,
        )

    def _act(self) -> None:
        """Plans until nothing is left to do, and lets the engine do what takes time."""
        self._is_known, self._turned = False, self.cluster.now
        self._look()
        before = {name for name, worker in self.workers.items() if worker.terminating}
        self.settle()
        generation = self.status.generation
        if generation is not None and generation.layout_generation != self._announced:
            self._announced, self._trains = generation.layout_generation, False
            self.cluster.regroup(self.run, Layout(generation.stages, generation.pipelines))
        ending = [name for name, worker in self.workers.items() if worker.terminating and name not in before]
        self.cluster.delete(self.run, len(ending))
        if generation is not None:
            self._place()

    def _place(self) -> None:
        """Gives GPUs to new pods."""
        names = [name for name, worker in self.workers.items() if not worker.scheduled and not worker.terminating]
        if not names:
            return
        for name in names:
            self.change(name, scheduled=True, phase=WorkerPhase.RUNNING, why_pending="")
        self.cluster.take(self.run, len(names), lambda: self._warm(names))
        self._act()

    def _warm(self, names: list[str]) -> None:
        there = [name for name in names if name in self.workers and not self.workers[name].terminating]
        self.warm |= {self.workers[name].uid for name in there}
        if there:
            self._act()


@cache
def _builder(gpus: int, elastic: bool, policy: Policy) -> JobBuilder:
    """The manifest that a user would write."""
    job = make_job().checkpoint().set("acceleratorResource", POOL[0])
    job.set("runPolicy.startTimeoutSeconds", _LONGEST_START_SECONDS)
    if not elastic:
        return job.workers(gpus).on_pack(OnPack.HOLD)
    job.stages(STAGES).workers(gpus, most=policy.most_workers(gpus)).on_pack(policy.on_pack)
    job.set("pipeline.packing", Packing.MEASURED)
    return job.set("elasticPolicy.releaseDownTo", policy.release_down_to)
