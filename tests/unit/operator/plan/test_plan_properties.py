"""Rules that hold whatever happens, in whatever order: a state machine whose steps are what a cluster does to a job.

After each turn `check` compares what was and what is; an operator that dies between two writes is a turn that is only
half executed. In the end the world is put right, and the job has to come to rest in a layout that it should have.
"""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pipetransformer_contract.api import JobStatus
from pipetransformer_contract.api.labels import QUEUE_LABEL
from pipetransformer_contract.api.status import ConditionType, Reason, Share, State
from pipetransformer_contract.messages import Generation, Offer, Outcome, ResizeReason
from pipetransformer_operator.plan import DisruptionBudget, Plan, Worker, WorkerPhase, worker_name
from pipetransformer_operator.plan.rules.stall import BROKEN_IN_A_ROW
from tests.testkit.operator.builders import JobBuilder, make_job
from tests.testkit.operator.fake_queue import QUEUE, FakeQueue
from tests.testkit.operator.world import JOB, LAYERS, World

pytestmark = pytest.mark.timeout(240)
#: Generations that follow from what was lost, and not from what would be better.
FORCED = (ResizeReason.START, ResizeReason.FAILURE, ResizeReason.DRAIN, ResizeReason.UNDO)
NUMBER = st.integers(0, 7)
#: From less than a pipeline to more than any job starts with.
CEILING = st.integers(1, 14)


