"""Deletions that the cluster refuses: they show in the status, are retried, and delay nothing else."""

import asyncio
import math
from dataclasses import replace

import pytest

from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_contract.api.status import Condition, ConditionType
from pipetransformer_operator.channel.limits import pulse
from pipetransformer_operator.controller.loop import Pace
from pipetransformer_operator.controller.ports import Refused
from pipetransformer_operator.controller.refused_deletions import RefusedDeletions
from pipetransformer_operator.plan import Deletion, PlanEvent, Worker, WorkerPhase
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.controller import KEY, make_loop
from tests.testkit.operator.shared_cluster import Cluster

WORDS = "DELETE pods: 403 a policy says no"


@pytest.fixture(autouse=True)
def no_words_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of conditions alone are written at once."""
    monkeypatch.setattr(pulse, "SHORTEST_WORDS_SECONDS", 0.0)
    monkeypatch.setattr(pulse, "WORDS_PER_SECOND", math.inf)


@pytest.fixture
async def time_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the test takes, no pause is over."""
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 0.0)


class Keeping(Cluster):
    """It refuses to delete pods of these names."""

    def __init__(self, *names: str) -> None:
        super().__init__(9, make_job().stages(2).workers(2).job())
        self.kept = set(names)
        self.asked: list[str] = []
        self.told: list[str] = []

    async def delete(self, job: PipeTrainingJob, name: str = "", uid: str = "") -> None:
        self.asked.append(name)
        if name in self.kept:
            raise Refused(WORDS)
        await super().delete(job, name, uid)

    async def tell(self, job: PipeTrainingJob, event: PlanEvent) -> None:
        self.told.append(event.reason)

    def change(self, *, suspended: bool = False) -> None:
        """A user edits the spec."""
        job = self.jobs[KEY]
        self.jobs[KEY] = job.model_copy(update={"spec": job.spec.model_copy(update={"suspend": suspended})})

    def suspended(self) -> Condition:
        found = self.status("digits").condition(ConditionType.SUSPENDED)
        assert found is not None
        return found


@pytest.mark.usefixtures("time_stands")
async def test_a_refused_deletion_fails_no_turn_and_shows_the_clusters_words() -> None:
    cluster = Keeping("digits-w0")
    loop = make_loop(cluster)
    for _ in range(2):
        await loop.turn(cluster.jobs[KEY])
    cluster.change(suspended=True)
    for _ in range(3):
        again = await loop.turn(cluster.jobs[KEY])

    assert [worker.name for worker in cluster.list(cluster.jobs[KEY])] == ["digits-w0"]
    assert cluster.suspended().reason == "DeletionRefused"
    assert cluster.suspended().message == f"spec.suspend is true; the cluster refuses to delete digits-w0: {WORDS}"
    assert cluster.told.count("DeletionRefused") == 1
    assert cluster.status("digits").gpus.held == 1
    assert cluster.asked == ["digits-w0", "digits-w1"], "turns for other reasons ask for nothing again"
    assert again == 0.5


async def test_it_is_asked_again_in_time_and_forgotten_when_it_passes() -> None:
    cluster = Keeping("digits-w0")
    loop = make_loop(cluster, Pace(first_retry=0.0))
    for _ in range(2):
        await loop.turn(cluster.jobs[KEY])
    cluster.change(suspended=True)
    for _ in range(2):
        await loop.turn(cluster.jobs[KEY])
    assert cluster.suspended().reason == "DeletionRefused"
    cluster.kept.clear()
    for _ in range(2):
        await loop.turn(cluster.jobs[KEY])
    assert cluster.suspended().reason == "SuspendedByUser"
    assert cluster.status("digits").gpus.held == 0
    assert cluster.told.count("DeletionRefused") == 1


async def test_one_that_somebody_else_deletes_is_not_named_any_more() -> None:
    cluster = Keeping("digits-w0", "digits-w1")
    loop = make_loop(cluster)
    for _ in range(2):
        await loop.turn(cluster.jobs[KEY])
    cluster.change(suspended=True)
    for _ in range(2):
        await loop.turn(cluster.jobs[KEY])
    pods = cluster.workers["digits"]
    pods[:] = [replace(pod, terminating=True) for pod in pods]
    await loop.turn(cluster.jobs[KEY])
    assert cluster.suspended().reason == "SuspendedByUser"


@pytest.mark.usefixtures("time_stands")
async def test_workers_that_are_not_refused_are_deleted_while_others_wait() -> None:
    cluster = Keeping("digits-w7")
    cluster.workers["digits"] = [Worker(7, "digits-w7", "uid-7", WorkerPhase.RUNNING, scheduled=True)]
    loop = make_loop(cluster)
    for _ in range(2):
        await loop.turn(cluster.jobs[KEY])
    assert len(cluster.workers["digits"]) == 3, "others are created"
    running = cluster.status("digits").condition(ConditionType.RUNNING)
    assert running is not None and running.reason == "DeletionRefused"
    cluster.change(suspended=True)
    await loop.turn(cluster.jobs[KEY])
    assert [worker.name for worker in cluster.workers["digits"]] == ["digits-w7"]
    assert sorted(cluster.asked) == ["digits-w7", "digits-w8", "digits-w9"]


def test_each_refusal_doubles_the_pause_up_to_the_longest() -> None:
    deletions, wanted = RefusedDeletions(1.0, 5.0), [Deletion(0, "a", "uid-a", "why"), Deletion(1, "b", "uid-b", "why")]
    assert deletions.due(wanted, 0.0) == wanted
    assert deletions.seconds_until_due(0.0) is None
    now, pauses = 0.0, []
    for _ in range(4):
        pauses.append(deletions.add("uid-a", WORDS, now))
        assert deletions.due(wanted, now) == wanted[1:]
        assert deletions.seconds_until_due(now) == pauses[-1]
        now += pauses[-1]
        assert deletions.due(wanted, now) == wanted
    assert pauses == [1.0, 2.0, 4.0, 5.0]
    deletions.add("uid-a", WORDS, now)
    deletions.add("uid-b", WORDS, now)
    assert deletions.seconds_until_due(now) == 1.0, "one of them is due before the other"
    deletions.remove("uid-b")
    deletions.remove("uid-a")
    assert deletions.explanations == {}
    assert deletions.add("uid-a", WORDS, now) == 1.0
    assert deletions.due(wanted[1:], now) == wanted[1:] and deletions.explanations == {}
