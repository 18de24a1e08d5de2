"""What is known of jobs, and that the end of one is found which no watch showed."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.controller.ports import JobKey, Unavailable
from pipetransformer_operator.kube.events import ClusterListener
from pipetransformer_operator.kube.watches import jobs
from pipetransformer_operator.kube.watches.jobs import KnownJobs
from tests.testkit.operator.scripted_api import Listed, ScriptedApi

pytestmark = pytest.mark.timeout(60)
ALL = "/apis/training.pipetransformer.io/v1alpha1/pipetrainingjobs"
KEY = JobKey("a", "digits")


def job(version: int, uid: str = "old", key: JobKey = KEY) -> Object:
    metadata = {"namespace": key.namespace, "name": key.name, "uid": uid, "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {}}


class Trimmer:
    """Keeps all of a job, except of the version that the operator wrote itself."""

    written = 0

    def trimmed(self, key: JobKey, body: Mapping[str, Any]) -> Object:
        written = body["metadata"]["resourceVersion"] == str(self.written)
        return {"metadata": body["metadata"]} if written else dict(body)


class World(ScriptedApi, ClusterListener):
    """An API server that answers lists, two jobs an answer, and who was told of what."""

    def __init__(self, *answers: Listed | Exception) -> None:
        super().__init__(*answers, parts=2)
        self.gone: list[JobKey] = []
        self.changes = 0
        self.trimmer = Trimmer()
        self.known = KnownJobs(self, self.trimmer, self)

    def on_job_changed(self, key: JobKey) -> None:
        self.changes += 1

    def on_job_gone(self, key: JobKey) -> None:
        self.gone.append(key)

    async def listed(self, path: str = ALL) -> None:
        """The watch begins anew, and what follows from it is done."""
        self.known.on_listed(path)
        running = asyncio.create_task(self.known.run())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not running.done()
        running.cancel()


async def test_what_the_operator_wrote_itself_is_no_change() -> None:
    world = World()
    world.trimmer.written = 6
    for version, changes in ((5, 1), (6, 1), (7, 2)):
        world.known.note(job(version))
        assert world.changes == changes


async def test_a_job_that_the_watch_shows_again_after_its_end_is_a_change() -> None:
    world = World()
    world.trimmer.written = 5
    world.known.note(job(5))
    world.known.drop(job(5))
    world.known.note(job(5))
    assert world.changes == 2


async def test_a_job_deleted_during_a_watch_outage_is_gone_after_the_next_list(
    caplog: pytest.LogCaptureFixture,
) -> None:
    others = [job(2, f"other-{number}", JobKey("a", f"other-{number}")) for number in range(3)]
    world = World(Listed(others, 10))
    for one in (job(1), *others):
        world.known.note(one)
    await world.listed()
    assert world.gone == [KEY]
    assert world.known.of(KEY) is None
    assert len(world.known.keys()) == 3
    assert caplog.messages == ["a/digits was deleted, but its watch did not show that"]


async def test_of_two_jobs_of_one_name_the_newer_counts_whatever_is_said_of_the_other() -> None:
    world = World(Listed([job(8, "new")], 10))
    world.known.note(job(1))
    world.known.note(job(8, "new"))
    assert world.known.of(KEY) == job(8, "new")
    assert world.changes == 2
    await world.listed()
    assert world.known.of(KEY) == job(8, "new")
    assert world.changes == 3, "the newer one has the name for itself now"
    world.known.drop(job(1))
    assert world.known.of(KEY) == job(8, "new")
    assert world.gone == []
    world.known.drop(job(9, "new"))
    assert world.gone == [KEY]


async def test_a_list_says_nothing_of_jobs_that_are_newer_nor_of_other_namespaces() -> None:
    newer, elsewhere = job(11), job(1, "b", JobKey("b", "digits"))
    world = World(Listed([], 10), Listed([], 10))
    world.known.note(newer)
    world.known.note(elsewhere)
    await world.listed(ALL.replace("v1alpha1", "v1alpha1/namespaces/a"))
    assert world.gone == []
    await world.listed()
    assert world.gone == [JobKey("b", "digits")]


async def test_a_list_that_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jobs, "RETRY_SECONDS", 0.0)
    world = World(Unavailable("503"), Unavailable("503"), Listed([], 10))
    world.known.note(job(1))
    await world.listed()
    assert world.gone == [KEY]
    assert [one for one in caplog.messages if "cannot list" in one] == 2 * [
        "cannot list jobs: 503; trying again in 0 s"
    ]


async def test_the_first_list_is_not_compared_with_anything() -> None:
    world = World()
    await world.listed()
    assert world.asked == []
