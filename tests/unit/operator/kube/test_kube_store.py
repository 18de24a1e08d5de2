"""What is kept of a job that the watch shows."""

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pipetransformer_contract.api import JobStatus, PipeTrainingJob
from pipetransformer_contract.api.requests import Object, jobs_path
from pipetransformer_operator.controller.ports import JobKey
from pipetransformer_operator.kube.client.api import Api
from pipetransformer_operator.kube.store import KubeStore, ParsedJobs
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
