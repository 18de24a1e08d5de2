"""A claimed worker gives way to somebody else's pod that the scheduler finds no node for, and the job trains on: by
preemption, and in peace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.testkit.cluster.cluster import Cluster, fill, reinstalled
from tests.testkit.cluster.kube import Kube, Object, has_condition
from tests.testkit.cluster.manifests import TRAIN_SAMPLES, idle_pod, small_job
from tests.testkit.trainer.ledger_checker import check
from tools.devcluster.process import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
JOB = "digits"
SECONDS = 420
EPOCHS = 250
_failed = has_condition("Failed")


@pytest.fixture
def urgent(kube: Kube, request: pytest.FixtureRequest) -> Iterator[str]:
    """A PriorityClass above all of ours with the test's preemption policy; yields its name."""
    name = f"{kube.namespace[:40]}-urgent"
    kube.apply(
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": name},
            "value": 1000,
            "preemptionPolicy": request.param,
        }
    )
    yield name
    kube.delete("priorityclass", name)


def _runs(pod: Object) -> bool:
    return bool(pod["status"].get("phase") == "Running")


def _pods(kube: Kube) -> set[str]:
    return {pod["metadata"]["name"] for pod in kube.list("pods")}


def _trains_on(pipelines: int) -> Callable[[Object], bool]:
    def holds(job: Object) -> bool:
        generation = job.get("status", {}).get("generation", {})
        settled = generation.get("confirmedGeneration") == generation.get("layoutGeneration")
        return bool(settled and generation.get("pipelines") == pipelines)

    return holds


@pytest.mark.parametrize(
    ("urgent", "values", "stages"),
    [
        ("Never", ["releaseForOthers.enabled=true"], 1),
        ("PreemptLowerPriority", [], 1),
        ("PreemptLowerPriority", [], 2),
    ],
    ids=["release", "preemption", "preemption-of-two-stages"],
    indirect=["urgent"],
)
@pytest.mark.usefixtures("operator")
def test_a_pod_of_higher_priority_gets_the_accelerator_that_a_job_claimed_by(
    values: list[str], stages: int, kube: Kube, cluster: Cluster, shared: Path, urgent: str
) -> None:
    with reinstalled(cluster, *values):
        job = small_job(
            JOB, image=cluster.images["trainer"], shared=str(shared), stages=stages, workers=stages, epochs=EPOCHS
        )
        job["spec"]["elasticPolicy"]["maxWorkers"] = 2 * stages
        fill(kube, cluster, leave=2 * stages)
        kube.apply(job)
        wide = kube.wait("pipetrainingjob", JOB, _trains_on(2), "a claim", seconds=SECONDS, never=_failed)
        claimed = {f"{JOB}-w{number}" for number in wide["status"]["claimedIds"]}
        assert len(claimed) == stages

        waiting = idle_pod("urgent", image=cluster.images["operator"], gpus=1)
        waiting["spec"]["priorityClassName"] = urgent
        kube.apply(waiting)

        kube.wait("pod", "urgent", _runs, "Running", seconds=120)
        found = kube.wait("pipetrainingjob", JOB, _trains_on(1), "one pipeline", seconds=30, never=_failed)
        assert not has_condition("Complete")(found), "the job had ended before the pod ran"
        assert not claimed & {member["name"] for member in found["status"]["generation"]["members"]}, (
            "the pipeline went whole"
        )
        wait_until(lambda: not claimed & _pods(kube), "its pods are gone", seconds=60)
        done = kube.wait("pipetrainingjob", JOB, has_condition("Complete"), "Complete", seconds=SECONDS, never=_failed)
    assert done["status"].get("failures", 0) == 0
    findings = check(shared / "output" / JOB, TRAIN_SAMPLES, EPOCHS)
    assert findings.clean, findings
