"""Lets simulated time pass for jobs on one cluster: GPUs, the queue, and steps that are trained. It decides nothing.

GPUs are alike and have no nodes. A job that waits starts once all GPUs of its start are free; those that came first are
served first, and a smaller one that fits goes ahead of a larger one that does not. A `Driver` decides for one job, and
asks the engine for what takes time. A `Sharing` decides between jobs, at most once in ten seconds.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from pipetransformer_contract.layout import Layout

from .delays import Delays
from .scaling import NOTHING_FROZEN, Frozen, Part, Scaling
from .trace import Job

#: Seconds between two decisions that share GPUs among jobs, as in the operator.
SHARING_SECONDS = 10


class Driver(Protocol):
    """Decides for one job. The engine tells it what happened."""

    def on_admitted(self) -> None:
        """The GPUs of its start are free, so it takes them."""
        ...

    def on_trains(self) -> None:
        """The layout that was asked for trains."""
        ...

    def on_frozen(self) -> None:
        """More layers are frozen, or the cache has the outputs of more."""
        ...

    def on_covered(self) -> None:
        """A checkpoint is durable that lets leavers go."""
        ...

    def on_gone(self, workers: int) -> None:
        """So many workers that were deleted are gone."""
        ...

    def on_ended(self) -> None:
        """The last step is trained."""
        ...


D = TypeVar("D", bound=Driver)
_Shared = TypeVar("_Shared", bound=Driver)


class Sharing(Protocol[_Shared]):
    """Decides between jobs."""

    def share(self, cluster: "Cluster[_Shared]") -> None:
        """Shares GPUs out."""
        ...


@dataclass(eq=False)
class Run:
    """What one job has done so far.

    Attributes:
        needs: GPUs of its start.
        scaling: its step times; None for a rigid job, whose steps take a second.
        parts: its steps.
        layout: in which it trains, or trained last.
        cut_when: what was frozen when its stages were cut.
        steps: steps that are trained, as of `since`.
        step_seconds: seconds of a step; None while it does not train.
        held: GPUs that it holds.
        changes: when it took GPUs, or gave some back, and how many.
        admitted: when it got the GPUs of its start.
        ended: when its last step was trained.
        layouts: when it began to train in each of its layouts, and what was frozen when stages were cut.
    """

    job: Job
    needs: int
    scaling: Scaling | None
    parts: Sequence[Part]
    layout: Layout = field(init=False)
    cut_when: Frozen = NOTHING_FROZEN
    part: int = 0
    steps: float = 0.0
    since: float = 0.0
    step_seconds: float | None = None
    held: int = 0
    changes: list[tuple[float, int]] = field(default_factory=list)
    admitted: float | None = None
    ended: float | None = None
    layouts: list[tuple[float, Layout, Frozen]] = field(default_factory=list)
    version: int = 0

    def __post_init__(self) -> None:
        self.layout = Layout(1, self.job.gpus) if self.scaling is None else self.scaling.start

    @property
    def frozen(self) -> Frozen:
        """What is frozen now."""
        return self.parts[self.part].frozen

    @property
    def total(self) -> int:
        """All its steps."""
        return self.parts[-1].end

    def steps_at(self, now: float) -> float:
        """Steps that are trained by then."""
        return self.steps + (0.0 if self.step_seconds is None else (now - self.since) / self.step_seconds)

    def remaining(self, now: float) -> int:
        """Whole steps that are left."""
        return max(0, self.total - math.floor(self.steps_at(now) + 1e-9))

    def hold(self, now: float, workers: int) -> None:
        """Takes so many GPUs more; fewer if negative."""
        self.held += workers
        self.changes.append((now, workers))

    def gpu_seconds(self, until: float = math.inf) -> float:
        """Seconds times GPUs held, of a job that has ended."""
        assert self.held == 0
        return -sum(min(time, until) * workers for time, workers in self.changes)

    def seconds_of_step(self) -> float:
        """Seconds of a step in the present layout, as its stages are cut."""
        return 1.0 if self.scaling is None else self.scaling.seconds(self.frozen, self.layout, self.cut_when)


class Cluster(Generic[D]):
    """See the module.

    Args:
        jobs: by arrival.
        gpus: GPUs of the cluster.
        delays: how long what takes time takes.
        run_of: makes what the engine keeps of a job.
        driver_of: makes who decides for a job.
        sharing: decides between jobs; None if each decides alone.

    Attributes:
        drivers: who decides for each job that has arrived and not ended.
        elastic: the same, of elastic jobs that were admitted.
        waiting_gpus: GPUs that waiting jobs need.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        gpus: int,
        delays: Delays,
        *,
        run_of: Callable[[Job], Run],
        driver_of: Callable[["Cluster[D]", Run], D],
        sharing: Sharing[D] | None = None,
    ) -> None:
        self.gpus = self.free = gpus
        self.delays = delays
        self.now = 0.0
        self.runs: list[Run] = []
        self.drivers: dict[Run, D] = {}
        self.elastic: dict[Run, D] = {}
        self.waiting_gpus = 0
        self._waiting: dict[int, deque[Run]] = {}
        self._run_of, self._driver_of, self._sharing = run_of, driver_of, sharing
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._tick: float | None = None
        for job in jobs:
            self._at(job.arrival, partial(self._arrive, job))

    def simulate(self) -> Sequence[Run]:
        """Lets time pass until all jobs have ended."""
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
            if not self._events or self._events[0][0] > self.now:
                self._admit()
        stuck = [run.job.number for run in self.runs if run.ended is None]
        assert not stuck, f"jobs that never ended: {stuck[:10]}"
        return self.runs

    # -- what drivers ask for

    @property
    def room(self) -> int:
        """Free GPUs beyond those that waiting jobs need."""
        return max(0, self.free - self.waiting_gpus)

    def waiting(self, most: int) -> Iterable[Run]:
        """Jobs that wait for GPUs, by size and then by arrival, at most this many of each size."""
        for queue in self._waiting.values():
            for place, run in enumerate(queue):
                if place == most:
                    break
                yield run

    def take(self, run: Run, workers: int, on_ready: Callable[[], None]) -> None:
        """Creates workers of a job on free GPUs, and says when they are ready."""
        assert workers <= self.free
        self._hold(run, workers)
        self.after(self.delays.start, lambda: None if run.ended is not None else on_ready())

    def regroup(self, run: Run, layout: Layout) -> None:
        """Stops the job's steps, and continues them in a layout after the pause, with stages cut for what is frozen at
        the decision."""
        frozen = run.frozen
        self._advance(run)
        run.step_seconds = None
        run.version += 1
        self.after(self.delays.pause, lambda: self._continue(run, layout, frozen))

    def save(self, run: Run) -> None:
        """Writes a checkpoint that lets leavers go."""
        self.after(self.delays.checkpoint, lambda: self._tell(run, lambda driver: driver.on_covered()))

    def delete(self, run: Run, workers: int) -> None:
        """Deletes workers of a job, whose GPUs are free after a while."""
        if workers:
            self.after(self.delays.delete, lambda: self._gone(run, workers))

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        """Lets something happen later."""
        self._at(self.now + seconds, happen)

    def look_again(self, when: float | None = None) -> None:
        """Shares GPUs out at the next regular time; with `when` at the first one from then on."""
        if self._sharing is None:
            return
        rounds = math.floor(self.now / SHARING_SECONDS) + 1
        if when is not None:
            rounds = max(rounds, math.ceil(when / SHARING_SECONDS))
        tick = float(rounds * SHARING_SECONDS)
        if self._tick is None or tick < self._tick:
            self._tick = tick
            self._at(tick, lambda: self._share(tick))

    # -- what happens

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, happen))

    def _arrive(self, job: Job) -> None:
        run = self._run_of(job)
        self.runs.append(run)
        self.drivers[run] = self._driver_of(self, run)
        self._waiting.setdefault(run.needs, deque()).append(run)
        self.waiting_gpus += run.needs
        self.look_again()

    def _admit(self) -> None:
        """Starts jobs that wait, while some fit."""
        while fitting := [queue for needs, queue in self._waiting.items() if queue and needs <= self.free]:
            run = min(fitting, key=lambda queue: queue[0].job.number).popleft()
            self.waiting_gpus -= run.needs
            run.admitted = self.now
            if run.scaling is not None:
                self.elastic[run] = self.drivers[run]
            self.drivers[run].on_admitted()

    def _continue(self, run: Run, layout: Layout, cut_when: Frozen) -> None:
        run.layout, run.cut_when = layout, cut_when
        run.layouts.append((self.now, layout, cut_when))
        self._train(run)
        self.look_again()
        self.drivers[run].on_trains()

    def _train(self, run: Run) -> None:
        """Lets the job train up to the end of its part."""
        run.since, run.step_seconds = self.now, run.seconds_of_step()
        run.version += 1
        version = run.version
        left = run.parts[run.part].end - run.steps
        self.after(left * run.step_seconds, lambda: self._end_part(run, version))

    def _end_part(self, run: Run, version: int) -> None:
        if version != run.version:
            return  # it regrouped meanwhile
        run.steps = float(run.parts[run.part].end)
        if run.part == len(run.parts) - 1:
            self._end(run)
            return
        run.part += 1
        self._train(run)
        self.look_again()
        self.drivers[run].on_frozen()

    def _end(self, run: Run) -> None:
        run.ended, run.step_seconds = self.now, None
        run.version += 1
        driver = self.drivers.pop(run)
        self.elastic.pop(run, None)
        driver.on_ended()
        self.after(self.delays.delete, lambda: self._hold(run, -run.held))

    def _gone(self, run: Run, workers: int) -> None:
        if run.ended is not None:
            return  # they went with the others
        self._hold(run, -workers)
        self.drivers[run].on_gone(workers)

    def _tell(self, run: Run, tell: Callable[[Driver], None]) -> None:
        if run.ended is None:
            tell(self.drivers[run])

    def _advance(self, run: Run) -> None:
        run.steps, run.since = run.steps_at(self.now), self.now

    def _hold(self, run: Run, workers: int) -> None:
        """Changes how many GPUs a job holds."""
        run.hold(self.now, workers)
        self.free -= workers
        self.look_again()

    def _share(self, tick: float) -> None:
        if tick != self._tick or self._sharing is None:
            return
        self._tick = None
        self._sharing.share(self)
