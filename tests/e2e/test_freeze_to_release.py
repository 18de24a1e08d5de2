"""One freeze event end to end: the real operator, from its chart, and real trainers in pods on real kubelets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.testkit.cluster.cluster import Cluster
from tests.testkit.cluster.kube import Kube, Object, has_condition
from tests.testkit.cluster.manifests import STORAGE, TRAIN_SAMPLES, digits_job, idle_pod, pod
from tests.testkit.trainer.ledger_checker import check

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), pytest.mark.usefixtures("operator")]

JOB = "digits"
EPOCHS = 8
LONG = 16  # epochs in which another pod is scheduled and started while the job trains
LONGER = 24  # epochs in which the operator's next pod starts while the job trains
# Between these steps the operator's pod is deleted. That takes about a second, and 200 steps take eight.
FREEZES = [{"step": 20, "boundary": 8}, {"step": 220, "boundary": 11}]
LEARNT = 0.3  # guessing gives 0.1; so early a freeze leaves 0.43 to 0.57, by seed and order of the data
JOB_SECONDS = 480
_failed = has_condition("Failed")
_complete = has_condition("Complete")


def _start(
    kube: Kube,
    cluster: Cluster,
    shared: Path,
    *,
    on_pack: str,
    epochs: int = EPOCHS,
    freeze: list[dict[str, int]] | None = None,
) -> None:
    job = digits_job(JOB, image=cluster.images["trainer"], shared=str(shared), on_pack=on_pack, epochs=epochs)
    if freeze is not None:
        job["spec"]["freeze"]["boundaries"] = freeze
    kube.apply(job)


def _wait(kube: Kube, kind: str, *, seconds: float = JOB_SECONDS) -> Object:
    return kube.wait("pipetrainingjob", JOB, has_condition(kind), kind, seconds=seconds, never=_failed)


def _job_pods(kube: Kube) -> dict[str, Object]:
    """The job's pods by UID."""
    return {p["metadata"]["uid"]: p for p in kube.list("pods", f"training.pipetransformer.io/job={JOB}")}


def _restarts(pods: dict[str, Object]) -> int:
    return sum(c["restartCount"] for p in pods.values() for c in p["status"].get("containerStatuses", []))


def _layouts(shared: Path) -> list[tuple[int, int]]:
    """(stages, pipelines) of each generation, from the run's own record."""
    generations = _summary(shared)["generations"]
    return [(g["stages"], g["pipelines"]) for g in generations]


def _summary(shared: Path) -> Object:
    summary: Object = json.loads((shared / "output" / JOB / "summary.json").read_text())
    return summary


def _assert_exactly_once(shared: Path, epochs: int) -> None:
    findings = check(shared / "output" / JOB, TRAIN_SAMPLES, epochs)
    assert findings.clean, findings


def _assert_widened(kube: Kube, shared: Path, before: dict[str, Object], job: Object, epochs: int) -> None:
    """The same four pods were one pipeline, two, and four."""
    assert len(before) == 4
    assert _layouts(shared) == [(4, 1), (2, 2), (1, 4)]
    assert job["status"]["nextWorkerId"] == 4, "a fifth pod was created"
    after = _job_pods(kube)
    assert after.keys() <= before.keys()
    assert _restarts(after) == 0
    _assert_exactly_once(shared, epochs)


@pytest.mark.slow  # the one below shows it as well, with an operator that is replaced meanwhile
def test_widening_turns_one_pipeline_into_four_without_restarting_a_pod(
    kube: Kube, cluster: Cluster, shared: Path
) -> None:
    _start(kube, cluster, shared, on_pack="Widen")
    _wait(kube, "Running")
    before = _job_pods(kube)

    job = _wait(kube, "Complete")

    _assert_widened(kube, shared, before, job, EPOCHS)


def test_a_job_trains_on_without_an_operator_widens_under_the_next_and_leaves_a_model_that_predicts(
    kube: Kube, cluster: Cluster, operator: Kube, shared: Path
) -> None:
    _start(kube, cluster, shared, on_pack="Widen", epochs=LONGER, freeze=FREEZES)
    kube.wait("pipetrainingjob", JOB, _has_confirmed_two, "generation 2", seconds=JOB_SECONDS, never=_failed)
    before = _job_pods(kube)
    for operator_pod in operator.list("pods"):
        operator.delete("pod", operator_pod["metadata"]["name"], wait=False)  # the next one starts before it is gone
    assert kube.get("pipetrainingjob", JOB)["status"]["layoutGeneration"] == 2, "nothing is left to the next operator"

    job = _wait(kube, "Complete")

    _assert_widened(kube, shared, before, job, LONGER)
    score = _score_in_another_pod(kube, cluster, shared)
    assert score == pytest.approx(_summary(shared)["test_accuracy"], abs=1e-6)
    assert score > LEARNT, "the model learned nothing"


def _score_in_another_pod(kube: Kube, cluster: Cluster, shared: Path) -> float:
    """Accuracy that a pod finds which knows nothing of the job but the model's folder."""
    command = ["python", "-m", "pipetransformer", "predict", f"{STORAGE}/output/{JOB}/model"]
    kube.apply(pod("reader", image=cluster.images["trainer"], command=command, shared=str(shared)))
    kube.wait(
        "pod",
        "reader",
        lambda p: p["status"].get("phase") == "Succeeded",
        "Succeeded",
        seconds=90,
        never=lambda p: p["status"].get("phase") == "Failed",
    )
    return float(json.loads(kube.run("logs", "reader"))["accuracy"])


def test_released_gpus_let_somebody_elses_pending_pod_run_while_the_job_still_trains(
    kube: Kube, cluster: Cluster, shared: Path
) -> None:
    filler_image = cluster.images["operator"]
    for name, gpus in (("filler-a", 8), ("filler-b", 4)):  # with the job's 4 all 16 GPUs of the two nodes are held
        kube.apply(idle_pod(name, image=filler_image, gpus=gpus))
        kube.wait("pod", name, lambda p: p["status"].get("phase") == "Running", "Running", seconds=90)
    _start(kube, cluster, shared, on_pack="Release", epochs=LONG)
    _wait(kube, "Running")
    kube.apply(idle_pod("waiting", image=filler_image, gpus=2))
    kube.wait("pod", "waiting", _is_unschedulable, "unschedulable", seconds=20)

    kube.wait("pod", "waiting", lambda p: p["status"].get("phase") == "Running", "Running", seconds=JOB_SECONDS)

    assert not _complete(kube.get("pipetrainingjob", JOB)), "the job had ended before the pod ran"
    # The scheduler may see that the pods are gone before the operator counts them.
    kube.wait("pipetrainingjob", JOB, _has_released_two, "two GPUs released", seconds=30, never=_complete)
    job = _wait(kube, "Complete")
    assert _layouts(shared) == [(4, 1), (2, 1), (1, 1)]
    assert job["status"]["gpus"]["released"] >= 3
    _assert_exactly_once(shared, LONG)


def _has_confirmed_two(job: Object) -> bool:
    return bool(job.get("status", {}).get("generation", {}).get("confirmedGeneration", 0) >= 2)


def _has_released_two(job: Object) -> bool:
    return bool(job["status"]["gpus"]["released"] >= 2)


def _is_unschedulable(found: Object) -> bool:
    conditions = found["status"].get("conditions", [])
    return any(c["type"] == "PodScheduled" and c.get("reason") == "Unschedulable" for c in conditions)
