"""Jobs on one cluster, each with its own `plan()`, and `allocate()` between them: who gets what, and how calmly."""

import math
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from pipetransformer_contract.api.status import ConditionType, Reason, Share, State
from pipetransformer_contract.messages import Offer, Outcome, ResizeReason, StepTime
from pipetransformer_operator.plan import Plan, WorkerPhase, allocate, demand_of, worker_name
from pipetransformer_operator.plan.sharing.allocate import HYSTERESIS
from tests.testkit.operator.builders import JobBuilder, make_job
from tests.testkit.operator.simulated_cluster import SimulatedCluster, speeds
from tests.testkit.operator.simulated_cluster import auto as on_accelerators
from tests.testkit.operator.world import JOB, World

pytestmark = pytest.mark.timeout(180)
SECONDS = 10
ORDERS = pytest.mark.parametrize("last_first", [False, True], ids=["first-first", "last-first"])


class Limited(World):
    """A job in a namespace whose ResourceQuota has room for so many pods."""

    def __init__(self, builder: JobBuilder, pods: int) -> None:
        super().__init__(builder)
        self._pods = pods

    def turn(self, *, executed: bool = True) -> Plan:
        decided = super().turn(executed=executed)
        created = [worker_name(JOB, worker_id) for worker_id in decided.create]
        surplus = created[max(0, self._pods + len(created) - len(self.workers)) :]
        for name in surplus:
            self.kill(name)
        self.refusal = "exceeded quota: team" if surplus else ""
        return replace(decided, create=decided.create[: len(created) - len(surplus)])


class Cluster:
    """So many nodes with one accelerator each; a scheduler, trainers that do as told, and a clock that ticks.

    Args:
        nodes: how many.
        tick: seconds.
        pause: ticks from a generation's publication until its members commit it, and from then on until a checkpoint is
            durable that lets leavers go.
        last_first: whether pods of the job that came last get nodes first; else those of the first job do.
    """

    def __init__(self, nodes: int, tick: int = SECONDS, *, pause: int = 1, last_first: bool = False) -> None:
        self.nodes = nodes
        self.tick = tick
        self.pause = pause
        self.last_first = last_first
        self.worlds: dict[str, World] = {}
        self.unplaceable: set[str] = set()

    def add(self, name: str, job: JobBuilder, *, placeable: bool = True, quota: int | None = None) -> World:
        world = World(job) if quota is None else Limited(job, quota)
        world.unschedulable = True
        if self.worlds:
            world.now = next(iter(self.worlds.values())).now
        self.worlds[name] = world
        if not placeable:
            self.unplaceable.add(name)
        return world

    def size(self, name: str) -> int:
        generation = self.worlds[name].status.generation
        return generation.layout.workers if generation else 0

    def run(self, ticks: int) -> None:
        """Lets time pass; every tick jobs plan, pods get nodes, trainers commit, and workers are shared out."""
        for _ in range(ticks):
            for world in self.worlds.values():
                world.wait(self.tick)
                world.settle()
            self._schedule()
            for world in self.worlds.values():
                self._train(world)
            self._share()

    def _schedule(self) -> None:
        free = self.nodes - sum(w.scheduled for world in self.worlds.values() for w in world.workers.values())
        for key, world in sorted(self.worlds.items(), reverse=self.last_first):
            for name, worker in sorted(world.workers.items()):
                if not worker.scheduled and free > 0 and key not in self.unplaceable:
                    world.change(name, scheduled=True, phase=WorkerPhase.RUNNING, why_pending="")
                    free -= 1

    def _train(self, world: World) -> None:
        if any(worker.scheduled and worker.uid not in world.warm for worker in world.workers.values()):
            world.warm_up()
        status, generation = world.status, world.status.generation
        if generation is None or generation.published_time is None or status.finished:
            return
        ticks = (world.now - generation.published_time).total_seconds() / self.tick
        if not generation.confirmed and ticks >= self.pause:
            world.commit()
            world.leave()
        elif status.leaving_ids and ticks >= 2 * self.pause:
            world.commit(checkpoint=world.report.boundary if world.report else 0)

    def _share(self) -> None:
        looks = {name: replace(world.observed(), name=name) for name, world in self.worlds.items()}
        demands = [demand_of(self.worlds[name].spec, look, self.worlds[name].now) for name, look in looks.items()]
        shares = allocate([demand for demand in demands if demand is not None])
        for name, world in self.worlds.items():
            workers = shares.get(f"default/{name}")
            generation = world.status.layout_generation
            world.share = None if workers is None else Share(workers=workers, layout_generation=generation)


