"""The controller's look at all jobs together: shares reach the status of those jobs that compete, and no others."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from pipetransformer_contract.api import JobSpec, PipeTrainingJob
from pipetransformer_contract.api.status import Share
from pipetransformer_operator.controller import manager
from pipetransformer_operator.controller.gangs import Gangs
from pipetransformer_operator.controller.manager import Controller
from pipetransformer_operator.controller.ports import JobKey, LoopMetrics, Room
from pipetransformer_operator.controller.releases import Releases
from pipetransformer_operator.plan import Demand, Gang, Observed, Worker, demand_of
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.shared_cluster import PACE, Cluster

pytestmark = pytest.mark.timeout(60)


async def test_of_a_job_that_is_gone_the_metrics_is_told() -> None:
    gone: asyncio.Queue[JobKey] = asyncio.Queue()

    class Told(LoopMetrics):
        def on_gone(self, key: JobKey) -> None:
            gone.put_nowait(key)

    cluster = Cluster(1, make_job().workers(1).job())
    (key,) = cluster.jobs
    controller = Controller(cluster, cluster, clock=lambda: cluster.now, pace=PACE, metrics=Told())
    controller.wake(key)
    await cluster.next_change()
    assert gone.empty()
    del cluster.jobs[key]
    controller.wake(key)
    assert await gone.get() == key


async def test_a_job_that_waits_for_nodes_shares_and_a_content_job_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manager, "allocate", lambda demands, weigh_namespaces: {demand.key: 0 for demand in demands})
    cluster = Cluster(3, make_job("first").workers(2).job(), make_job("second").stages(2).workers(2).job())
    controller = Controller(cluster, cluster, clock=lambda: cluster.now, pace=PACE)
    for key in cluster.jobs:
        controller.wake(key)
    while not len(cluster.workers["first"]) == len(cluster.workers["second"]) == 2:
        await cluster.next_change()
    await controller.share()
    assert cluster.status("second").share is None, "a scheduler needs a moment"
    cluster.now += timedelta(seconds=10)
    while cluster.status("second").share is None:
        await cluster.next_change()
    assert cluster.status("second").share == Share(workers=0, layout_generation=0)
    assert cluster.status("first").share is None
    await controller.stop()


@pytest.mark.parametrize("where", ["observe", "demand_of"])
async def test_a_job_that_cannot_be_observed_or_judged_leaves_the_others_their_shares(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(Cluster):
        def list(self, job: PipeTrainingJob) -> tuple[Worker, ...]:
            if where == "observe" and job.metadata.name == "odd":
                raise AttributeError("podTemplate")
            return super().list(job)

    def judge(spec: JobSpec, observed: Observed, now: datetime) -> Demand | None:
        if where == "demand_of" and observed.name == "odd":
            raise AttributeError("podTemplate")
        return demand_of(spec, observed, now)

    monkeypatch.setattr(manager, "demand_of", judge)
    monkeypatch.setattr(manager, "allocate", lambda demands, weigh_namespaces: {demand.key: 0 for demand in demands})
    cluster = Odd(0, make_job("odd").workers(1).job(), make_job("waits").workers(1).job())
    controller = Controller(cluster, cluster, clock=lambda: cluster.now, pace=PACE)
    for key in cluster.jobs:
        controller.wake(key)
    while not cluster.workers["waits"]:
        await cluster.next_change()
    cluster.now += timedelta(seconds=10)
    while cluster.status("waits").share is None:
        await cluster.next_change()
    assert "cannot share workers with job default/odd" in caplog.text
    await controller.stop()


async def test_a_job_that_goes_while_shares_are_made_is_asked_for_no_room() -> None:
    asked: list[tuple[object, str]] = []

    class Counted(Cluster):
        def room(self, job: PipeTrainingJob) -> Room:
            asked.append((asyncio.current_task(), job.metadata.name))
            return super().room(job)

    cluster = Counted(0, make_job("goes").workers(1).job(), make_job("stays").workers(1).job())
    controller = Controller(cluster, cluster, clock=lambda: cluster.now, pace=replace(PACE, sharing=600.0))
    for key in cluster.jobs:
        controller.wake(key)
    while not (cluster.workers["goes"] and cluster.workers["stays"]):
        await cluster.next_change()
    sharing = asyncio.create_task(controller.share())
    await asyncio.sleep(0)
    del cluster.jobs[JobKey("default", "goes")]
    await sharing
    assert [name for task, name in asked if task is sharing] == ["stays"], "the jobs' loops ask for themselves"
    await controller.stop()


async def test_another_jobs_release_wakes_a_job_that_found_no_nodes() -> None:
    cluster = Cluster(2, make_job("first").workers(2).job(), make_job("second").stages(2).workers(2).job())
    controller = Controller(cluster, cluster, clock=lambda: cluster.now, pace=PACE)
    first, second = cluster.jobs
    controller.wake(first)
    while len(cluster.workers["first"]) < 2:
        await cluster.next_change()
    controller.wake(second)
    while len(cluster.workers["second"]) < 2:
        await cluster.next_change()
    cluster.now += timedelta(seconds=601)
    controller.wake(second)
    while cluster.workers["second"]:
        await cluster.next_change()
    cluster.now += timedelta(seconds=1)
    del cluster.jobs[first]  # otherwise its loop may create its workers again
    cluster.workers["first"].clear()
    controller.note_release(first)
    while len(cluster.workers["second"]) < 2:
        await cluster.next_change()
    assert all(worker.scheduled for worker in cluster.workers["second"])
    await controller.stop()


async def test_a_job_that_cannot_start_gives_its_workers_back_for_one_that_can() -> None:
    waiting = "Unschedulable: 0/3 nodes are available"
    cluster = Cluster(3, make_job("large").workers(4).job(), make_job("small").workers(2).job())
    controller = Controller(cluster, cluster, clock=lambda: cluster.now, pace=PACE)
    for key, number in zip(cluster.jobs, (4, 2), strict=True):
        controller.wake(key)
        while len(cluster.workers[key.name]) < number:
            await cluster.next_change()
    for workers in cluster.workers.values():
        workers[:] = [worker if worker.scheduled else replace(worker, why_pending=waiting) for worker in workers]
    assert sum(worker.scheduled for worker in cluster.workers["large"]) == 3
    cluster.now += timedelta(seconds=11)
    while cluster.workers["large"]:
        await cluster.next_change()
    assert "job default/small can start" in str(cluster.status("large").conditions)
    await controller.stop()


def test_a_preferred_job_stays_so_during_its_next_attempt() -> None:
    now, gangs = datetime(2026, 1, 1, tzinfo=UTC), Gangs()

    def start(key: str, *, eligible: bool, fresh: bool = False) -> Gang:
        return Gang(key, ("nvidia.com/gpu", ""), 2, 1, 0, now, competes=eligible, eligible=eligible, fresh=fresh)

    first, second = start("first", eligible=True), start("second", eligible=True)
    assert gangs.look([first, second], now)["second"].gives_way_to == "first"
    tries = start("first", eligible=False, fresh=True)
    assert gangs.look([tries, second], now)["second"].gives_way_to == "first"


def test_a_job_is_told_of_the_newest_release_by_another() -> None:
    releases, times = Releases(), [datetime(2026, 1, day, tzinfo=UTC) for day in range(1, 5)]
    ours, theirs = JobKey("default", "ours"), JobKey("default", "theirs")
    assert releases.for_job(ours) is None
    releases.note(times[0], theirs)
    releases.note(times[1], ours)
    releases.note(times[2], ours)
    assert (releases.for_job(ours), releases.for_job(theirs)) == (times[0], times[2])
    releases.note(times[3], None)
    assert (releases.for_job(ours), releases.for_job(theirs)) == (times[3], times[3])


async def test_a_controller_that_stops_looks_at_no_job_again() -> None:
    """Otherwise it would make the budgets again that a stopping operator deletes."""
    cluster = Cluster(2, make_job("first").workers(1).job(), make_job("second").workers(1).job())
    controller = Controller(cluster, cluster, clock=lambda: cluster.now, pace=PACE)
    for key in cluster.jobs:
        controller.wake(key)
    await cluster.next_change()
    await controller.stop()
    await asyncio.sleep(0)
    for key in cluster.jobs:
        controller.wake(key)
    assert len(controller.boards) == 0


async def test_jobs_of_another_manager_are_not_among_the_controllers_jobs() -> None:
    cluster = Cluster(2, make_job("ours").job(), make_job("theirs").set("managedBy", "example.com/other").job())
    controller = Controller(cluster, cluster, clock=lambda: cluster.now, pace=PACE)
    for key in cluster.jobs:
        controller.wake(key)
    assert len(controller.boards) == 2
    assert [job.metadata.name for job in controller.jobs()] == ["ours"]
    await controller.stop()
