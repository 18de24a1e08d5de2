"""What is kept of a job that the watch shows."""

from typing import Any

from pipetransformer_operator.controller.ports import JobKey
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