def auto(workers: int, most: int) -> JobBuilder:
    return make_job().stages(1).workers(workers, most=most).checkpoint().on_pack("Auto")


def test_a_lone_job_takes_what_there_is_and_sleeps_over_what_there_is_not() -> None:
    cluster = Cluster(6)
    world = cluster.add("a", auto(2, 8))
    cluster.run(60)
    assert cluster.size("a") == 6
    assert world.generation.layout_generation == 5, "nothing is given up for nobody"


@ORDERS
def test_a_job_that_waits_to_start_gets_its_workers_from_one_that_has_more_than_it_needs(last_first: bool) -> None:
    cluster = Cluster(8, last_first=last_first)
    first = cluster.add("a", auto(2, 8))
    cluster.run(30)
    assert cluster.size("a") == 8
    second = cluster.add("b", make_job().stages(2).workers(4))
    cluster.run(20)
    assert (cluster.size("a"), cluster.size("b")) == (4, 4)
    assert second.state() is State.RUNNING
    assert first.status.gpus.released == 4
    assert first.status.failures == second.status.failures == 0


@ORDERS
def test_two_jobs_end_with_fair_shares_and_leave_each_other_in_peace(last_first: bool) -> None:
    cluster = Cluster(8, last_first=last_first)
    first = cluster.add("a", auto(1, 8))
    cluster.run(30)
    assert cluster.size("a") == 8
    second = cluster.add("b", auto(1, 8))
    cluster.run(60)
    assert (cluster.size("a"), cluster.size("b")) == (4, 4)
    before = first.generation.layout_generation, second.generation.layout_generation
    cluster.run(120)
    after = first.generation.layout_generation, second.generation.layout_generation
    assert (cluster.size("a"), cluster.size("b")) == (4, 4)
    assert sum(after) - sum(before) <= 4, "twenty minutes later nothing has been passed to and fro"


def test_what_a_job_leaves_behind_at_its_end_is_found_by_claims() -> None:
    cluster = Cluster(8)
    cluster.add("a", auto(1, 8))
    cluster.run(30)
    second = cluster.add("b", auto(1, 8))
    cluster.run(60)
    second.finish(Outcome.SUCCEEDED)
    cluster.run(150)
    assert cluster.size("a") == 8


def test_a_job_that_gains_nothing_by_more_pipelines_gives_them_to_one_that_does() -> None:
    cluster = Cluster(8)
    first = cluster.add("a", auto(1, 8))
    cluster.run(30)
    flat = [Offer(stages=1, bytes_per_worker=1, step_seconds=[StepTime(pipelines=r, seconds=1.0) for r in range(1, 9)])]
    first.commit(offered=flat)
    first.offered = flat
    cluster.add("b", auto(1, 7))
    cluster.run(90)
    assert (cluster.size("a"), cluster.size("b")) == (1, 7)


def test_a_job_that_is_not_auto_gives_nothing_up() -> None:
    cluster = Cluster(8)
    cluster.add("a", make_job().stages(1).workers(2, most=8))
    cluster.run(30)
    cluster.add("b", auto(2, 4))
    cluster.run(30)
    assert (cluster.size("a"), cluster.size("b")) == (8, 0)


