"""Jobs that wait for their first workers: which of them wakes, which gives way, and that each starts in the end."""

import random
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest

from pipetransformer_contract.api.status import ConditionType, State
from pipetransformer_contract.messages import Outcome
from pipetransformer_operator.controller.gangs import FREE, Gangs
from pipetransformer_operator.controller.ports import JobKey
from pipetransformer_operator.controller.releases import Releases
from pipetransformer_operator.plan import WorkerPhase, gang_of
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.world import World

pytestmark = pytest.mark.timeout(120)
TICK = 10


@dataclass
class Waiting:
    """A job of a crowd: its world, its priority, and for how many ticks it trains. No more than `places` of its pods
    find a node; with an `image` that cannot be pulled they do not start there."""

    world: World
    priority: int = 0
    ticks: int = 10**6
    left: int = 0
    places: int = 10**6
    image: str = ""

    @property
    def needs(self) -> int:
        return self.world.spec.elastic_policy.workers

    @property
    def holds(self) -> int:
        return sum(worker.scheduled and worker.holds for worker in self.world.workers.values())

    @property
    def waits(self) -> bool:
        return self.world.status.generation is None and not self.world.status.finished


class Crowd:
    """So many accelerators, a scheduler that knows no gangs, and jobs that wait for theirs.

    Pods that are deleted end a tick later. The scheduler binds pods by priority, otherwise in an order drawn by `seed`.
    So is the moment within a tick at which the operator looks at all of them.
    """

    def __init__(self, accelerators: int, seed: int = 0) -> None:
        self.accelerators = accelerators
        self.random = random.Random(seed)
        self.moment = timedelta(seconds=self.random.randrange(TICK))
        self.jobs: dict[str, Waiting] = {}
        self.gangs, self.releases = Gangs(), Releases()
        self.now = World(make_job()).now

    def add(self, name: str, workers: int, *, priority: int = 0, ticks: int = 10**6) -> World:
        world = World(make_job().workers(workers))
        world.unschedulable = world.lingering = True
        world.now = world.since = self.now
        self.jobs[name] = Waiting(world, priority, ticks)
        return world

    def run(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now += timedelta(seconds=TICK)
            held = {name: job.holds for name, job in self.jobs.items()}
            for name, job in self.jobs.items():
                job.world.now = self.now
                job.world.released = self.releases.for_job(JobKey("default", name))
                self._live(job)
            for name, job in self.jobs.items():
                if job.holds < held[name]:
                    self.releases.note(self.now, JobKey("default", name))
            self._schedule()
            self._look()

    def run_until_started(self, name: str, ticks: int) -> int:
        """Ticks until the job trains; fails past `ticks`."""
        for tick in range(ticks):
            if not self.jobs[name].waits:
                return tick
            self.run(1)
        raise AssertionError(f"{name} waits")

    @property
    def free(self) -> int:
        return self.accelerators - sum(job.holds for job in self.jobs.values())

    def startable(self) -> bool:
        """Whether a job of the highest priority that waits fits on what no job that trains has."""
        waiting = [job for job in self.jobs.values() if job.waits]
        room = self.free + sum(job.holds for job in waiting)
        top = max((job.priority for job in waiting), default=0)
        return any(job.needs <= room for job in waiting if job.priority == top)

    def _live(self, job: Waiting) -> None:
        world = job.world
        for name in [name for name, worker in world.workers.items() if worker.terminating]:
            world.kill(name)
        world.turn()
        if world.status.generation is None:
            placed = [worker for worker in world.workers.values() if worker.alive and worker.scheduled]
            if len(placed) == job.needs and not job.image:
                world.warm_up()
                world.commit()
                job.left = job.ticks
        elif not world.status.finished:
            job.left -= 1
            if job.left <= 0:
                world.finish(Outcome.SUCCEEDED)
                for name in list(world.workers):
                    world.kill(name)

    def _schedule(self) -> None:
        pods = [(job, name) for job in self.jobs.values() for name in job.world.workers]
        self.random.shuffle(pods)
        for job, name in sorted(pods, key=lambda pod: -pod[0].priority):
            worker = job.world.workers[name]
            job.world.change(name, priority=job.priority)
            if not worker.scheduled and not worker.terminating and self.free > 0 and job.holds < job.places:
                job.world.change(name, scheduled=True, phase=WorkerPhase.RUNNING, why_pending=job.image)

    def _look(self) -> None:
        found = [
            gang_of(job.world.spec, replace(job.world.observed(), name=name), self.now + self.moment)
            for name, job in self.jobs.items()
        ]
        turns = self.gangs.look([gang for gang in found if gang is not None], self.now)
        for name, job in self.jobs.items():
            turn = turns.get(f"default/{name}", FREE)
            job.world.gives_way_to, job.world.preferred_since = turn.gives_way_to, turn.preferred_since


def test_a_start_that_found_no_nodes_sleeps_five_minutes_at_most() -> None:
    world = World(make_job().stages(2).workers(2))
    world.unschedulable = True
    pauses = []
    for _ in range(6):
        world.settle()
        world.wait(600)
        world.settle()
        assert not world.workers and world.status.next_resize_time is not None
        pauses.append((world.status.next_resize_time - world.now).total_seconds())
        world.wait(pauses[-1])
    assert pauses == [60, 120, 240, 300, 300, 300]


def test_survivors_that_are_too_few_sleep_five_minutes_at_most_and_wake_by_what_others_release() -> None:
    world = World(make_job().stages(2).workers(2, least=2))
    world.start()
    world.unschedulable = True
    world.end("digits-w1", exit_code=1)
    for _ in range(6):
        world.settle()
        world.wait(600)
        world.settle()
        assert world.status.next_resize_time is not None
        pause = world.status.next_resize_time - world.now
        world.wait(pause.total_seconds())
    assert pause == timedelta(minutes=5)
    world.settle()
    world.wait(600)
    world.settle()
    assert set(world.workers) == {"digits-w0"}
    world.wait(5)
    world.released, world.unschedulable = world.now, False
    world.settle()
    world.warm_up()
    assert world.shape == (2, 1)


def asleep() -> World:
    """A job of two workers that found no nodes."""
    world = World(make_job().stages(2).workers(2))
    world.unschedulable = True
    world.settle()
    world.wait(600)
    world.settle()
    assert not world.workers
    return world


def test_a_start_that_sleeps_wakes_when_accelerators_are_released() -> None:
    world = asleep()
    world.released = world.now - timedelta(seconds=1)
    world.wait(1)
    world.settle()
    assert not world.workers, "that was before it gave up"
    world.released, world.unschedulable = world.now, False
    world.settle()
    assert len(world.workers) == 2
    world.warm_up()
    assert world.shape == (2, 1)


def test_a_start_whose_image_cannot_be_pulled_is_not_woken_by_accelerators() -> None:
    world = World(make_job().stages(2).workers(2))
    world.settle()
    world.change("digits-w1", why_pending="ErrImagePull: 404")
    world.settle()
    world.wait(600)
    world.settle()
    world.wait(1)
    world.released = world.now
    world.settle()
    assert not world.workers


def test_a_start_has_a_time_of_its_own() -> None:
    job = make_job().stages(2).workers(2).set("runPolicy.startTimeoutSeconds", 100)
    world = World(job.set("runPolicy.resizeTimeoutSeconds", 5000))
    world.unschedulable = True
    world.settle()
    world.wait(99)
    world.settle()
    assert world.workers
    world.wait(1)
    world.settle()
    assert not world.workers


def test_a_job_that_holds_part_of_what_it_needs_gives_way_to_one_that_fits_on_it() -> None:
    crowd = Crowd(6)
    crowd.add("trains", 2)
    crowd.run(3)
    large = crowd.add("large", 8)
    crowd.run(3)
    assert crowd.jobs["large"].holds == 4
    crowd.add("small", 4)
    assert crowd.run_until_started("small", 12) * TICK < 90, "590 s before"
    running = large.condition(ConditionType.RUNNING)
    assert (running.reason, large.workers) == ("GaveWay", {})
    assert "job default/small can start with the accelerators that this job would hold" in running.message


def test_a_sleeping_job_starts_within_a_minute_of_the_release_of_what_it_needs() -> None:
    crowd = Crowd(12)
    first = crowd.add("first", 12)
    crowd.run(3)
    assert first.state() is State.RUNNING
    crowd.add("second", 8)
    crowd.run(200)
    crowd.jobs["first"].left = 0
    assert crowd.run_until_started("second", 10) * TICK <= 60, "59 minutes before"


def test_of_two_that_hold_half_each_the_older_starts_and_the_other_follows_it() -> None:
    crowd = Crowd(8)
    crowd.add("first", 8, ticks=20)
    second = crowd.add("second", 8)
    assert crowd.run_until_started("first", 12) * TICK < 90
    assert not crowd.jobs["second"].holds
    assert second.condition(ConditionType.RUNNING).reason == "GaveWay"
    crowd.run_until_started("second", 30)


def test_no_job_gives_way_to_one_of_lower_priority() -> None:
    crowd = Crowd(4)
    crowd.add("high", 8, priority=1000)
    crowd.run(3)
    crowd.add("low", 4, priority=-1000)
    crowd.run(30)
    assert (crowd.jobs["high"].holds, crowd.jobs["low"].holds) == (4, 0)


def test_a_job_gives_way_to_one_of_higher_priority_that_came_later() -> None:
    crowd = Crowd(8)
    crowd.add("low", 10)
    crowd.run(3)
    crowd.add("high", 8, priority=1000)
    assert crowd.run_until_started("high", 12) * TICK < 90


def test_a_job_that_finds_no_nodes_although_others_give_way_holds_them_up_once_and_then_for_ten_minutes_no_more() -> (
    None
):
    crowd = Crowd(4)
    stuck = crowd.add("stuck", 4)
    crowd.jobs["stuck"].places = 3
    crowd.add("large", 8)
    crowd.run(4)
    crowd.add("small", 2)
    crowd.run(4)
    assert crowd.jobs["small"].waits and crowd.jobs["stuck"].holds == 3, "all give way to the first that should fit"
    crowd.run_until_started("small", 70)
    assert stuck.status.unused_shares == 1


def test_a_job_whose_image_cannot_be_pulled_gives_its_nodes_to_one_that_waits() -> None:
    crowd = Crowd(4)
    crowd.add("broken", 4)
    crowd.jobs["broken"].image = "ErrImagePull: 404"
    crowd.run(2)
    assert crowd.jobs["broken"].holds == 4
    crowd.add("next", 4)
    assert crowd.run_until_started("next", 20) * TICK < 150


@pytest.mark.parametrize("seed", range(6))
def test_every_job_that_fits_starts_and_nothing_stands_idle_that_is_enough_for_one(seed: int) -> None:
    """No two jobs take turns without an end, whatever order the scheduler binds their pods in."""
    draw = random.Random(seed)
    crowd = Crowd(draw.randint(4, 12), seed)
    priorities = draw.choice([[0], [0], [-1000, 0, 1000]])
    coming = {
        f"job-{number}": (
            draw.randint(1, crowd.accelerators + 2),
            draw.choice(priorities),
            draw.randint(5, 40),
            draw.randint(0, 60),
        )
        for number in range(draw.randint(2, 7))
    }
    idle = longest = 0
    for tick in range(400):
        for name, (workers, priority, ticks, begin) in coming.items():
            if begin == tick:
                crowd.add(name, workers, priority=priority, ticks=ticks)
        before = sum(job.waits for job in crowd.jobs.values())
        crowd.run(1)
        started = sum(job.waits for job in crowd.jobs.values()) < before
        idle = idle + 1 if crowd.startable() and not started else 0
        longest = max(longest, idle)
    waiting = {name for name, job in crowd.jobs.items() if job.waits}
    too_large = {name for name, (workers, *_) in coming.items() if workers > crowd.accelerators}
    most = max((coming[name][1] for name in too_large), default=-(2**31))
    assert too_large <= waiting, "they never fit"
    assert all(coming[name][1] < most for name in waiting - too_large), "the scheduler would preempt them"
    assert longest * TICK <= 120


def test_a_release_by_its_own_pods_is_none_for_a_job() -> None:
    releases, now = Releases(), World(make_job()).now
    first, second = JobKey("default", "first"), JobKey("default", "second")
    assert releases.for_job(first) is None
    releases.note(now, None)
    later = now + timedelta(seconds=5)
    for _ in range(2):
        releases.note(later, first)
    assert (releases.for_job(first), releases.for_job(second)) == (now, later)


def test_a_start_that_sleeps_wakes_when_other_jobs_give_way_to_it() -> None:
    world = asleep()
    world.preferred_since, world.unschedulable = world.now, False
    world.settle()
    assert len(world.workers) == 2
