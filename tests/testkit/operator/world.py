"""A world for `plan()`: pods that do as they are told, a leader that reports, and a clock that only tests move."""

import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pipetransformer_contract.api import JobSpec, JobStatus
from pipetransformer_contract.api.status import Condition, ConditionType, Share, State
from pipetransformer_contract.messages import DurableCheckpoint, Generation, Offer, Outcome, Ready, Report, Upcoming
from pipetransformer_operator.plan import (
    Beat,
    NodeFacts,
    Observed,
    Plan,
    PlanEvent,
    Worker,
    WorkerPhase,
    plan,
    worker_name,
)
from tests.testkit.operator.builders import JobBuilder, make_job
from tests.testkit.operator.fake_queue import FakeQueue

JOB = "digits"
LAYERS = 12
TOTAL_STEPS = 1000
#: Parameter bytes of one active block; a frozen one counts a sixth, as in the paper.
BLOCK_BYTES = 600


class World:
    """Executes plans as a cluster would, and checks after each what must always hold."""

    def __init__(self, builder: JobBuilder) -> None:
        self.builder = builder
        self.status = JobStatus()
        self.queue: FakeQueue | None = None
        self.lingering = False
        self.workers: dict[str, Worker] = {}
        self.warm: set[str] = set()
        self.report: Report | None = None
        self.offered: list[Offer] = []
        self.now = self.since = datetime(2026, 1, 1, tzinfo=UTC)
        self.deleted: list[str] = []
        self.deleted_alive: list[str] = []
        self.unschedulable = False
        self.refusal = ""
        self.unprotected = ""
        self.keeps_pods = ""
        self.undeleted: dict[str, str] = {}
        self.told: list[PlanEvent] = []
        self.kept_by: tuple[str, ...] | None = None
        self.metadata_generation = 1
        self.share: Share | None = None
        self.released: datetime | None = None
        self.gives_way_to = ""
        self.preferred_since: datetime | None = None
        self.silent: set[str] = set()
        self.report_pace = timedelta(0)
        self.lost_peers: set[str] = set()
        self.why_broken: dict[str, str] = {}
        self._committed: dict[str, int] = {}
        self._waiting: dict[str, tuple[int, datetime]] = {}
        self._leaving: set[str] = set()
        self._once_members: set[str] = set()
        self.sees_drains = True
        self.stubborn: set[str] = set()
        self.unsaved: dict[str, str] = {}
        self.lost_nodes: set[str] = set()
        self.device_failures: dict[str, int] = {}
        self.avoided: dict[str, datetime] = {}
        self.free: int | None = None
        self.room: int | None = None
        self.reach: int | None = None
        self.room_unknown = ""
        self._uids = 0

    @property
    def spec(self) -> JobSpec:
        return self.builder.job().spec

    @property
    def generation(self) -> Generation:
        assert self.status.generation is not None
        return self.status.generation

    def state(self) -> State:
        """What the printer column shows."""
        return self.status.state

    def condition(self, kind: ConditionType) -> Condition:
        """The status's condition of that kind, which has to be there."""
        found = self.status.condition(kind)
        assert found is not None
        return found

    @property
    def shape(self) -> tuple[int, int]:
        """(stages, pipelines) of the published generation."""
        return self.generation.stages, self.generation.pipelines

    def observed(self) -> Observed:
        ready = {w.uid: Ready(address=f"10.0.0.{w.id}:29500") for w in self.workers.values() if w.uid in self.warm}
        return Observed(
            uid="job-uid",
            name=JOB,
            namespace="default",
            status=self.status,
            workers=tuple(self.workers.values()),
            ready=ready,
            report=self.report,
            heard={w.uid: self.beat(w).time for w in self.workers.values()},
            report_pace=self.report_pace,
            beats={w.uid: self.beat(w) for w in self.workers.values()},
            lost_peers=frozenset(self.lost_peers),
            kept_by=self.kept_by,
            refusal=self.refusal,
            unprotected=self.unprotected,
            undeleted=self.undeleted,
            metadata_generation=self.metadata_generation,
            share=self.share,
            queue=self.queue.look(self.status) if self.queue else None,
            labels=self.builder.job().metadata.labels,
            listening_since=self.since,
            released=self.released,
            gives_way_to=self.gives_way_to,
            preferred_since=self.preferred_since,
            sees_drains=self.sees_drains,
            nodes=NodeFacts(frozenset(self.lost_nodes), self.device_failures, self.avoided),
            free=self.free,
            room=self.room,
            reach=self.reach,
            room_unknown=self.room_unknown,
        )

    def beat(self, worker: Worker) -> Beat:
        """What the worker's last heartbeat said; silent ones said it long ago."""
        time = self.now - timedelta(hours=1) if worker.name in self.silent else self.now
        after, since = self._waiting.get(worker.uid, (None, None))
        committed, why = self._committed.get(worker.uid, 0), self.why_broken.get(worker.name, "")
        return Beat(time, committed, after, since, why_broken=why, unsaved=self.unsaved.get(worker.name, ""))

    def turn(self, *, executed: bool = True) -> Plan:
        """One plan, executed; or only its status written, as by an operator that dies then."""
        before = self.status
        self._obey()
        decided = plan(self.spec, self.observed(), self.now)
        assert decided.status.layout_generation >= before.layout_generation
        assert decided.status.gpus.released >= before.gpus.released
        if decided.status != before:
            self.status = JobStatus.model_validate(decided.status.to_wire())
            assert self.status == decided.status
        if self.status.generation is not None and self.status.layout_generation != before.layout_generation:
            self._leaving |= {member.uid for member in self.status.generation.leavers}
            self._leaving -= {member.uid for member in self.status.generation.members}
            self._once_members |= {member.name for member in self.status.generation.members}
        if not executed:
            return replace(decided, create=(), delete=())
        self.told += decided.events
        for worker_id in decided.create:
            name = worker_name(JOB, worker_id)
            assert name not in self.workers
            assert name not in self._once_members, "the name of a former member comes back"
            self._uids += 1
            phase = WorkerPhase.PENDING if self.unschedulable else WorkerPhase.RUNNING
            why_pending = "Unschedulable: 0/3 nodes are available" if self.unschedulable else ""
            self.workers[name] = Worker(
                worker_id, name, f"uid-{self._uids}", phase, scheduled=not self.unschedulable, why_pending=why_pending
            )
        if self.queue:
            self.queue.look(self.status)
            assert len(self.workers) <= self.queue.held or self.status.finished, "pods without quota"
        for deletion in decided.delete:
            name, uid = deletion.name, deletion.uid
            assert self.workers[name].uid == uid and deletion.why
            if self.keeps_pods:
                self.undeleted[uid] = self.keeps_pods
                continue
            self.undeleted.pop(uid, None)
            worker = self.workers.pop(name)
            self.deleted.append(name)
            if worker.alive:
                self.deleted_alive.append(name)
            if self.lingering:
                self.workers[name] = replace(worker, terminating=True)
        return decided

    def _obey(self) -> None:
        """Members that are told to stop leave a checkpoint of the newest step and end; `stubborn` ones do not."""
        if self.status.stop is None or self.status.generation is None or self.spec.checkpoint is None:
            return
        told = {member.name for member in self.status.generation.members} - self.stubborn - self.silent
        step = self.report.step if self.report else 0
        for name in told & self.workers.keys():
            if self.workers[name].alive:
                self.end(name, 0, json.dumps({"outcome": "Left", "reason": "Stopped", "savedStep": step}))

    def bury(self) -> None:
        """Pods that are terminating are gone."""
        for name in [name for name, worker in self.workers.items() if worker.terminating]:
            self.kill(name)
        self.settle()

    def settle(self) -> None:
        """Turns until nothing is left to do; fails if that takes long."""
        for _ in range(20):
            before, undeleted = self.status, set(self.undeleted)
            decided = self.turn()
            kept = all(uid in undeleted.intersection(self.undeleted) for uid in (one.uid for one in decided.delete))
            if self.status == before and not decided.create and kept:
                return
        raise AssertionError("the plan does not converge")

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def warm_up(self, names: Iterable[str] | None = None) -> None:
        """Workers import and post ready."""
        self.warm |= {
            self.workers[name].uid
            for name in (self.workers if names is None else names)
            if self.workers[name].scheduled
        }
        self.settle()

    def commit(
        self,
        boundary: int | None = None,
        checkpoint: int | None = None,
        offered: list[Offer] | None = None,
        step_seconds: float | None = None,
        starting_step_seconds: float | None = None,
        num_shards: int | None = None,
        steps: int = 10,
        schedule: str = "",
        why_schedule: str = "",
        why_thawed: str = "",
        upcoming: Upcoming | None = None,
    ) -> None:
        """The leader reports: it trains in the published generation, with so many layers frozen and checkpointed.

        A checkpoint with fewer layers frozen than now is an older generation's. `num_shards` is that of its data.
        """
        last = self.report
        boundary = boundary if boundary is not None else (last.boundary if last else 0)
        durable = last.checkpoint if last else None
        step = last.step + steps if last else 1
        since = last.boundary_step if last and last.boundary == boundary else step if boundary else 0
        if checkpoint is not None:
            stale = checkpoint < boundary
            durable = DurableCheckpoint(
                step=since - 1 if stale else step,
                boundary=checkpoint,
                min_stages=2,
                num_shards=num_shards,
                layout_generation=self.generation.layout_generation - stale,
            )
        self.report = Report(
            job_uid="job-uid",
            layout_generation=self.generation.layout_generation,
            step=step,
            boundary=boundary,
            boundary_step=since,
            num_layers=LAYERS,
            bytes_budget=LAYERS // self.spec.pipeline.stages * BLOCK_BYTES,
            offers=offered or self.offered or offers(boundary),
            checkpoint=durable,
            step_seconds=step_seconds,
            starting_step_seconds=starting_step_seconds,
            total_steps=TOTAL_STEPS,
            schedule=schedule,
            why_schedule=why_schedule,
            upcoming=upcoming,
            why_thawed=why_thawed,
        )
        for member in self.generation.members:
            self._committed[member.uid] = self.generation.layout_generation
            self._waiting.pop(member.uid, None)
        self.settle()

    def break_group(self, names: Iterable[str]) -> None:
        """These workers lost their group, or never met, and wait for a newer generation than the published one."""
        generation = self.generation.layout_generation
        for uid in (self.workers[name].uid for name in names):
            if self._waiting.get(uid, (0, self.now))[0] != generation:
                self._waiting[uid] = (generation, self.now)
        self.settle()

    def part(self) -> None:
        """Leavers hold nothing any more, and wait for a generation that names them."""
        for worker in self._take_leavers():
            self._committed[worker.uid] = self.generation.layout_generation
            self._waiting[worker.uid] = self.generation.layout_generation, self.now
        self.settle()

    def leave(self) -> None:
        """Leavers exit 0, as those of older trainers do."""
        for worker in self._take_leavers():
            self.end(worker.name, exit_code=0, message='{"outcome": "Left"}')
        self.settle()

    def _take_leavers(self) -> list[Worker]:
        uids, self._leaving = self._leaving, set()
        return [worker for worker in self.workers.values() if worker.uid in uids]

    def end(self, name: str, exit_code: int, message: str = "") -> None:
        phase = WorkerPhase.FAILED if exit_code else WorkerPhase.SUCCEEDED
        self.change(name, phase=phase, exit_code=exit_code, message=message)

    def change(self, name: str, **fields: Any) -> None:
        """The pod's status changes."""
        self.workers[name] = replace(self.workers[name], **fields)

    def kill(self, name: str) -> None:
        """The pod is gone, as after an eviction."""
        del self.workers[name]

    def finish(self, outcome: Outcome, message: str = "") -> None:
        assert self.report is not None
        self.report = self.report.model_copy(update={"outcome": outcome, "message": message})
        self.settle()

    def start(self) -> None:
        """From nothing to training."""
        self.settle()
        self.warm_up()
        self.commit()


def offers(boundary: int) -> list[Offer]:
    """What twelve equal blocks can do with `boundary` of them frozen: the largest stage of a balanced cut, in bytes."""
    total = (LAYERS - boundary) * BLOCK_BYTES + boundary * BLOCK_BYTES // 6
    return [Offer(stages=stages, bytes_per_worker=-(-total // stages)) for stages in (1, 2, 3, 4, 6, 8)]


def training(pipelines: int = 2, most: int | None = None) -> World:
    """A job that trains in so many pipelines of two stages."""
    world = World(make_job().stages(2).workers(2 * pipelines, most=most))
    world.start()
    return world
