"""Quota through Kueue, installed from its chart, between jobs of real trainers in pods on real kubelets."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testkit.cluster.cluster import SYSTEM_NAMESPACE, Cluster
from tests.testkit.cluster.kube import Kube, Object, has_condition
from tests.testkit.cluster.manifests import GPU, TRAIN_SAMPLES, digits_job
from tests.testkit.documented import documented
from tests.testkit.trainer.ledger_checker import check
from tools.devcluster import kueue as devkueue
from tools.devcluster.layout import CONTEXT, REPOSITORY, Layout
from tools.devcluster.process import CommandError, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1500)]
API = "kueue.x-k8s.io/v1beta2"
WORKLOAD = "workloads.kueue.x-k8s.io"
QUEUE = "team"
GPUS = 4
JOB_SECONDS = 900
EPOCHS = 8
LONG = 24  #: epochs that last until another job has come, and Kueue is gone and back
_running = has_condition("Running")
_failed = has_condition("Failed")
_complete = has_condition("Complete")


@pytest.fixture(scope="module")
def kueue(cluster: Cluster, operator: Kube) -> Iterator[Kube]:
    """Kueue, and an operator that uses it, for this module only; yields Kueue's namespace."""
    if os.environ.get("PIPETRANSFORMER_TEST_CONTEXT", CONTEXT) != CONTEXT:
        pytest.skip("installs Kueue, which is only done to the development cluster")
    layout = Layout()
    devkueue.install(layout, cluster.helm)
    _use_kueue(cluster)
    yield cluster.kube(devkueue.NAMESPACE)
    system = cluster.kube("default")
    for kind in ("clusterqueues.kueue.x-k8s.io", "resourceflavors.kueue.x-k8s.io"):
        system.run("wait", "--for=delete", kind, "--all", "--timeout=120s")
    _use_kueue_no_more(cluster)
    devkueue.uninstall(layout, cluster.helm)


def _use_kueue(cluster: Cluster) -> None:
    upgrade = [*cluster.helm, "upgrade", "pipetransformer", str(REPOSITORY / "charts/pipetransformer")]
    switch = ["--reset-then-reuse-values", "--set", "kueue.enabled=true", "--wait", "--timeout", "120s"]
    subprocess.run([*upgrade, "--namespace", SYSTEM_NAMESPACE, *switch], check=True)


def _use_kueue_no_more(cluster: Cluster) -> None:
    """As the page on Kueue says."""
    (command,) = documented(
        "helm upgrade pipetransformer charts/pipetransformer --namespace pipetransformer --reset-then-reuse-values "
        "--set kueue.enabled=false"
    )
    _, *words = command.replace("--namespace pipetransformer", f"--namespace {SYSTEM_NAMESPACE}").split()
    subprocess.run([*cluster.helm, *words, "--timeout", "120s"], cwd=REPOSITORY, check=True)


@pytest.fixture
def queue(kube: Kube, kueue: Kube) -> Iterator[str]:
    """A LocalQueue of the test's namespace with quota for four GPUs; yields the name of its ClusterQueue."""
    name = kube.namespace
    preemption = {"withinClusterQueue": "LowerPriority"}
    resources = [{"name": GPU, "nominalQuota": GPUS}]
    groups = [{"coveredResources": [GPU], "flavors": [{"name": name, "resources": resources}]}]
    spec = {"namespaceSelector": {}, "preemption": preemption, "resourceGroups": groups}
    for kind, its_name, its_spec in (
        ("ResourceFlavor", name, {}),
        ("ClusterQueue", name, spec),
        ("LocalQueue", QUEUE, {"clusterQueue": name}),
    ):
        _apply(kube, {"apiVersion": API, "kind": kind, "metadata": {"name": its_name}, "spec": its_spec})
    yield name
    kube.run("delete", "clusterqueue", name, "--wait=false")  # it goes once nothing in the namespace holds its quota
    kube.run("delete", "resourceflavor", name, "--wait=false")


def _apply(kube: Kube, manifest: Object) -> None:
    """Applies it as soon as Kueue's webhook, which is ready a moment after its pod, takes it."""

    def taken() -> bool:
        try:
            kube.apply(manifest)
        except AssertionError as error:
            if "webhook" not in str(error):
                raise
            return False
        return True

    wait_until(taken, f"{manifest['kind']} is taken", seconds=60, every=0.5)


