"""What is known of jobs, and that the end of one is found which no watch showed."""

import asyncio

import pytest

from pipetransformer_operator.controller.ports import JobKey, Unavailable
from pipetransformer_operator.kube import jobs
from pipetransformer_operator.kube.api import Api, Object
from pipetransformer_operator.kube.jobs import KnownJobs

pytestmark = pytest.mark.timeout(20)
ALL = "/apis/training.pipetransformer.io/v1alpha1/pipetrainingjobs"
KEY = JobKey("a", "digits")


def job(version: int, uid: str = "old", key: JobKey = KEY) -> Object:
    metadata = {"namespace": key.namespace, "name": key.name, "uid": uid, "resourceVersion": str(version)}
    return {"metadata": metadata}


class World(Api):
    """An API server that lists these jobs, two an answer, and who was told of what."""

    def __init__(self, *there: Object, version: int = 10) -> None:
        self.there = list(there)
        self.version = version
        self.failures = 0
        self.asked = 0
        self.gone: list[JobKey] = []
        self.known = KnownJobs(self, lambda key, job: dict(job), lambda key: None, self.gone.append)

    async def get(self, path: str, *, timeout: float = 0, accept: str = "") -> Object:
        self.asked += 1
        if self.failures:
            self.failures -= 1
            raise Unavailable("503")
        start = 2 * ("continue=" in path)
        more = {"continue": "x"} if len(self.there) > start + 2 else {}
        return {"metadata": {"resourceVersion": str(self.version), **more}, "items": self.there[start : start + 2]}

    async def listed(self, path: str = ALL) -> None:
        """The watch begins anew, and what follows from it is done."""
        self.known.listed(path)
        running = asyncio.create_task(self.known.run())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not running.done()
        running.cancel()


async def test_a_job_that_was_deleted_while_its_watch_was_broken_is_gone_once_the_watch_begins_anew() -> None:
    others = [job(2, f"other-{number}", JobKey("a", f"other-{number}")) for number in range(3)]
    world = World(*others)
    for one in (job(1), *others):
        world.known.note(one)
    await world.listed()
    assert world.gone == [KEY]
    assert world.known.of(KEY) is None
    assert len(world.known.keys()) == 3


async def test_of_two_jobs_of_one_name_the_newer_counts_whatever_is_said_of_the_other() -> None:
    world = World(job(8, "new"))
    world.known.note(job(1))
    world.known.note(job(8, "new"))
    assert world.known.of(KEY) == job(8, "new")
    await world.listed()
    assert world.known.of(KEY) == job(8, "new")
    world.known.drop(job(1))
    assert world.known.of(KEY) == job(8, "new")
    assert world.gone == []
    world.known.drop(job(9, "new"))
    assert world.gone == [KEY]


async def test_a_list_says_nothing_of_jobs_that_are_newer_nor_of_other_namespaces() -> None:
    newer, elsewhere = job(11), job(1, "b", JobKey("b", "digits"))
    world = World(version=10)
    world.known.note(newer)
    world.known.note(elsewhere)
    await world.listed(ALL.replace("v1alpha1", "v1alpha1/namespaces/a"))
    assert world.gone == []
    await world.listed()
    assert world.gone == [JobKey("b", "digits")]


async def test_a_list_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "RETRY_SECONDS", 0.0)
    world = World()
    world.known.note(job(1))
    world.failures = 2
    await world.listed()
    assert world.gone == [KEY]


async def test_the_first_list_is_not_compared_with_anything() -> None:
    world = World()
    await world.listed()
    assert world.asked == 0
