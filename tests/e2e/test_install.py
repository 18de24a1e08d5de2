"""As a new user: the chart's own test, a job by the command line, an upgrade in the middle, the model at home, and the
operator's removal under a running job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import SYSTEM_NAMESPACE, Cluster, install
from tests.e2e.kube import Kube, Object, has_condition
from tests.e2e.manifests import digits_job

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
JOB_SECONDS = 480
EPOCHS = 40  #: that last until the operator was upgraded, rolled back or removed
WORKERS = "training.pipetransformer.io/job"


class Terminal:
    """The command `pipetransformer` in the test's namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._environment = os.environ | {"KUBECONFIG": str(cluster.kubeconfig)}
        self._namespace = namespace

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "pipetransformer_client", *words, "-n", self._namespace]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self._environment, stdout=pipe, stderr=pipe, text=True)

    def run_plugin(self, kubectl: str, *words: str) -> str:
        """The same as kubectl's plugin."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        command = [kubectl, "pipetransformer", *words, "-n", self._namespace]
        return subprocess.run(
            command, env=self._environment | {"PATH": path}, capture_output=True, text=True, check=True
        ).stdout

    def run(self, *words: str) -> str:
        process = self.start(*words)
        out, err = process.communicate(timeout=JOB_SECONDS)
        assert process.returncode == 0, f"{' '.join(words)}: {err}"
        return out


@pytest.fixture
def terminal(cluster: Cluster, kube: Kube) -> Terminal:
    return Terminal(cluster, kube.namespace)


def _submit(terminal: Terminal, cluster: Cluster, shared: Path, folder: Path, *, on_pack: str) -> None:
    file = folder / "job.yaml"
    image = cluster.images["trainer"]
    job = digits_job("digits", image=image, shared=str(shared), on_pack=on_pack, epochs=EPOCHS)
    file.write_text(yaml.safe_dump(job))
    assert "digits created" in terminal.run("submit", str(file))


def _helm(cluster: Cluster, *words: str) -> str:
    command = [*cluster.helm, *words, "--namespace", SYSTEM_NAMESPACE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"helm {' '.join(words)}: {done.stderr}"
    return done.stdout


def _uids(kube: Kube) -> set[str]:
    return {pod["metadata"]["uid"] for pod in kube.list("pods", WORKERS)}


def test_a_new_user_watches_a_job_through_an_upgrade_and_a_rollback_and_takes_its_model_home(
    kube: Kube, cluster: Cluster, operator: Kube, shared: Path, tmp_path: Path, terminal: Terminal
) -> None:
    assert "Phase:          Succeeded" in _helm(cluster, "test", "pipetransformer")
    _submit(terminal, cluster, shared, tmp_path, on_pack="Widen")
    watched = terminal.start("watch", "digits")
    kube.wait("pipetrainingjob", "digits", has_condition("Running"), "Running", seconds=JOB_SECONDS)
    before = _uids(kube)

    _helm(cluster, "upgrade", "pipetransformer", str(cluster.chart), "--reuse-values", "--set", "logLevel=debug",
          "--wait", "--timeout", "90s")  # fmt: skip
    _helm(cluster, "rollback", "pipetransformer", "--wait", "--timeout", "90s")
    assert "digits" in terminal.run_plugin(cluster.kubectl[0], "list")
    followed = terminal.start("logs", "digits", "--follow")
    page = tmp_path / "live"
    terminal.run("timeline", "digits", str(page))

    out, err = watched.communicate(timeout=JOB_SECONDS)
    assert watched.returncode == 0, err
    assert "digits is complete" in out and "frozen 11/12" in out
    assert _uids(kube) <= before, "a worker was replaced"
    lines, err = followed.communicate(timeout=60)
    assert followed.returncode == 0, err
    assert {line.split()[1] for line in lines.splitlines()} == {f"digits-w{number}" for number in range(4)}
    assert (page / "timeline.html").exists()

    terminal.run("fetch", "digits", str(tmp_path / "model"))
    there = shared / "output" / "digits" / "model"
    files = {path.name for path in there.iterdir()}
    assert files and {path.name for path in (tmp_path / "model").iterdir()} == files
    assert all((tmp_path / "model" / name).read_bytes() == (there / name).read_bytes() for name in files)
    terminal.run("timeline", "digits", str(tmp_path / "page"))
    assert "complete: " in (tmp_path / "page" / "timeline.html").read_text()
    assert {pod["metadata"]["uid"] for pod in kube.list("pods")} <= before, (
        "the pod that read the volume is still there"
    )


def test_removing_the_operator_leaves_a_running_job_that_trains_on_and_can_be_deleted(
    kube: Kube, cluster: Cluster, operator: Kube, shared: Path, tmp_path: Path, terminal: Terminal
) -> None:
    _submit(terminal, cluster, shared, tmp_path, on_pack="Widen")
    kube.wait("pipetrainingjob", "digits", has_condition("Running"), "Running", seconds=JOB_SECONDS)
    before = _uids(kube)
    try:
        _helm(cluster, "uninstall", "pipetransformer", "--wait", "--timeout", "90s")
        steps = shared / "output" / "digits" / "steps.jsonl"
        reached = len(steps.read_text().splitlines())
        worker = kube.list("pods", WORKERS)[0]["metadata"]["name"]

        def trained_on(_: Object) -> bool:
            return len(steps.read_text().splitlines()) > reached + 20

        kube.wait("pod", worker, trained_on, "20 more steps without an operator", seconds=120)
        assert _uids(kube) == before
        terminal.run("delete", "digits")
        kube.wait("namespace", kube.namespace, lambda _: not _uids(kube), "no worker is left", seconds=120)
        assert kube.find("pipetrainingjob", "digits") is None
    finally:
        assert install(cluster).returncode == 0