@pytest.mark.parametrize(
    ("nodes", "jobs", "needs", "new_is_auto", "comes_first"),
    [(8, 1, 4, False, False), (5, 2, 1, True, True), (9, 2, 5, True, False), (6, 1, 2, False, True)],
)
def test_a_job_that_no_node_takes_costs_the_others_a_few_resizes_and_no_more(
    nodes: int, jobs: int, needs: int, new_is_auto: bool, comes_first: bool
) -> None:
    cluster = Cluster(nodes, tick=30)
    unplaceable = auto(needs, 8) if new_is_auto else make_job().stages(needs).workers(needs)
    if comes_first:
        cluster.add("z", unplaceable, placeable=False)
        cluster.run(20)
    others = [cluster.add(f"a{number}", auto(1, 8)) for number in range(jobs)]
    cluster.run(60)
    if not comes_first:
        cluster.add("z", unplaceable, placeable=False)
    before = [world.generation.layout_generation for world in others]
    full, sizes = min(nodes, 8 * jobs), []
    for _ in range(300):
        cluster.run(1)
        sizes.append(sum(cluster.size(name) for name in cluster.worlds))
    cost = sum(world.generation.layout_generation for world in others) - sum(before)
    assert cluster.worlds["z"].status.unused_shares == 4
    assert cost <= 4 * (2 + needs), "room was made four times in two hours and a half, and taken back by claims"
    assert sum(sizes) / len(sizes) > full - needs


@ORDERS
def test_who_has_room_made_for_it_has_the_time_of_a_claim_from_then_on(last_first: bool) -> None:
    cluster = Cluster(8, pause=8, last_first=last_first)
    cluster.add("a", auto(1, 8))
    cluster.run(200)
    second = cluster.add("b", auto(2, 8))
    cluster.run(100)
    assert cluster.size("a") + cluster.size("b") == 8
    assert second.status.unused_shares == 0, "two commits and a checkpoint take longer than claimTimeoutSeconds"


def test_a_grant_that_comes_late_in_a_claim_is_not_in_vain_before_others_had_time_to_make_room() -> None:
    world = World(auto(2, 8))
    world.settle()
    world.warm_up()
    world.unschedulable = True
    world.commit()
    assert len(world.workers) == 3
    world.wait(119)
    world.share = Share(workers=4, layout_generation=world.status.layout_generation)
    world.settle()
    world.wait(119)
    world.settle()
    assert (len(world.workers), world.status.unused_shares) == (3, 0)
    world.wait(1)
    world.settle()
    assert (len(world.workers), world.status.unused_shares) == (2, 1)
    assert world.status.sits_out_until == world.now + timedelta(minutes=10)


def test_a_job_that_sleeps_over_a_layout_that_its_members_could_not_commit_waits_for_nobodys_workers() -> None:
    world = World(auto(2, 8))
    world.start()
    world.warm_up()
    assert (world.shape, world.generation.confirmed) == ((1, 3), False)
    world.wait(5)
    world.break_group([member.name for member in world.generation.members])
    world.wait(5)
    world.settle()
    assert world.generation.reason is ResizeReason.UNDO
    world.commit(checkpoint=0)
    world.leave()
    demand = demand_of(world.spec, world.observed(), world.now)
    assert world.status.next_resize_time is not None and demand is not None
    assert (demand.waiting, demand.asleep) == (False, False)
    world.unschedulable = True
    world.wait(61)
    world.settle()
    world.wait(120)
    world.settle()
    demand = demand_of(world.spec, world.observed(), world.now)
    assert demand is not None and demand.asleep, "now no node was found"


def sizes_wanted(world: World) -> list[int]:
    demand = demand_of(world.spec, world.observed(), world.now)
    assert demand is not None
    return sorted(demand.speeds)