def _job(
    name: str, cluster: Cluster, shared: Path, workers: int, *, most: int, epochs: int = EPOCHS, **changes: Any
) -> Object:
    """One pipeline of so many workers, in the queue."""
    job = digits_job(name, image=cluster.images["trainer"], shared=str(shared), on_pack="Release", epochs=epochs)
    job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": QUEUE}
    job["spec"]["pipeline"]["stages"] = workers
    on_pack = "Release" if most == workers else "Widen"
    job["spec"]["elasticPolicy"] |= {"workers": workers, "maxWorkers": most, "onPack": on_pack}
    job["spec"] |= changes
    return job


def _wait(kube: Kube, name: str, condition: Any, what: str, *, seconds: float = JOB_SECONDS) -> Object:
    return kube.wait("pipetrainingjob", name, condition, what, seconds=seconds, never=_failed)


def _waits_for_quota(job: Object) -> bool:
    conditions = job.get("status", {}).get("conditions", [])
    return any(c["type"] == "Admitted" and c["reason"] == "WaitingForQuota" for c in conditions)


def _workers(kube: Kube) -> set[str]:
    """Names of all workers' pods that may hold a GPU."""
    pods = kube.list("pods", "training.pipetransformer.io/job")
    return {p["metadata"]["name"] for p in pods if p["status"]["phase"] not in ("Succeeded", "Failed")}


def _assert_exactly_once(shared: Path, name: str, epochs: int = EPOCHS) -> None:
    findings = check(shared / "output" / name, TRAIN_SAMPLES, epochs)
    assert findings.clean, findings


def test_a_job_that_packs_hands_its_quota_to_one_that_waits_and_both_complete(
    kube: Kube, cluster: Cluster, shared: Path, queue: str
) -> None:
    kube.apply(_job("first", cluster, shared, 4, most=4, epochs=LONG))
    _wait(kube, "first", _running, "Running")
    kube.apply(_job("second", cluster, shared, 2, most=2, freeze={"policy": "None"}))
    _wait(kube, "second", _waits_for_quota, "WaitingForQuota", seconds=30)

    def second_has_pods(job: Object) -> bool:
        workers = _workers(kube)
        assert len(workers) <= GPUS, f"more workers than quota: {workers}"
        return any(name.startswith("second-") for name in workers)

    job = _wait(kube, "second", second_has_pods, "a worker of the second job")
    assert not _complete(kube.get("pipetrainingjob", "first")), "the first had ended before"
    assert job["status"]["quotaRequests"][0]["workers"] == 2
    (workload,) = (w for w in kube.list(WORKLOAD) if w["metadata"]["name"].startswith("first-"))
    assert workload["status"]["reclaimablePods"][0]["count"] >= 2
    for name, epochs in (("first", LONG), ("second", EPOCHS)):
        _wait(kube, name, _complete, "Complete")
        _assert_exactly_once(shared, name, epochs)
    wait_until(lambda: not kube.list(WORKLOAD), "all quota is back", seconds=60)


def test_a_claim_gives_way_to_another_job_and_nobody_stops_while_kueue_is_killed(
    kube: Kube, cluster: Cluster, shared: Path, queue: str, kueue: Kube
) -> None:
    kube.apply(_job("first", cluster, shared, 2, most=4, epochs=LONG, freeze={"policy": "None"}))
    _wait(kube, "first", _has_pipelines(2), "a second pipeline")
    assert {w["spec"]["podSets"][0]["count"] for w in kube.list(WORKLOAD)} == {2}

    kube.apply(_job("second", cluster, shared, 2, most=2, freeze={"policy": "None"}))
    first = _wait(kube, "first", _has_pipelines(1), "one pipeline again")
    assert first["status"].get("failures", 0) == 0
    _wait(kube, "second", _running, "Running")

    for pod in kueue.list("pods"):
        kueue.run("delete", "pod", pod["metadata"]["name"], "--grace-period=1", "--wait=false")
    for name, epochs in (("first", LONG), ("second", EPOCHS)):
        _wait(kube, name, _complete, "Complete")
        _assert_exactly_once(shared, name, epochs)
    wait_until(lambda: _no_workloads(kube), "all quota is back", seconds=180, every=1)


def _has_pipelines(number: int) -> Any:
    def holds(job: Object) -> bool:
        generation = job.get("status", {}).get("generation", {})
        # not while leavers wait for their checkpoint
        return bool(job.get("status", {}).get("state") == "Running" and generation.get("pipelines") == number)

    return holds


def _no_workloads(kube: Kube) -> bool:
    try:
        return not kube.list(WORKLOAD)
    except (AssertionError, CommandError):  # Kueue is not back yet
        return False