class Checked(World):
    """A world that compares what was and what is after each turn."""

    def __init__(self, builder: JobBuilder) -> None:
        super().__init__(builder)
        self.real_failures = 0
        self.breaks = 0

    def commit(self, *args: Any, **kwargs: Any) -> None:
        self.breaks = 0
        super().commit(*args, **kwargs)

    def turn(self, *, executed: bool = True) -> Plan:
        before, workers = self.status, dict(self.workers)
        decided = super().turn(executed=executed)
        for deletion in decided.delete:
            self.check_deletion(before, workers[deletion.name])
        self.check(before)
        self.check_budget(decided.disruption_budget, workers)
        return decided

    def settle(self) -> None:
        before = self.status
        super().settle()
        if (
            self.status.generation is not None
            and self.status.worker_ids
            and not (self.status.finished or self.spec.suspend)
        ):
            self.check_recovery(before, self.status.generation)

    def check(self, before: JobStatus) -> None:
        """What one turn may have changed."""
        status = self.status
        assert status.layout_generation - before.layout_generation in (0, 1)
        assert status.next_worker_id >= before.next_worker_id
        assert status.failures <= self.real_failures, "what was no failure was counted"
        assert set(status.claimed_ids) <= set(status.worker_ids)
        assert set(status.surplus_ids or ()) <= set(status.leaving_ids) <= set(status.worker_ids)
        if status.generation is not None and status.layout_generation != before.layout_generation:
            self.check_published(before, status.generation)

    def check_budget(self, budget: DisruptionBudget | None, workers: Mapping[str, Worker]) -> None:
        """Rule 3: no worker that is needed may be evicted before it is replaced. Claimed workers are needed if the
        others are too few, or joined after them. The rule does not hold past a drain's deadline, when the job lets go,
        nor where no state is held: before the first generation, while a job starts again, and at its end."""
        status, generation = self.status, self.status.generation
        if generation is None or status.finished or (status.drain_deadline and status.drain_deadline <= self.now):
            return
        assert budget is not None
        living = {key for key in status.worker_ids if (w := workers.get(worker_name(JOB, key))) and w.alive}
        names = {member.name for member in generation.members}
        claimed = set(status.claimed_ids)
        base = {key for key in living - claimed if worker_name(JOB, key) in names}
        if len(base) < generation.stages or (claimed and min(claimed) < max(base)):
            assert budget.claimed, "a claimed worker that may hold the only copy of a stage may be evicted"
        covered = living if budget.claimed else living - claimed
        assert len(covered) <= budget.min_available, "a worker may be evicted before it is replaced"

    def check_published(self, before: JobStatus, generation: Generation) -> None:
        """Rules 3 and 5: legal sizes, one change at a time, and nobody left out who may hold the only copy."""
        names = [member.name for member in generation.members]
        elastic = self.spec.elastic_policy
        assert len(set(names)) == generation.stages * generation.pipelines == len(names)
        assert generation.leader in names
        assert not set(names) & {member.name for member in generation.leavers}
        assert generation.pipelines <= (self.status.num_shards or 0)
        if generation.reason is not ResizeReason.UNDO and (
            before.generation is None or before.generation.layout != generation.layout
        ):
            assert elastic.min_workers <= len(names) <= elastic.max_workers
            assert generation.pipelines >= elastic.min_pipelines
        if before.generation is None:
            return
        if generation.reason not in FORCED:
            assert generation.confirmed_generation >= before.generation.layout_generation, "two resizes at a time"
            assert all(map(self.may_go, before.leaving_ids)) or self.durable(before.generation), (
                "leavers still wait for their checkpoint"
            )
        gone = {member.name for member in before.generation.members} - {
            member.name for member in (*generation.members, *generation.leavers)
        }
        if before.generation.confirmed:  # until then those who joined may hold nothing, and leave first
            self.check_leavers(before.generation, generation)
        for name in gone:
            worker = self.workers.get(name)
            assert self.is_lost(worker), (
                f"{name} lives, may hold the only copy, and has no part in generation {generation.layout_generation}"
            )

    def check_leavers(self, before: Generation, generation: Generation) -> None:
        """No worker of the starting size leaves while a claimed one stays, which has the lower priority: when that goes
        as well, the job stops. It does not hold for those that have to go: their node or their quota is wanted back."""
        status = self.status
        claimed = {worker_name(JOB, key) for key in status.claimed_ids}
        taken = self.queue.evicted | self.queue.withdrawn if self.queue else set()
        has_to_go = {
            worker_name(JOB, key) for one in status.quota_requests if one.name in taken for key in one.worker_ids
        }
        has_to_go |= {name for name, worker in self.workers.items() if worker.draining}
        members = {member.name for member in before.members}
        own = {member.name for member in generation.leavers} & members - claimed - has_to_go
        stays = {member.name for member in generation.members} & claimed
        assert not (own and stays), f"{own} leave and {stays} stay"

    def check_recovery(self, before: JobStatus, generation: Generation) -> None:
        """A job that lost members and published nothing creates somebody at once, and says afterwards who is awaited,
        or until when it waits. It may have to ask for quota first, or to wait until pods that hold it are gone; leavers
        may be as good as new; and its ceiling may allow nobody."""
        status = self.status
        wanted = {worker_name(JOB, key): key for key in status.worker_ids}
        lost = [member.name for member in generation.members if member.name not in wanted]
        if not lost:
            return
        members = {member.name for member in generation.members}
        joining = [key for name, key in wanted.items() if name not in members and key not in status.leaving_ids]
        slept_over = status.next_resize_time is not None and status.next_resize_time > self.now
        now = any(worker_name(JOB, key) in lost for key in before.worker_ids)
        full = len(wanted) >= self.spec.elastic_policy.max_workers
        asks = any(not request.admitted for request in status.quota_requests)
        holds = self.queue is not None and set(self.workers) - set(wanted)
        excused = asks or holds or status.leaving_ids or full
        assert joining or excused or (slept_over and not now), f"without {lost} nobody trains, and nobody is created"
        assert "no new worker is pending" not in self.condition(ConditionType.RUNNING).message

    def check_deletion(self, before: JobStatus, worker: Worker) -> None:
        """Rules 3 and 8: nobody is deleted who holds state, and nothing is given back before it is durable."""
        status, worker_id, name = self.status, worker.id, worker.name
        if status.finished or self.spec.suspend or status.generation is None:
            return
        if status.is_true(ConditionType.SUSPENDED):  # a resume waits until the workers have ended
            return
        if self.queue and not status.worker_ids:  # the queue wants the whole job's quota back
            return
        assert worker_id not in status.worker_ids
        lost = self.is_lost(worker)
        assert lost or name not in {member.name for member in status.generation.members}, "a member was deleted"
        if worker_id in before.leaving_ids and before.generation is not None:  # the turn may publish the next one, too
            assert self.durable(before.generation) or lost or worker.draining, (
                f"{name} was given back before a checkpoint was durable"
            )

    def may_go(self, worker_id: int) -> bool:
        """Whether a leaver need not wait for a checkpoint: nobody else can have what it holds."""
        worker = self.workers.get(worker_name(JOB, worker_id))
        return worker is None or worker.draining

    def is_lost(self, worker: Worker | None) -> bool:
        """Whether the worker is gone, has ended, is silent, or hangs: others wait for a generation, and it does not."""
        if worker is None or not worker.alive or worker.name in self.silent:
            return True
        beats = {other.uid: self.beat(other) for other in (*self.workers.values(), worker)}
        members = {member.uid for member in self.status.generation.members} if self.status.generation else set()
        after = {  # who left as told waits as well, and for nobody
            uid: 0 if uid not in members and beat.waiting_after == beat.layout_generation else beat.waiting_after or 0
            for uid, beat in beats.items()
        }
        return after[worker.uid] < max(after.values())

    def move_ceiling(self, ceiling: int) -> None:
        """As `kubectl scale` does, to no less than the spec allows, and no more than can be claimed one by one."""
        elastic = self.spec.elastic_policy
        self.builder.set("elasticPolicy.maxWorkers", min(max(ceiling, elastic.min_workers), elastic.workers + 6))
        self.metadata_generation += 1

    def durable(self, generation: Generation) -> bool:
        return generation.covered_by(self.status.checkpoint)

    def recover(self) -> None:
        """All is well from now on: the job comes to rest, training in a layout that it should have."""
        self.unschedulable, self.share = False, None
        if self.queue:
            self.queue.size, self.queue.problem = 8192, ""
        self.silent.clear()
        self.lost_peers.clear()
        for name, worker in self.workers.items():
            self.change(name, draining=False, disrupted=False, node_lost=False) if worker.alive else None
        self.live_on()
        if self.status.finished:
            assert self.status.is_true(ConditionType.FAILED)
            assert self.status.failures > self.spec.run_policy.backoff_limit
            return
        running, ceiling = self.condition(ConditionType.RUNNING), self.spec.elastic_policy.max_workers
        if running.reason == Reason.NO_LEGAL_START:
            assert not self.workers and not self.status.quota_requests
        elif running.reason == Reason.RECOVERING:  # survivors of a generation that told of no shorter pipelines
            assert f"maxWorkers allows no more than {ceiling}" in running.message
        elif self.offered and ceiling < self.generation.stages:
            assert "so the job keeps its layout" in self.condition(ConditionType.RESIZING).message
            self.move_ceiling(self.generation.stages)
            self.live_on()
        if running.reason in (Reason.NO_LEGAL_START, Reason.RECOVERING):
            assert ceiling < self.spec.pipeline.stages
            self.move_ceiling(self.spec.pipeline.stages)
            self.live_on()
        assert len(self.generation.members) <= self.spec.elastic_policy.max_workers
        assert self.state() is State.RUNNING, self.status.conditions
        assert self.generation.confirmed and not self.status.leaving_ids and self.status.resize is None
        members = {member.name for member in self.generation.members}
        spares = set(self.workers) - members
        assert not spares or self.spec.elastic_policy.on_pack == "Hold"
        own = set(self.status.worker_ids) - set(self.status.claimed_ids)
        assert len(own) <= self.status.initial_workers, "a claim has the starting size's priority"
        if self.queue:
            held = {key for request in self.status.quota_requests for key in request.worker_ids}
            assert held == set(self.status.worker_ids) and self.queue.held == len(held)
        self.finish(Outcome.SUCCEEDED)
        assert self.state() is State.COMPLETE

    def live_on(self) -> None:
        """Workers do as told for so long that whatever was slept over is tried."""
        for _ in range(16):
            self.do_as_told()
            self.leave()
            self.wait(3601)
            self.settle()
        self.do_as_told()  # the last step was an hour ago

    def do_as_told(self) -> None:
        """Pods end and get nodes, joiners are ready, and members commit."""
        self.bury()
        if not self.unschedulable:
            self.schedule()
        self.warm_up()
        if self.trains:
            self.commit(checkpoint=self.report.boundary if self.report else 0)

    @property
    def trains(self) -> bool:
        """Whether all members of the published generation live."""
        generation = self.status.generation
        if generation is None or self.status.finished or self.spec.suspend:
            return False
        workers = [self.workers.get(member.name) for member in generation.members]
        return all(worker is not None and worker.alive and worker.name not in self.silent for worker in workers)

    def schedule(self) -> None:
        """Every pod gets a node."""
        for name, worker in self.workers.items():
            if not worker.scheduled:
                self.change(name, scheduled=True, phase=WorkerPhase.RUNNING, why_pending="")