def test_nobody_makes_room_for_a_job_that_sleeps_over_an_image_that_cannot_be_pulled() -> None:
    world = World(auto(2, 4))
    world.start()
    assert sizes_wanted(world) == [1, 2, 3, 4]
    world.change("digits-w2", phase=WorkerPhase.PENDING, why_pending="ErrImagePull: no such host")
    world.wait(600)
    world.settle()
    assert (world.condition(ConditionType.RESIZING).reason, sizes_wanted(world)) == (Reason.IMAGE_PULL, [1, 2])
    world.wait(60)
    world.settle()
    assert sizes_wanted(world) == [1, 2, 3, 4]


def test_nobody_makes_room_for_a_job_whose_members_do_not_get_into_their_generation() -> None:
    world = World(auto(2, 8))
    world.start()
    world.warm_up()
    assert (world.generation.confirmed, sizes_wanted(world)[-1]) == (False, 8)
    world.wait(600)
    assert sizes_wanted(world)[-1] == 3


def test_nobody_makes_room_for_a_job_that_would_not_leave_its_layout_for_so_few() -> None:
    world = World(auto(1, 4).set("pipeline.packing", "Measured"))
    times = [StepTime(pipelines=width, seconds=seconds) for width, seconds in enumerate((1.0, 0.9, 0.6, 0.5), start=1)]
    measured = [Offer(stages=1, bytes_per_worker=1, step_seconds=times, pause_seconds=199.8)]
    world.settle()
    world.warm_up()
    world.commit(offered=measured, step_seconds=1.0)
    assert sizes_wanted(world) == [1, 3, 4], "a pause costs each of the 999 remaining steps a fifth of a second"


@ORDERS
@pytest.mark.parametrize("pause", [1, 3])
def test_who_gives_workers_up_does_not_compete_for_them_while_they_leave(pause: int, last_first: bool) -> None:
    cluster = Cluster(8, pause=pause, last_first=last_first)
    cluster.add("a", auto(1, 8))
    cluster.run(90)
    assert cluster.size("a") == 8
    second = cluster.add("b", auto(1, 8))
    cluster.run(40)
    assert (cluster.size("a"), cluster.size("b")) == (4, 4)
    assert second.status.unused_shares == 0


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    nodes=st.integers(3, 8),
    first=st.integers(1, 8),
    second=st.integers(1, 8),
    apart=st.integers(1, 40),
    pause=st.integers(0, 4),
    last_first=st.booleans(),
)
def test_whatever_pauses_and_orders_are_two_jobs_leave_no_node_idle_and_share_fairly(
    nodes: int, first: int, second: int, apart: int, pause: int, last_first: bool
) -> None:
    cluster = Cluster(nodes, pause=pause, last_first=last_first)
    cluster.add("a", auto(1, first))
    cluster.run(apart)
    cluster.add("b", auto(1, second))
    cluster.run(360)
    sizes = cluster.size("a"), cluster.size("b")
    assert sum(sizes) == min(nodes, first + second)
    assert abs(sizes[0] - sizes[1]) <= 1 or sizes[0] == first or sizes[1] == second


@ORDERS
def test_a_node_that_is_freed_for_one_job_is_not_taken_by_the_claim_of_another(last_first: bool) -> None:
    cluster = Cluster(6, pause=2, last_first=last_first)
    cluster.add("a", auto(1, 8))
    cluster.run(20)
    cluster.add("b", auto(1, 8))
    cluster.run(40)
    assert (cluster.size("a"), cluster.size("b")) == (3, 3)
    third = cluster.add("c", auto(1, 8))
    for name in "ab":  # both have a claim at the scheduler, and lead or follow the newcomer's there
        cluster.worlds[name].status = cluster.worlds[name].status.model_copy(update={"next_resize_time": None})
    cluster.run(30)
    assert [cluster.size(name) for name in "abc"] == [2, 2, 2]
    assert third.status.unused_shares == 0


class Competitor(NamedTuple):
    """A job of a cluster that is shared: workers at most, how speed grows with them, ticks until the next job comes."""

    most: int
    exponent: float
    ticks: int

    def offers(self) -> list[Offer]:
        times = [StepTime(pipelines=width, seconds=width**-self.exponent) for width in range(1, self.most + 1)]
        return [Offer(stages=1, bytes_per_worker=1, step_seconds=times)]


