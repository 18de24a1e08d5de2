"""A cluster in simulated time: nodes with several accelerators, a scheduler that preempts, and jobs that compete.

Each job has the operator's own `plan()`, and `allocate()` runs between them. Trainers do as they are told, in so many
ticks. What nodes have free is known as `kube.reservations` would know it.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

from pipetransformer_contract.api.status import Share
from pipetransformer_contract.choose import OnPack
from pipetransformer_contract.messages import Offer, StepTime
from pipetransformer_operator.plan import Demand, Plan, WorkerPhase, allocate, demand_of, layouts, worker_name
from pipetransformer_operator.plan.sharing.allocate import CLAIMED_PRIORITY
from pipetransformer_operator.plan.view import View
from tests.testkit.operator.builders import JobBuilder, make_job
from tests.testkit.operator.world import JOB, World

SECONDS = 10


class Job(World):
    """A world that says what its last turn saw, and when time alone asks for another. `priority` is that of its own
    workers."""

    priority = 0
    wakes: datetime | None = None
    settled: object = None

    def turn(self, *, executed: bool = True) -> Plan:
        """One plan, executed. New pods have their priority at once, because the API server gives it."""
        decided = super().turn(executed=executed)
        for worker_id in decided.create:
            claimed = worker_id in self.status.claimed_ids
            self.change(worker_name(JOB, worker_id), priority=CLAIMED_PRIORITY if claimed else self.priority)
        again = decided.requeue_after
        self.wakes = None if again is None else self.now + timedelta(seconds=again)
        return decided

    @property
    def sight(self) -> object:
        """Equal where a turn sees the same, but for the time."""
        return (*self.workers.values(), len(self.warm), self.report, self.free, self.room, self.reach, self.share)


class SimulatedCluster:
    """See the module.

    Args:
        nodes: accelerators of each node.
        pause: ticks from a generation's publication until its members commit it, and from then on until a checkpoint is
            durable that lets leavers go.
        seen: whether the operator sees nodes.

    Attributes:
        inversions: times that jobs were granted what only jobs of higher priority could give up.
        preemptions: workers that the scheduler took away, by job.
        idle: accelerator ticks that nobody had while some job could have used them.
        all: accelerator ticks.
    """

    def __init__(self, nodes: list[int], *, pause: int = 1, seen: bool = True) -> None:
        self.nodes = {f"node-{number}": gpus for number, gpus in enumerate(nodes)}
        self.pause = pause
        self.seen = seen
        self.worlds: dict[str, Job] = {}
        self.inversions = 0
        self.preemptions: Counter[str] = Counter()
        self.idle = self.all = 0
        self._elapsed = 0
        self._demands: dict[str, tuple[object, int, Demand | None]] = {}

    def add(self, name: str, job: JobBuilder, *, priority: int = 0, offers: list[Offer] | None = None) -> World:
        """A job comes; its workers up to the starting size have that priority."""
        world = Job(job)
        world.priority = priority
        world.unschedulable = True
        world.offered = offers or []
        world.wait(self._elapsed)
        self.worlds[name] = world
        return world

    def size(self, name: str) -> int:
        """Workers of the job's layout."""
        generation = self.worlds[name].status.generation
        return generation.layout.workers if generation else 0

    def generations(self) -> dict[str, int]:
        """The number of each job's layout generation."""
        return {name: world.status.layout_generation for name, world in self.worlds.items()}

    def run(self, ticks: int, each: Callable[[], None] = lambda: None) -> None:
        """Lets time pass; every tick jobs plan, pods get nodes, trainers commit, and workers are shared out."""
        for _ in range(ticks):
            self._elapsed += SECONDS
            for name, world in self.worlds.items():
                world.wait(SECONDS)
                self._plan(name)
            self._schedule()
            for name, world in self.worlds.items():
                self._train(name, world)
            self._share()
            self._account()
            each()

    # -- what happens in a tick

    def _plan(self, name: str) -> None:
        world = self.worlds[name]
        self._look(name)
        if world.sight == world.settled and (world.wakes is None or world.now < world.wakes):
            return  # a turn would change nothing
        world.settle()
        for pod in [pod for pod, worker in world.workers.items() if worker.terminating]:
            world.kill(pod)
            world.settle()
        world.settled = world.sight

    def _look(self, name: str) -> None:
        """What the job sees of nodes: all that is free, less what other jobs' pods are about to take."""
        if not self.seen:
            self.worlds[name].free, self.worlds[name].room = None, 0
            return
        free = sum(self.free().values())
        others = sum(
            not worker.scheduled and worker.alive
            for other, world in self.worlds.items()
            if other != name
            for worker in world.workers.values()
        )
        lower = sum(
            worker.scheduled and worker.holds and worker.priority < self.worlds[name].priority
            for other, world in self.worlds.items()
            if other != name
            for worker in world.workers.values()
        )
        self.worlds[name].free, self.worlds[name].room = free, max(0, free - others)
        self.worlds[name].reach = free + lower

    def free(self) -> dict[str, int]:
        """Accelerators that nobody has, by node."""
        held = Counter(
            worker.node
            for world in self.worlds.values()
            for worker in world.workers.values()
            if worker.node and worker.holds
        )
        return {node: gpus - held[node] for node, gpus in self.nodes.items()}

    def _schedule(self) -> None:
        """Pods of the highest priority first; one that finds nothing free preempts, unless it is claimed."""
        pending = [
            (-worker.priority, number, worker.id, name, pod)
            for number, (name, world) in enumerate(self.worlds.items())
            for pod, worker in sorted(world.workers.items())
            if not worker.scheduled and worker.alive
        ]
        ending = sum(worker.terminating for world in self.worlds.values() for worker in world.workers.values())
        for negative, _, _, name, pod in sorted(pending):
            node = self._place(name)
            if node is not None:
                self.worlds[name].change(pod, scheduled=True, node=node, phase=WorkerPhase.RUNNING, why_pending="")
            elif ending > 0:
                ending -= 1  # it waits for the node of one that is on its way out
            elif -negative != CLAIMED_PRIORITY:
                self._preempt(-negative)

    def _place(self, name: str) -> str | None:
        """The node with room where most of the job's workers are; of equal ones the fullest."""
        mine = Counter(worker.node for worker in self.worlds[name].workers.values())
        free = {node: gpus for node, gpus in self.free().items() if gpus > 0}
        return min(free, key=lambda node: (-mine[node], free[node], node), default=None)

    def _preempt(self, priority: int) -> None:
        """Tells a worker of the lowest priority below this one to go."""
        victims = [
            (worker.priority, -worker.id, name, pod)
            for name, world in self.worlds.items()
            for pod, worker in world.workers.items()
            if worker.scheduled and worker.alive and worker.priority < priority
        ]
        if victims:
            _, _, name, pod = min(victims)
            self.preemptions[name] += 1
            self.worlds[name].change(pod, disrupted=True, terminating=True)

    def _train(self, name: str, world: World) -> None:
        self._look(name)
        if any(worker.scheduled and worker.uid not in world.warm for worker in world.workers.values()):
            world.warm_up()
        status, generation = world.status, world.status.generation
        if generation is None or generation.published_time is None or status.finished:
            return
        ticks = (world.now - generation.published_time).total_seconds() / SECONDS
        if (
            not generation.confirmed
            and ticks >= self.pause
            and all(member.name in world.workers for member in generation.members)
        ):
            world.commit()
            world.leave()
        elif status.leaving_ids and ticks >= 2 * self.pause:
            world.commit(checkpoint=world.report.boundary if world.report else 0)

    def _share(self) -> None:
        demands = {name: self._demand(name) for name in self.worlds}
        shares = allocate([demand for demand in demands.values() if demand is not None])
        self._note_inversions({name: demand for name, demand in demands.items() if demand is not None}, shares)
        for name, world in self.worlds.items():
            workers = shares.get(f"default/{name}")
            generation = world.status.layout_generation
            world.share = None if workers is None else Share(workers=workers, layout_generation=generation)

    def _demand(self, name: str) -> Demand | None:
        self._look(name)
        world = self.worlds[name]
        known = self._demands.get(name)
        if known is None or known[0] != (world.sight, world.status) or self._elapsed >= known[1]:
            demand = demand_of(world.spec, replace(world.observed(), name=name), world.now)
            known = self._demands[name] = (world.sight, world.status), self._elapsed + 3 * SECONDS, demand
        return known[2]

    def _note_inversions(self, demands: dict[str, Demand], shares: dict[str, int | None]) -> None:
        """What jobs below a priority are granted must be free, or come from jobs below it, too."""
        asked = {name: share for name, demand in demands.items() if (share := shares[demand.key]) is not None}
        free = sum(self.free().values()) + sum(demand.leaving for demand in demands.values())
        for priority in {self.worlds[name].priority for name in asked}:
            granted = given = 0
            for name, share in asked.items():
                if self.worlds[name].priority < priority:
                    granted += max(0, share - demands[name].held)
                    given += max(0, demands[name].held - share)
            self.inversions += granted > given + free

    def _account(self) -> None:
        free = sum(self.free().values())
        self.all += sum(self.nodes.values())
        if free and any(self.could_use(name, free) for name in self.worlds):
            self.idle += free

    def could_use(self, name: str, free: int) -> bool:
        """Whether the job would be quicker, or begin, with so many workers more."""
        world = self.worlds[name]
        status, spec = world.status, world.spec
        if status.finished or world.kept_by is not None:
            return False
        placed = sum(worker.scheduled for worker in world.workers.values())
        if status.generation is None:
            return placed < spec.elastic_policy.workers <= placed + free
        if not spec.elastic_policy.on_pack.widens or placed > status.generation.layout.workers or status.leaving_ids:
            return False  # it is about to use what it has
        view = View.of(spec, world.observed(), world.now)
        best = layouts.best(view, min(spec.elastic_policy.ceiling, status.generation.layout.workers + free))
        return best is not None and best.workers > status.generation.layout.workers


def speeds(stages: int, most: int, exponent: float) -> list[Offer]:
    """What a model offers whose steps are that power of the number of its pipelines quicker."""
    times = [StepTime(pipelines=width, seconds=width**-exponent) for width in range(1, most // stages + 1)]
    return [Offer(stages=stages, bytes_per_worker=1, step_seconds=times)]


def auto(workers: int, most: int, *, stages: int = 1, on_pack: OnPack = OnPack.AUTO) -> JobBuilder:
    """A job that shares, and has room for so many workers at most."""
    job = make_job().stages(stages).workers(workers, most=most).checkpoint().on_pack(on_pack.value)
    return job.set("acceleratorResource", "nvidia.com/gpu")
