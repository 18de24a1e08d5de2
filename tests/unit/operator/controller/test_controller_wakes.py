"""What makes a job's loop take a turn, and whom a turn tells."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from pipetransformer_contract.api import JobSpec, JobStatus, PipeTrainingJob
from pipetransformer_contract.api.status import Share
from pipetransformer_operator.channel.authenticator import Identity
from pipetransformer_operator.channel.limits import pulse
from pipetransformer_operator.controller.gangs import Place
from pipetransformer_operator.controller.loop import JobLoop, Pace
from pipetransformer_operator.plan import Observed, Plan, plan
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.controller import KEY, NOW, Turns, make_loop
from tests.testkit.operator.shared_cluster import Cluster

#: No turn comes by itself while a test runs.
SLOW = Pace(debounce=0.0, resync=3600.0)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn follows a notice at once."""
    monkeypatch.setattr(pulse, "NOTICES_PER_SECOND", 1e9)


@asynccontextmanager
async def settled(cluster: Cluster, pace: Pace = SLOW) -> AsyncIterator[tuple[JobLoop, Turns]]:
    """A loop that runs, and has taken all turns that follow from its start."""
    turns = Turns()
    loop = make_loop(cluster, pace, turns, writes=4)
    running = asyncio.create_task(loop.run())
    try:
        async with asyncio.timeout(30):
            await turns.taken()
            await quiet(turns)
            yield loop, turns
    finally:
        running.cancel()


async def quiet(turns: Turns) -> None:
    """Waits until the loop takes no other turn, and forgets those that it took."""
    while True:
        for _ in range(50):
            await asyncio.sleep(0)
        if turns.none():
            return
        await turns.taken()


async def wakes(turns: Turns) -> bool:
    """Whether a turn follows at once. One that the plan asked for comes later."""
    for _ in range(50):
        await asyncio.sleep(0)
    return not turns.none()


@pytest.mark.parametrize("waits", [True, False])
async def test_accelerators_that_become_free_wake_only_a_job_that_waits_for_some(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decide(spec: JobSpec, observed: Observed, now: datetime) -> Plan:
        return replace(plan(spec, observed, now), waits_for_room=waits)

    monkeypatch.setattr("pipetransformer_operator.controller.loop.plan", decide)
    async with settled(Cluster(2, make_job().workers(2).job())) as (loop, turns):
        loop.notice_accelerators()
        assert await wakes(turns) is waits


async def test_a_new_share_or_place_wakes_a_job_and_a_known_one_does_not() -> None:
    share, place = Share(workers=2, layout_generation=0), Place(preferred_since=NOW)
    async with settled(Cluster(2, make_job().workers(2).job())) as (loop, turns):
        loop.set_share(share)
        assert await wakes(turns)
        await quiet(turns)
        loop.set_place(place)
        assert await wakes(turns)
        await quiet(turns)
        loop.set_share(share)
        loop.set_place(place)
        assert not await wakes(turns)


async def test_a_turn_that_created_workers_is_followed_by_one_that_looks_at_them() -> None:
    class Deaf(Cluster):
        """Its watch tells of nothing."""

    turns = Turns()
    cluster = Deaf(2, make_job().workers(2).job())
    running = asyncio.create_task(make_loop(cluster, SLOW, turns, writes=4).run())
    async with asyncio.timeout(30):
        await turns.taken(2)
    running.cancel()
    assert len(cluster.workers["digits"]) == 2


async def test_a_turn_without_an_event_waits_for_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with settled(Cluster(2, make_job().workers(2).job()), Pace(debounce=0.0, resync=0.02)) as (_, turns):
        monkeypatch.setattr(pulse, "NOTICES_PER_SECOND", 1 / 60)  # changes wait for a minute
        await turns.taken(3)


class Listening(Cluster):
    """Notes what it is to expect."""

    def __init__(self, size: int, *jobs: PipeTrainingJob) -> None:
        super().__init__(size, *jobs)
        self.expected: list[JobStatus] = []

    def reserve_room(self, job: PipeTrainingJob, status: JobStatus) -> None:
        assert job.metadata.name == "digits"
        self.expected.append(status)

    async def write_status(self, job: PipeTrainingJob, status: JobStatus) -> None:
        assert self.expected[-1] == status, "other jobs look at the same room before the write ends"
        await super().write_status(job, status)


class Decisions(Turns):
    """Notes the decisions that it hears of."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[PipeTrainingJob, Observed, Plan, float]] = []

    def on_decided(self, job: PipeTrainingJob, observed: Observed, plan: Plan, seconds: float) -> None:
        self.heard.append((job, observed, plan, seconds))


async def test_the_pool_expects_what_a_turn_decides_and_the_metrics_hear_of_it() -> None:
    cluster, metrics = Listening(2, make_job().workers(2).job()), Decisions()
    loop = make_loop(cluster, metrics=metrics)
    job = cluster.jobs[KEY]

    await loop.turn(job)

    ((told, observed, decided, seconds),) = metrics.heard
    assert told is job and observed.workers == () and decided.create == (0, 1)
    assert cluster.expected == [decided.status] == [cluster.status("digits")]
    assert 0.0 <= seconds < timedelta(minutes=1).total_seconds(), "the duration of the decision"


async def test_a_worker_that_is_gone_is_not_known_after_the_next_turn() -> None:
    cluster = Cluster(2, make_job().workers(2).job())
    loop = make_loop(cluster)
    await loop.turn(cluster.jobs[KEY])
    await loop.turn(cluster.jobs[KEY])
    first, second = (Identity("default", worker.name, worker.uid) for worker in cluster.workers["digits"])
    assert loop.board.knows(first) and loop.board.knows(second)
    pods = cluster.workers["digits"]
    pods[1] = replace(pods[1], uid="another")

    await loop.turn(cluster.jobs[KEY])

    assert loop.board.knows(first) and not loop.board.knows(second)