COMPETITORS = st.builds(Competitor, st.integers(1, 8), st.sampled_from([0.3, 0.5, 0.7, 0.9, 1.0]), st.integers(1, 40))


@settings(max_examples=10, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    jobs=st.lists(COMPETITORS, min_size=3, max_size=5),
    spare=st.integers(0, 5),
    pause=st.integers(0, 3),
    last_first=st.booleans(),
)
@example([Competitor(1, 1.0, 9), Competitor(1, 0.5, 3), Competitor(6, 0.3, 30)], 2, 2, True)
def test_jobs_of_any_speeds_come_to_shares_where_no_worker_would_do_more_elsewhere_and_rest_there(
    jobs: list[Competitor], spare: int, pause: int, last_first: bool
) -> None:
    cluster = Cluster(len(jobs) + spare, pause=pause, last_first=last_first)
    names = "abcde"[: len(jobs)]
    for name, job in zip(names, jobs, strict=True):
        cluster.add(name, auto(1, job.most)).offered = job.offers()
        cluster.run(job.ticks)
    idle = longest = 0
    for _ in range(100):
        cluster.run(1)
        sizes = [cluster.size(name) for name in names]
        useful = any(size < job.most for size, job in zip(sizes, jobs, strict=True))
        idle = idle + 1 if useful and sum(sizes) < cluster.nodes else 0
        longest = max(longest, idle)
    assert longest <= 4 + 4 * pause, "two times in a row some give up, and others join"
    generations = [world.generation.layout_generation for world in cluster.worlds.values()]
    sizes = [cluster.size(name) for name in names]
    for giver, (gives, had) in enumerate(zip(jobs, sizes, strict=True)):
        for taker, (takes, has) in enumerate(zip(jobs, sizes, strict=True)):
            if giver != taker and had > 1 and has < takes.most:
                gain = takes.exponent * math.log((has + 1) / has)
                assert gain <= HYSTERESIS * gives.exponent * math.log(had / (had - 1)) + 1e-9
    for _ in range(60):
        cluster.run(1)
        assert [cluster.size(name) for name in names] == sizes, "claims go on, and none gives up for them"
    assert [world.generation.layout_generation for world in cluster.worlds.values()] == generations


def test_a_job_whose_grant_was_in_vain_tries_on_by_itself_and_has_room_made_for_it_after_an_edit() -> None:
    cluster = Cluster(8)
    first = cluster.add("a", auto(1, 8))
    cluster.run(30)
    second = cluster.add("b", make_job().stages(2).workers(4), placeable=False)
    cluster.run(70)
    assert second.status.unused_shares == 1
    cluster.run(10)
    assert cluster.size("a") == 8, "what it gave up it has again"
    assert second.status.resize is not None, "the other still looks for nodes by itself"
    cluster.unplaceable.clear()
    second.metadata_generation += 1
    cluster.run(20)
    assert (cluster.size("a"), cluster.size("b")) == (4, 4)
    assert (second.status.unused_shares, second.status.sits_out_until) == (0, None)
    assert first.status.failures == 0


@pytest.mark.parametrize(
    "placement",
    [
        {"acceleratorResource": "amd.com/gpu"},
        {"podTemplate.spec.nodeSelector": {"gpu": "a100"}},
        {"podTemplate.spec.tolerations": [{"key": "gpu", "operator": "Exists"}]},
        {"podTemplate.spec.affinity": {"nodeAffinity": {}, "podAffinity": {"some": "term"}}},
    ],
    ids=lambda placement: next(iter(placement)),
)
def test_nobody_makes_room_for_a_job_whose_workers_run_elsewhere(placement: dict[str, object]) -> None:
    cluster = Cluster(8)
    cluster.add("a", auto(1, 8))
    cluster.run(30)
    job = make_job().stages(2).workers(4)
    for field, value in placement.items():
        job.set(field, value)
    cluster.add("b", job)
    cluster.run(20)
    assert (cluster.size("a"), cluster.size("b")) == (8, 0)


