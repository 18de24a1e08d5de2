"""What becomes of a job that its user scales, edits, bounds or gives away, on real kubelets."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from tests.testkit.cluster.cluster import Cluster
from tests.testkit.cluster.kube import Kube, Object, has_condition
from tests.testkit.cluster.manifests import TRAIN_SAMPLES, small_job
from tests.testkit.trainer.ledger_checker import check

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("operator"),
]

JOB = "digits"
JOB_LABEL = f"training.pipetransformer.io/job={JOB}"
SECONDS = 300
_failed = has_condition("Failed")


def _trains_on(workers: int) -> Callable[[Object], bool]:
    """Whether a job's newest layout is confirmed and has so many workers."""

    def holds(job: Object) -> bool:
        generation = job.get("status", {}).get("generation")
        confirmed = bool(generation) and generation.get("confirmedGeneration", 0) >= generation["layoutGeneration"]
        return confirmed and len(generation["members"]) == workers

    return holds


def _phases(kube: Kube) -> list[str]:
    return [pod["status"]["phase"] for pod in kube.list("pods", JOB_LABEL)]


def test_a_job_follows_kubectl_scale_and_edits_while_it_trains(kube: Kube, cluster: Cluster, shared: Path) -> None:
    epochs = 150
    kube.apply(small_job(JOB, image=cluster.images["trainer"], shared=str(shared), epochs=epochs))

    def wait(what: str, condition: Callable[[Object], bool]) -> None:
        kube.wait("pipetrainingjob", JOB, condition, what, seconds=SECONDS, never=_failed)

    wait("two workers", _trains_on(2))
    kube.run("scale", "pipetrainingjob", JOB, "--replicas=1")
    wait("one worker", _trains_on(1))
    wait("one pod", lambda _: len(_phases(kube)) == 1)
    kube.run("scale", "pipetrainingjob", JOB, "--replicas=2")
    wait("two workers again", _trains_on(2))
    more = json.dumps({"spec": {"elasticPolicy": {"maxWorkers": 3}}})
    kube.run("patch", "pipetrainingjob", JOB, "--type=merge", "-p", more)
    wait("three workers", _trains_on(3))
    wait("Complete", has_condition("Complete"))

    assert kube.get("pipetrainingjob", JOB)["status"].get("failures", 0) == 0
    findings = check(shared / "output" / JOB, TRAIN_SAMPLES, epochs)
    assert findings.clean, findings


@pytest.mark.parametrize(("policy", "left"), [("None", 2), ("All", 0)])
def test_a_job_that_has_ended_leaves_what_it_says_and_goes_when_it_says(
    policy: str, left: int, kube: Kube, cluster: Cluster, shared: Path
) -> None:
    seconds = 30
    job = small_job(JOB, image=cluster.images["trainer"], shared=str(shared), epochs=5)
    job["spec"]["runPolicy"] = {"cleanPodPolicy": policy, "ttlSecondsAfterFinished": seconds}
    kube.apply(job)

    done = has_condition("Complete")
    status = kube.wait("pipetrainingjob", JOB, done, "Complete", seconds=SECONDS, never=_failed)["status"]
    ended = datetime.fromisoformat(status["completionTime"]).timestamp()
    what = f"{left} pods, all ended"
    kube.wait("pipetrainingjob", JOB, lambda _: _phases(kube) == ["Succeeded"] * left, what, seconds=seconds)

    kube.wait_gone("pipetrainingjobs", "", seconds=seconds + 60)
    assert time.time() >= ended + seconds
    kube.wait_gone("pods", JOB_LABEL, seconds=60)


def test_a_job_that_outlives_its_deadline_fails_and_holds_no_accelerator(
    kube: Kube, cluster: Cluster, shared: Path
) -> None:
    job = small_job(JOB, image=cluster.images["trainer"], shared=str(shared), epochs=100_000)
    job["spec"]["runPolicy"] = {"activeDeadlineSeconds": 45}
    kube.apply(job)

    kube.wait("pipetrainingjob", JOB, _trains_on(2), "it trains", seconds=SECONDS, never=_failed)
    status = kube.wait("pipetrainingjob", JOB, _failed, "Failed", seconds=120)["status"]
    condition = next(condition for condition in status["conditions"] if condition["type"] == "Failed")
    assert condition["reason"] == "DeadlineExceeded"
    # cleanPodPolicy is Running: a worker that ends before the operator deletes it leaves its pod and its log.
    kube.wait("pipetrainingjob", JOB, lambda _: set(_phases(kube)) <= {"Succeeded"}, "no pod runs", seconds=90)


def test_a_job_that_somebody_else_manages_is_left_alone(kube: Kube, cluster: Cluster, shared: Path) -> None:
    """As long as it takes to run another."""
    image = cluster.images["trainer"]
    foreign = small_job("foreign", image=image, shared=str(shared))
    foreign["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    kube.apply(foreign)
    kube.apply(small_job(JOB, image=image, shared=str(shared), epochs=5))

    kube.wait("pipetrainingjob", JOB, has_condition("Complete"), "Complete", seconds=SECONDS, never=_failed)
    assert not kube.get("pipetrainingjob", "foreign").get("status")
    assert kube.list("pods", "training.pipetransformer.io/job=foreign") == []