class Life(RuleBasedStateMachine):
    """A job and all that may happen to it."""

    world: Checked

    @initialize(
        stages=st.sampled_from([1, 2, 4]),
        pipelines=st.integers(1, 2),
        spare=st.integers(0, 4),
        on_pack=st.sampled_from(["Widen", "Release", "Hold", "Auto"]),
        least=st.sampled_from([1, 2, 8]),
        quota=st.none() | st.integers(0, 8),
        shrinks=st.booleans(),
        grown=st.booleans(),
    )
    def begin(
        self,
        stages: int,
        pipelines: int,
        spare: int,
        on_pack: str,
        least: int,
        quota: int | None,
        shrinks: bool,
        grown: bool,
    ) -> None:
        workers = stages * pipelines
        job = make_job().stages(stages).workers(workers, least=min(least, workers), most=workers + spare)
        if quota is not None:
            job.label(QUEUE_LABEL, QUEUE)
        self.world = Checked(job.checkpoint().on_pack(on_pack).set("runPolicy.backoffLimit", 8))
        self.world.queue = None if quota is None else FakeQueue(quota)
        if not shrinks:  # survivors are soon too few
            self.world.offered = [Offer(stages=stages, bytes_per_worker=1)]
        self.world.settle()
        for _ in range(3 * grown):
            self.world.do_as_told()

    # -- what trainers do

    @rule()
    def workers_warm_up(self) -> None:
        self.world.warm_up()

    @rule(checkpoint=st.booleans())
    def members_commit(self, checkpoint: bool) -> None:
        if self.world.trains:
            boundary = self.world.report.boundary if self.world.report else 0
            self.world.commit(checkpoint=boundary if checkpoint else None)

    @rule()
    def all_do_as_told(self) -> None:
        self.world.do_as_told()

    @rule(boundary=st.integers(0, LAYERS - 1))
    def layers_freeze_or_thaw(self, boundary: int) -> None:
        if self.world.trains:
            self.world.commit(boundary=boundary)

    @rule()
    def leavers_leave(self) -> None:
        if self.world.trains and self.world.generation.confirmed:
            self.world.leave()

    @rule()
    def leavers_wait(self) -> None:
        if self.world.trains:
            self.world.part()

    @rule(everyone=st.booleans(), number=NUMBER)
    def the_group_breaks(self, everyone: bool, number: int) -> None:
        generation = self.world.status.generation
        names = [m.name for m in (*generation.members, *generation.leavers)] if generation else []
        living = [name for name in names if name in self.world.workers and self.world.workers[name].alive]
        if living:
            self.world.breaks += 1
            cannot_meet = self.world.breaks >= BROKEN_IN_A_ROW
            self.world.real_failures += cannot_meet or not everyone  # the others may never come: they hang
            self.world.break_group(living if everyone else [living[number % len(living)]])

    # -- what the cluster does

    @rule(number=NUMBER, kind=st.sampled_from(["gone", "crash", "stopped", "disrupted", "deleted", "left"]))
    def a_worker_ends(self, number: int, kind: str) -> None:
        world = self.world
        if not world.workers:
            return
        name = sorted(world.workers)[number % len(world.workers)]
        match kind:
            case "gone":
                world.kill(name)
            case "crash":
                world.real_failures += 1
                world.end(name, exit_code=1)
            case "stopped":
                world.real_failures += 1
                world.silent.add(name)
                world.lost_peers.add(name)
            case "disrupted":
                world.change(name, disrupted=True)
            case "deleted":
                world.change(name, terminating=True)
            case "left":
                world.end(name, exit_code=0, message='{"outcome": "Left"}')
        world.settle()

    @rule()
    def terminating_pods_go(self) -> None:
        self.world.bury()

    @rule(unschedulable=st.booleans())
    def the_cluster_fills_or_empties(self, unschedulable: bool) -> None:
        self.world.unschedulable = unschedulable
        if not unschedulable:
            self.world.schedule()
        self.world.settle()

    @rule(number=NUMBER)
    def a_node_is_cordoned_or_not(self, number: int) -> None:
        workers = self.world.workers
        if workers:
            name = sorted(workers)[number % len(workers)]
            self.world.change(name, draining=not workers[name].draining)
            self.world.settle()

    @rule(number=NUMBER, known=st.booleans())
    def a_node_dies_under_a_worker_that_has_not_begun(self, number: int, known: bool) -> None:
        world = self.world
        generation = world.status.generation
        begun = {member.name for member in (*generation.members, *generation.leavers)} if generation else set()
        waiting = [w for w in world.workers.values() if w.alive and w.uid not in world.warm and w.name not in begun]
        if waiting:
            worker = waiting[number % len(waiting)]
            world.silent.add(worker.name)
            since = None if known else world.now
            world.change(
                worker.name, scheduled=True, phase=WorkerPhase.PENDING, node_lost=known, unattended_since=since
            )
            world.settle()

    @rule(seconds=st.sampled_from([1, 15, 61, 200, 700, 4000]))
    def time_passes(self, seconds: int) -> None:
        self.world.wait(seconds)
        self.world.settle()

    @rule(size=st.integers(0, 12), known=st.booleans())
    def the_queue_has_other_quota_or_is_silent(self, size: int, known: bool) -> None:
        if self.world.queue:
            self.world.queue.size = size
            self.world.queue.problem = "" if known else "the queue does not answer"
            self.world.settle()

    @rule(number=NUMBER, withdrawn=st.booleans())
    def the_queue_wants_quota_back(self, number: int, withdrawn: bool) -> None:
        requests = self.world.status.quota_requests
        if self.world.queue and requests:
            names = self.world.queue.withdrawn if withdrawn else self.world.queue.evicted
            names.add(requests[number % len(requests)].name)
            self.world.settle()

    # -- what users and other jobs do

    @rule(ceiling=CEILING)
    def the_ceiling_is_moved(self, ceiling: int) -> None:
        self.world.move_ceiling(ceiling)
        self.world.settle()

    @rule(suspended=st.booleans())
    def the_job_is_suspended_or_resumed(self, suspended: bool) -> None:
        self.world.builder.suspended(suspended)
        self.world.settle()

    @rule(workers=st.none() | st.integers(0, 8), stale=st.booleans(), for_others=st.booleans())
    def workers_are_shared_out(self, workers: int | None, stale: bool, for_others: bool) -> None:
        generation = max(0, self.world.status.layout_generation - stale)
        share = None if workers is None else Share(workers=workers, layout_generation=generation, for_others=for_others)
        self.world.share = share
        self.world.settle()

    # -- what happens to the operator

    @rule()
    def the_operator_dies_between_its_writes(self) -> None:
        self.world.turn(executed=False)
        self.world.since = self.world.now
        self.world.warm.clear()
        self.world.settle()

    @precondition(lambda self: self.world.status.generation is not None)
    @rule()
    def nothing_happens(self) -> None:
        before = self.world.status
        again = self.world.turn()
        assert (again.status, again.create, again.delete, again.events) == (before, (), (), ())

    def teardown(self) -> None:
        """All is well from now on."""
        if hasattr(self, "world"):
            self.world.builder.suspended(False)
            self.world.recover()