def test_nobody_makes_room_for_a_job_whose_pods_are_refused() -> None:
    cluster = Cluster(8)
    first = cluster.add("a", auto(1, 8))
    cluster.run(30)
    cluster.add("b", make_job().stages(2).workers(4), placeable=False).refusal = "exceeded quota: team"
    before = first.generation.layout_generation
    cluster.run(200)
    assert first.generation.layout_generation == before


def test_nobody_makes_room_for_more_pods_than_a_namespace_may_have() -> None:
    cluster = Cluster(8)
    first = cluster.add("a", auto(2, 8))
    cluster.run(50)
    cluster.add("b", auto(2, 4), quota=2)
    cluster.run(10)
    assert (cluster.size("a"), cluster.size("b")) == (6, 2)
    before = first.generation.layout_generation
    cluster.run(100)
    assert first.generation.layout_generation == before


def test_a_job_of_high_priority_gives_nothing_to_a_low_one_and_neither_preempts_the_other_for_an_hour() -> None:
    cluster = SimulatedCluster([4, 4])
    cluster.add("high", on_accelerators(1, 8), priority=1000)
    cluster.run(30)
    cluster.add("low", on_accelerators(7, 7), priority=-1000)
    before = cluster.generations()
    cluster.run(360)
    assert (cluster.size("high"), cluster.size("low")) == (8, 0)
    assert (cluster.generations(), cluster.preemptions.total()) == (before, 0)


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    nodes=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=2, max_size=4),
    jobs=st.lists(st.tuples(COMPETITORS, st.sampled_from([-1000, 0, 1000]), st.integers(1, 3)), min_size=2, max_size=5),
    pause=st.integers(0, 3),
)
@example(  # a pod that is created between two looks of the scheduler
    nodes=[1, 8],
    jobs=[
        (Competitor(5, 0.7, 27), 0, 2),
        (Competitor(2, 0.9, 33), -1000, 2),
        (Competitor(2, 0.3, 7), 0, 3),
        (Competitor(3, 0.3, 38), 1000, 2),
        (Competitor(1, 0.7, 30), 1000, 3),
    ],
    pause=0,
)
@example(  # a replacement whose node is taken before it runs
    nodes=[2, 8],
    jobs=[(Competitor(3, 1.0, 33), -1000, 2), (Competitor(7, 0.9, 11), 0, 1), (Competitor(5, 0.9, 37), 0, 3)],
    pause=1,
)
def test_jobs_of_mixed_priorities_use_all_nodes_come_to_rest_and_give_nothing_to_lower_ones(
    nodes: list[int], jobs: list[tuple[Competitor, int, int]], pause: int
) -> None:
    cluster = SimulatedCluster(nodes, pause=pause)
    for number, (job, priority, workers) in enumerate(jobs):
        most = max(workers, job.most)
        offered = speeds(1, most, job.exponent)
        cluster.add(f"job-{number}", on_accelerators(workers, most), priority=priority, offers=offered)
        cluster.run(job.ticks)
    cluster.run(90)
    before, cluster.idle, cluster.all = cluster.generations(), 0, 0
    cluster.run(360)
    after = cluster.generations()
    assert all(after[name] - before[name] <= 2 for name in after)
    assert cluster.inversions == 0
    assert cluster.idle <= 0.02 * cluster.all


