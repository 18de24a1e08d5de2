"""A job with levels, end to end: the small model gives a worker back, somebody else's pod has it meanwhile, and the job
waits until it has the workers that the large model needs. No loss tells that the operator was killed on the way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipetransformer_contract.spec import TrainerSpec
from tests.testkit import ROOT
from tests.testkit.cluster import levels_job
from tests.testkit.cluster.cluster import Cluster, fill, operator_pod
from tests.testkit.cluster.kube import Kube, Object, has_condition
from tests.testkit.cluster.manifests import STORAGE, digits_job, idle_pod
from tests.testkit.trainer.harness import Scripted, run_job
from tests.testkit.trainer.ledger_checker import check

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1500)]

JOB = "levels"
MODULE = "timed_model"
_failed = has_condition("Failed")


def test_gpus_fall_on_the_way_down_and_rise_before_the_way_up_or_the_job_waits(
    kube: Kube, cluster: Cluster, operator: Kube, shared: Path, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "tests/testkit/user_code" / f"{MODULE}.py", shared)
    job = digits_job(JOB, image=cluster.images["trainer"], shared=str(shared), on_pack="Release", epochs=1)
    (container,) = job["spec"]["podTemplate"]["spec"]["containers"]
    container["env"] = [{"name": "PYTHONPATH", "value": STORAGE}]
    fill(kube, cluster, leave=2)
    kube.apply(levels_job.with_levels(job, MODULE))

    _wait(kube, _trains_on(2), "two workers")
    _wait(kube, _trains_on(1), "the small model on one worker")
    kube.apply(idle_pod("stranger", image=cluster.images["operator"], gpus=1))
    kube.wait("pod", "stranger", lambda pod: pod["status"].get("phase") == "Running", "Running", seconds=60)
    _kill(operator)

    _wait(kube, _waits_for_level, "the large model waits for its second worker")
    _kill(operator)
    waiting = _wait(kube, _waits_for_level, "it still waits")
    assert waiting["status"]["lastReport"]["step"] == levels_job.DESCENT + levels_job.ASCENT
    assert waiting["status"]["generation"]["stages"] == 1

    kube.delete("pod", "stranger")
    _kill(operator)
    ended = _wait(kube, has_condition("Complete"), "Complete")

    assert ended["status"].get("failures", 0) == 0
    record = shared / "output" / JOB
    generations = json.loads((record / "summary.json").read_text())["generations"]
    assert [(one["stages"], one["pipelines"]) for one in generations] == [(2, 1), (1, 1), (2, 1)]
    assert check(record, levels_job.SAMPLES, levels_job.EPOCHS).clean
    assert _losses(record) == pytest.approx(_losses_of_two_workers(tmp_path), rel=1e-9)


def _wait(kube: Kube, condition: Callable[[Object], bool], what: str) -> Object:
    return kube.wait("pipetrainingjob", JOB, condition, what, seconds=600, never=_failed)


def _trains_on(stages: int) -> Callable[[Object], bool]:
    """Whether the job trains in one pipeline of this many stages, and holds no other GPU."""

    def holds(job: Object) -> bool:
        generation = job.get("status", {}).get("generation", {})
        settled = generation.get("confirmedGeneration") == generation.get("layoutGeneration")
        return bool(settled and generation.get("stages") == stages and job["status"]["gpus"]["held"] == stages)

    return holds


def _waits_for_level(job: Object) -> bool:
    conditions = job["status"]["conditions"]
    return any(each["type"] == "Resizing" and each["reason"] == "WaitingForLevel" for each in conditions)


def _kill(operator: Kube) -> None:
    """Kill the operator without grace, and return once the next one leads."""
    operator.run("delete", "pod", operator_pod(operator)["metadata"]["name"], "--grace-period=0", "--force")
    operator_pod(operator)


def _losses_of_two_workers(folder: Path) -> list[float]:
    """Losses of the same job where two workers train all steps, on layers that take no time."""
    sections = levels_job.sections(f"tests.testkit.user_code.{MODULE}", forward_seconds=0)
    spec = TrainerSpec.model_validate({**sections, "checkpoint": {"location": str(folder / "checkpoints")}})
    return _losses(run_job(spec, [Scripted(2, 1, [0, 1])], folder / "run").run_dir)


def _losses(record: Path) -> list[float]:
    lines = map(json.loads, (record / "steps.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines]
