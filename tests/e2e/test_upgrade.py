"""Another release in the middle of a run: one version's trainer under the other's operator, both ways."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.testkit.cluster.cluster import SYSTEM_NAMESPACE, Cluster, install, operator_pod
from tests.testkit.cluster.kube import Kube, Object, has_condition
from tests.testkit.cluster.manifests import TRAIN_SAMPLES, digits_job
from tests.testkit.trainer.ledger_checker import check
from tools.devcluster import images
from tools.devcluster.layout import Layout

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1500)]
#: Stands for the release before this one while none has been tagged: the last commit before a change of what operator,
#: workers and pods agree on. Its workers' pods lack the label by which the budget leaves out claimed workers.
PREVIOUS = "e3ad4cafb7bbc512530bc61966a3eab7c0b25f4b"
JOB_SECONDS = 600
EPOCHS = 2000  #: more than pass until all has been seen
STEPS_BETWEEN = 150  #: after which the boundary moves, to and fro: a job changes its size whenever one looks
_failed = has_condition("Failed")


@dataclass(frozen=True)
class Release:
    """Chart and images of one version."""

    chart: Path
    images: dict[str, str]


@pytest.fixture
def previous(cluster: Cluster, tmp_path: Path) -> Iterator[Release]:
    """The release before; afterwards this one is installed again."""
    if not cluster.is_ours:
        pytest.skip("its images are built for the dev cluster")
    folder = tmp_path / "previous"
    yield Release(folder / "charts" / "pipetransformer", images.publish_revision(Layout(), PREVIOUS, folder))
    assert install(cluster).returncode == 0


def test_jobs_change_their_size_under_an_operator_of_another_release_after_an_upgrade_and_after_a_rollback(
    kube: Kube, cluster: Cluster, operator: Kube, previous: Release, shared: Path
) -> None:
    done = install(cluster, chart=previous.chart, image=previous.images["operator"])
    assert done.returncode == 0, done.stderr
    kube.apply(_job("older", previous.images["trainer"], shared))
    _wait_for_resize(kube, "older", after=1)

    assert install(cluster).returncode == 0
    _wait_for_resize(kube, "older", after=_generation(kube, "older"))
    kube.apply(_job("newer", cluster.images["trainer"], shared))
    _wait_for_resize(kube, "newer", after=1)

    rollback = ["rollback", "pipetransformer", "--namespace", SYSTEM_NAMESPACE, "--wait", "--timeout", "90s"]
    subprocess.run([*cluster.helm, *rollback], check=True)
    pod = operator_pod(operator)
    assert pod["spec"]["containers"][0]["image"] == previous.images["operator"]
    before = {job: _generation(kube, job) for job in ("older", "newer")}
    for job, generation in before.items():
        _wait_for_resize(kube, job, after=generation)

    for job in before:
        assert kube.get("pipetrainingjob", job)["status"]["nextWorkerId"] == 2, "a worker was replaced"
        pods = kube.list("pods", f"training.pipetransformer.io/job={job}")
        assert [c["restartCount"] for p in pods for c in p["status"]["containerStatuses"]] == [0, 0]
        run_dir = shared / "output" / job
        epoch = json.loads((run_dir / "steps.jsonl").read_text().splitlines()[-1])["epoch"]
        assert epoch > 0
        findings = check(run_dir, TRAIN_SAMPLES, epoch, goes_on=True)
        assert findings.clean, findings


def _job(name: str, image: str, shared: Path) -> Object:
    """Two workers: one pipeline of two stages, and two of one while all blocks but the last are frozen."""
    job = digits_job(name, image=image, shared=str(shared), on_pack="Widen", epochs=EPOCHS)
    spec = job["spec"]
    steps = range(STEPS_BETWEEN, EPOCHS * (TRAIN_SAMPLES // 64), STEPS_BETWEEN)
    spec["freeze"]["boundaries"] = [
        {"step": step, "boundary": 0 if index % 2 else 11} for index, step in enumerate(steps)
    ]
    spec["pipeline"]["stages"] = 2
    spec["elasticPolicy"] |= {"workers": 2, "maxWorkers": 2}
    spec["evaluation"] = {"everyEpochs": EPOCHS}
    return job


def _generation(kube: Kube, job: str) -> int:
    return int(kube.get("pipetrainingjob", job)["status"]["layoutGeneration"])


def _wait_for_resize(kube: Kube, job: str, *, after: int) -> None:
    """Returns once a layout that was published after that generation trains."""

    def confirmed(found: Object) -> bool:
        return bool(found.get("status", {}).get("generation", {}).get("confirmedGeneration", 0) > after)

    kube.wait(
        "pipetrainingjob", job, confirmed, f"a generation after {after} trains", seconds=JOB_SECONDS,
        never=lambda found: _failed(found) or has_condition("Complete")(found),
    )  # fmt: skip