Life.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
test_whatever_happens = Life.TestCase

FATES: dict[str, tuple[dict[str, object], bool]] = {
    "well": ({}, False),
    "crashed": ({"phase": WorkerPhase.FAILED, "exit_code": 1}, True),
    "left": ({"phase": WorkerPhase.SUCCEEDED, "exit_code": 0, "message": '{"outcome": "Left"}'}, False),
    "taken away": ({"disrupted": True}, False),
    "terminating": ({"terminating": True}, False),
    "on a cordoned node": ({"draining": True}, False),
    "on a lost node": ({"node_lost": True}, True),
}


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from([(1, 2), (2, 1), (2, 2), (4, 1), (4, 2)]),
    on_pack=st.sampled_from(["Widen", "Release", "Hold", "Auto"]),
    spare=st.integers(0, 4),
    boundary=st.integers(0, LAYERS - 1),
    confirmed=st.booleans(),
    durable=st.booleans(),
    fates=st.lists(st.sampled_from([*FATES, "gone"]), min_size=12, max_size=12),
    forgetful=st.booleans(),
    ceiling=st.none() | CEILING,
)
def test_from_any_state_of_its_workers_a_job_comes_to_rest(
    shape: tuple[int, int],
    on_pack: str,
    spare: int,
    boundary: int,
    confirmed: bool,
    durable: bool,
    fates: list[str],
    forgetful: bool,
    ceiling: int | None,
) -> None:
    """Everything at once, in the middle of whatever was going on, under this operator or the next."""
    stages, pipelines = shape
    workers = stages * pipelines
    job = make_job().stages(stages).workers(workers, most=workers + spare).checkpoint().on_pack(on_pack)
    world = Checked(job.set("runPolicy.backoffLimit", 8))
    world.start()
    world.commit(boundary=boundary)
    if confirmed:
        world.commit(checkpoint=boundary if durable else None)
    for name, fate in zip(sorted(world.workers), fates, strict=False):
        if fate == "gone":
            world.kill(name)
            continue
        change, counts = FATES[fate]
        world.change(name, **change)
        world.real_failures += counts
        if fate == "on a lost node":
            world.silent.add(name)
    if forgetful:
        world.since = world.now
        world.warm.clear()
    if ceiling is not None:
        world.move_ceiling(ceiling)
    world.wait(60)
    world.settle()
    world.recover()