def test_a_job_that_has_only_claimed_workers_left_keeps_the_priority_of_its_own() -> None:
    """Found by random clusters: a job of -1000 counted as one of -11, and got the workers of a job of -500."""
    world = World(auto(1, 2).set("acceleratorResource", "nvidia.com/gpu"))
    world.start()
    world.warm_up()
    world.commit()
    assert world.status.claimed_ids == [1]
    world.change("digits-w0", priority=-1000)
    world.change("digits-w1", priority=-11)
    world.settle()
    world.unschedulable = True
    world.kill("digits-w0")
    world.settle()
    world.commit()
    world.change("digits-w2", priority=-1000)
    world.settle()
    world.wait(600)
    world.settle()
    assert list(world.workers) == ["digits-w1"], "no node takes the replacement"
    demand = demand_of(world.spec, world.observed(), world.now)
    assert demand is not None and demand.priority == -1000


def pool_of(job: JobBuilder, namespace: str = "default") -> tuple[str, str]:
    world = World(job)
    world.start()
    demand = demand_of(world.spec, replace(world.observed(), namespace=namespace), world.now)
    assert demand is not None
    return demand.pool


def test_jobs_on_cpu_share_only_where_their_containers_ask_for_the_same() -> None:
    def asks(cpu: str) -> JobBuilder:
        container = {"name": "trainer", "image": "trainer", "resources": {"requests": {"cpu": cpu}}}
        return auto(1, 2).set("podTemplate.spec.containers", [container])

    assert pool_of(asks("4")) == pool_of(asks("4"))
    assert pool_of(asks("4")) != pool_of(asks("8"))


def test_jobs_with_claims_for_devices_share_only_with_the_same_claims_in_their_namespace() -> None:
    def claims(template: str) -> JobBuilder:
        claim = {"name": "gpu", "resourceClaimTemplateName": template}
        return auto(1, 2).set("podTemplate.spec.resourceClaims", [claim])

    assert pool_of(claims("a100")) == pool_of(claims("a100"))
    assert pool_of(claims("a100")) != pool_of(claims("h100"))
    assert pool_of(claims("a100")) != pool_of(claims("a100"), "other")
    assert pool_of(claims("a100")) != pool_of(auto(1, 2))


def test_nobody_makes_room_for_a_job_soon_after_it_gave_workers_up() -> None:
    world = World(auto(1, 4))
    world.start()
    world.warm_up()
    world.commit()
    world.share = Share(workers=1, layout_generation=world.status.layout_generation)
    world.settle()
    world.commit(checkpoint=0)
    world.leave()
    assert sizes_wanted(world) == [1]
    world.wait(600)
    assert sizes_wanted(world) == [1, 2, 3, 4]


def test_a_start_that_is_put_off_keeps_the_priority_of_its_pods() -> None:
    world = World(make_job().stages(2).workers(2))
    world.unschedulable = True
    world.settle()
    for name in world.workers:
        world.change(name, priority=1000)
    world.settle()
    world.wait(600)
    world.settle()
    assert world.workers == {}
    demand = demand_of(world.spec, world.observed(), world.now)
    assert demand is not None and demand.priority == 1000


def test_leavers_free_no_room_on_nodes_that_drain_or_are_lost() -> None:
    world = World(auto(1, 4))
    world.start()
    while world.shape != (1, 4):
        world.warm_up()
        world.commit()
    world.share = Share(workers=1, layout_generation=world.status.layout_generation)
    world.settle()

    def leaving() -> int:
        demand = demand_of(world.spec, world.observed(), world.now)
        assert demand is not None
        return demand.leaving

    assert leaving() == len(world.generation.leavers) == 3
    draining, lost, _ = (member.name for member in world.generation.leavers)
    world.change(draining, draining=True)
    assert leaving() == 2
    world.change(lost, node_lost=True)
    assert leaving() == 1


def test_a_job_that_is_no_longer_auto_does_not_obey_its_last_share() -> None:
    world = World(auto(1, 4))
    world.start()
    world.share = Share(workers=1, layout_generation=world.status.layout_generation)
    world.settle()
    assert (world.status.share, world.shape) == (world.share, (1, 1))
    world.builder.on_pack("Widen")
    for _ in range(4):
        world.warm_up()
        world.commit()
        world.wait(600)
    assert world.shape == (1, 4)
