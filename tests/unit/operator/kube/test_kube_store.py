"""What is kept of a job that the watch shows."""

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer_contract.api import JobStatus, PipeTrainingJob
from pipetransformer_contract.api.requests import Object, jobs_path
from pipetransformer_contract.api.schema import root_schema
from pipetransformer_contract.api.status import Reason
from pipetransformer_operator.clocks import Sources
from pipetransformer_operator.controller.ports import Conflict, JobKey, Unavailable
from pipetransformer_operator.kube.client.api import NO_QUERY, Api, NotFound, Query
from pipetransformer_operator.kube.store import KubeStore, ParsedJobs, why_not_served
from pipetransformer_operator.plan import EventType, PlanEvent
from tests.testkit.operator.builders import make_job

KEY = JobKey("default", "digits")


def body(version: int, uid: str = "uid-0", stages: int = 2) -> dict[str, Any]:
    manifest = make_job().stages(stages).workers(stages).manifest()
    known = {"namespace": "default", "uid": uid, "resourceVersion": str(version), "generation": 1}
    return {**manifest, "metadata": {**manifest["metadata"], **known, "managedFields": [{"manager": "kubectl"}]}}


def test_of_a_known_job_only_the_version_is_kept() -> None:
    api: Any = None
    watched: dict[JobKey, dict[str, Any]] = {}

    class Watched:
        def of(self, key: JobKey) -> dict[str, Any] | None:
            return watched.get(key)

    parsed = ParsedJobs()
    store = KubeStore(api, Watched(), parsed)

    def show(shown: dict[str, Any]) -> int:
        """The watch shows it; how many stages the job has then."""
        watched[KEY] = parsed.trimmed(KEY, shown)
        job = store.read(KEY)
        assert job is not None
        return job.spec.pipeline.stages

    assert show(body(5)) == 2
    assert watched[KEY].keys() == body(5).keys() and "managedFields" not in watched[KEY]["metadata"]
    for version in (5, 4):
        assert show(body(version, stages=3)) == 2, "what is known is as new"
        assert watched[KEY] == {"metadata": {"uid": "uid-0", "resourceVersion": str(version)}}
    assert show(body(6, stages=4)) == 4
    assert show(body(3, uid="uid-1", stages=8)) == 8, "another job of that name"
    watched.clear()
    assert store.read(KEY) is None


class Server(Api):
    """An API server that answers a write of the status with metadata only, if it is asked to."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    async def request(self, method: str, path: str, body: object = None, **options: object) -> Object:
        assert (method, path) == ("PUT", f"{jobs_path('default')}/digits/status")
        assert isinstance(body, dict)
        self.kept = json.loads(json.dumps(body))
        self.kept["metadata"]["resourceVersion"] = "6"
        assert "PartialObjectMetadata;" in str(options["accept"])
        return {"kind": "PartialObjectMetadata", "metadata": self.kept["metadata"]}


@given(seconds=st.floats(0, 1e12, allow_nan=False), time=st.datetimes(timezones=st.just(UTC)))
def test_a_status_that_was_written_is_known_as_the_server_keeps_it(seconds: float, time: datetime) -> None:
    server, parsed = Server(), ParsedJobs()
    store = KubeStore(server, Watching(body(5)), parsed)
    job = store.read(KEY)
    assert job is not None
    asyncio.run(store.write_status(job, JobStatus(gpu_seconds_saved=seconds, start_time=time, worker_ids=[0, 1])))

    known = store.read(KEY)
    assert known is not None and known.metadata.resource_version == "6"
    kept = {**body(6), "status": server.kept["status"]}
    assert known == PipeTrainingJob.from_manifest({**kept, "metadata": {**kept["metadata"], "managedFields": []}})


class Watching:
    """A watch that has shown this."""

    def __init__(self, shown: dict[str, Any]) -> None:
        self._shown = shown

    def of(self, key: JobKey) -> dict[str, Any] | None:
        return self._shown


class Answering(Api):
    """An API server that notes requests, and answers by path, or refuses everything with one error."""

    def __init__(self, answers: dict[str, Object] | None = None, error: Exception | None = None) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self._answers, self._error = answers or {}, error

    async def request(self, method: str, path: str, body: object = None, **options: object) -> Object:
        self.asked.append((method, path, body))
        if self._error is not None:
            raise self._error
        return {}

    async def get(self, path: str, query: Query = NO_QUERY, *, timeout: float = 0, accept: str = "") -> Object:
        if path not in self._answers:
            raise NotFound(path)
        return self._answers[path]


@pytest.mark.parametrize("error", [None, NotFound("it is gone")])
async def test_only_the_job_that_was_read_is_deleted(error: Exception | None) -> None:
    api = Answering(error=error)
    await KubeStore(api, Watching(body(5)), ParsedJobs()).delete(PipeTrainingJob.from_manifest(body(5)))
    options = {"preconditions": {"uid": "uid-0"}, "propagationPolicy": "Background"}
    assert api.asked == [("DELETE", f"{jobs_path('default')}/digits", options)]


async def test_a_status_of_a_job_that_is_deleted_meanwhile_is_a_conflict_and_no_defect() -> None:
    store = KubeStore(Answering(error=NotFound("it is gone")), Watching(body(5)), ParsedJobs())
    with pytest.raises(Conflict):
        await store.write_status(PipeTrainingJob.from_manifest(body(5)), JobStatus())


@pytest.mark.parametrize("error", [None, Unavailable("503"), Conflict("409"), NotFound("404")])
async def test_an_event_is_of_its_job_and_one_that_cannot_be_written_stops_nothing(error: Exception | None) -> None:
    api = Answering(error=error)
    sources = Sources(now=lambda: datetime(2026, 1, 1, tzinfo=UTC), token=lambda size: size * "ab")
    told = PlanEvent(EventType.WARNING, Reason.OUT_OF_MEMORY, 2000 * "x")
    store = KubeStore(api, Watching(body(5)), ParsedJobs(), sources)
    await store.tell(PipeTrainingJob.from_manifest(body(5)), told)
    ((method, path, event),) = api.asked
    assert (method, path) == ("POST", "/api/v1/namespaces/default/events")
    assert event["metadata"] == {"name": f"digits.{8 * 'ab'}", "namespace": "default"}
    about = event["involvedObject"]
    assert (about["kind"], about["name"], about["uid"]) == ("PipeTrainingJob", "digits", "uid-0")
    assert (event["type"], event["reason"], event["message"]) == ("Warning", "OutOfMemory", 1024 * "x")
    assert event["firstTimestamp"] == event["lastTimestamp"] == "2026-01-01T00:00:00Z"


async def test_a_crd_is_served_once_it_has_every_field_of_the_status() -> None:
    group, version = "training.pipetransformer.io", "v1alpha1"
    status = json.loads(json.dumps(root_schema()["properties"]["status"]))
    resources = {"resources": [{"name": "pipetrainingjobs"}]}
    schemas = {"io.pipetransformer.training.v1alpha1.PipeTrainingJob": {"properties": {"status": status}}}
    answers: dict[str, Object] = {f"/apis/{group}/{version}": resources}
    assert "does not serve pipetrainingjobs" in await why_not_served(Answering(answers))
    answers[f"/openapi/v3/apis/{group}/{version}"] = {"components": {"schemas": schemas}}
    assert await why_not_served(Answering(answers)) == ""
    del status["properties"]["generation"]
    why = await why_not_served(Answering(answers))
    assert "lacks status.generation" in why, "the server would drop this field"