@settings(max_examples=25, deadline=None)
@given(
    stages=st.integers(1, 3),
    pipelines=st.integers(1, 2),
    claims=st.integers(1, 2),
    least=st.sampled_from([1, 9]),
    quota=st.booleans(),
    events=st.lists(
        st.tuples(st.sampled_from(["crashed", "preempted", "cordoned", "no room", "room"]), NUMBER), max_size=6
    ),
)
def test_a_job_with_claims_and_one_length_of_pipelines_outlives_whatever_its_members_lose(
    stages: int, pipelines: int, claims: int, least: int, quota: bool, events: list[tuple[str, int]]
) -> None:
    """Replacements stand behind claimed workers, and claimed ones in the places of others that found no node."""
    workers = stages * pipelines
    job = make_job().stages(stages).workers(workers, least=min(least, workers), most=workers + stages * claims)
    if quota:
        job.label(QUEUE_LABEL, QUEUE)
    world = Checked(job.checkpoint().set("runPolicy.backoffLimit", 8))
    world.queue = FakeQueue() if quota else None
    world.offered = [Offer(stages=stages, bytes_per_worker=1)]
    for _ in range(1 + claims):
        world.do_as_told()
    assert world.shape == (stages, pipelines + claims)
    for kind, number in events:
        names = [member.name for member in world.status.generation.members] if world.status.generation else []
        living = [name for name in names if name in world.workers and world.workers[name].alive]
        name = living[number % len(living)] if living else ""
        if kind in ("room", "no room"):
            world.unschedulable = kind == "no room"
        elif name and kind == "crashed":
            world.real_failures += 1
            world.end(name, exit_code=1)
        elif name:
            world.change(name, **{"preempted": {"disrupted": True}, "cordoned": {"draining": True}}[kind])
        world.settle()
        for seconds in (0, 121):
            world.wait(seconds)
            world.do_as_told()
            world.part() if world.trains else None
    world.recover()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([2, 4]), st.integers(0, LAYERS - 1), st.integers(0, LAYERS - 1))
def test_no_leaver_is_deleted_before_a_checkpoint_at_the_new_boundary(stages: int, boundary: int, durable: int) -> None:
    world = World(make_job().stages(stages).workers(2 * stages).release())
    world.start()
    world.commit(boundary=boundary)
    leavers = {member.name for member in world.generation.leavers}
    world.commit(checkpoint=durable)
    world.leave()
    assert bool(leavers & set(world.deleted)) == bool(leavers and durable >= boundary)


def test_a_resume_that_comes_before_the_last_worker_ended_waits_for_it() -> None:
    life = Life()
    life.begin(stages=1, pipelines=1, spare=0, on_pack="Widen", least=1, quota=None, shrinks=False, grown=False)
    life.all_do_as_told()
    life.a_worker_ends(kind="stopped", number=0)
    life.the_job_is_suspended_or_resumed(suspended=True)
    life.teardown()
