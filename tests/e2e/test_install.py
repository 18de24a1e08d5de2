"""As a new user: the guide from an empty cluster to a model and back, the commands around a running job, and the
operator's removal under one."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification

from pipetransformer.data.dataset import lengths_of
from pipetransformer.data.text import load_text
from tests.testkit.cluster.cluster import SYSTEM_NAMESPACE, Cluster, install, operator_pod
from tests.testkit.cluster.guide import Guide, checkout, defaults, programs
from tests.testkit.cluster.kube import Kube, Object, has_condition
from tests.testkit.cluster.manifests import digits_job
from tests.testkit.cluster.terminal import Terminal
from tests.testkit.operator.prometheus import Prometheus, queries
from tools.devcluster import gobuild
from tools.devcluster.layout import REPOSITORY

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]
JOB_SECONDS = 900  #: of a job that takes 100 s where nothing else runs
EPOCHS = 40  #: that last until the operator was removed, or the record of a running job was drawn
WORKERS = "training.pipetransformer.io/job"
CRD = "pipetrainingjobs.training.pipetransformer.io"
GUIDE = "docs/install.md"
NAMESPACE = "pipetransformer"  #: of the operator, in the guide
SCRAPED_SECONDS = 60  #: within which a figure is seen
LEAVING_SECONDS = 60  #: within which a deleted pod is gone
#: Figures that only a failure, or Kueue, makes. The guide's cluster has neither.
OF_TROUBLE = ("pipetransformer_node_failures_total", "pipetransformer_kueue_answers")


@pytest.fixture
def terminal(cluster: Cluster, kube: Kube) -> Terminal:
    return Terminal(cluster, kube.namespace)


@pytest.fixture
def empty(cluster: Cluster) -> Iterator[Kube]:
    """The cluster with nothing of ours, and the Prometheus Operator's definitions; yields the guide's namespace."""
    if not cluster.is_ours:
        pytest.skip("it removes the CRD and all jobs with it: the dev cluster's alone")
    had = _helm(cluster, "list", "--short", "--namespace", SYSTEM_NAMESPACE).strip()
    if had:
        _helm(cluster, "uninstall", "pipetransformer", "--namespace", SYSTEM_NAMESPACE, "--wait")
    kube = cluster.kube(NAMESPACE)
    kube.delete("namespace", NAMESPACE)
    kube.delete("crd", CRD)
    definitions = gobuild.prometheus_operator_crds()
    for file in definitions:
        kube.run("apply", "--server-side", "-f", str(file))
    yield kube
    if release := _helm(cluster, "list", "--short", "--namespace", NAMESPACE).strip():  # the guide was not finished
        _helm(cluster, "uninstall", release, "--namespace", NAMESPACE, "--wait")
        kube.delete("crd", CRD)
    kube.delete("namespace", NAMESPACE)
    for file in definitions:
        kube.run("delete", "-f", str(file))
    if had:
        assert install(cluster).returncode == 0


@pytest.fixture
def guide(cluster: Cluster, kube: Kube, empty: Kube, tmp_path: Path) -> Guide:
    """docs/install.md, its reader's jobs in the test's namespace."""
    kubeconfig = tmp_path / "kubeconfig"
    content = yaml.safe_load(cluster.kubeconfig.read_text())
    for context in content["contexts"]:
        context["context"]["namespace"] = kube.namespace
    kubeconfig.write_text(yaml.safe_dump(content))
    repository, _, operator_tag = cluster.images["operator"].rpartition(":")
    trainer_tag = cluster.images["trainer"].rpartition(":")[2]
    bases = defaults(REPOSITORY / "Dockerfile")
    values = {
        "REGISTRY": repository.removesuffix("/operator"),
        "TAG": f"{operator_tag}-{trainer_tag}",  # a node that has pulled it need not pull it again
        "BASE_IMAGE": bases["BASE_IMAGE"],
        "RUNTIME_IMAGE": bases["RUNTIME_IMAGE"],
    }
    environment = {"KUBECONFIG": str(kubeconfig), "PATH": programs(tmp_path / "bin", Path(cluster.kubectl[0]))}
    return Guide(GUIDE, checkout(tmp_path / "checkout"), values, environment)


@pytest.mark.timeout(1800)
async def test_the_guide_leads_from_an_empty_cluster_to_a_model_with_every_panel_filled_and_back(
    kube: Kube, guide: Guide, empty: Kube, storage: Path, tmp_path: Path
) -> None:
    guide.play("Build the images")
    assert "Phase:          Succeeded" in guide.play("Install the operator")
    guide.play("See it in Prometheus and Grafana")

    prometheus = _prometheus(empty, tmp_path)
    await prometheus.start()
    try:
        wanted = _panels(empty, kube.namespace)
        assert len(wanted) > 70
        training = asyncio.create_task(asyncio.to_thread(guide.play, "Train a model", seconds=JOB_SECONDS))
        seen: set[tuple[str, str]] = set()
        while not training.done():
            prometheus.show_pods(kube.list("pods", WORKERS))
            seen |= await prometheus.filled(wanted - seen)
            await asyncio.sleep(0.5)
        printed = await training
        with suppress(TimeoutError):
            async with asyncio.timeout(SCRAPED_SECONDS):  # the panel of finished jobs
                while wanted - seen:
                    seen |= await prometheus.filled(wanted - seen)
                    await asyncio.sleep(0.5)
        assert await prometheus.unhealthy_rules() == []
    finally:
        await prometheus.stop()
    assert f"{kube.namespace}/bert-text is complete" in printed
    assert "BertForSequenceClassification" in printed
    assert sorted(wanted - seen) == [], "panels that were empty all the time"
    assert _accuracy(tmp_path / "checkout" / "model") > 0.5

    guide.play("Upgrade and roll back")
    guide.play("Remove")
    assert kube.get("pipetrainingjob", "bert-text")["status"]["state"] == "Complete"
    guide.play("Remove everything")
    assert guide.at_its_end
    assert kube.find("crd", CRD) is None


def _prometheus(operator: Kube, folder: Path) -> Prometheus:
    """A Prometheus that does what the objects in the cluster say."""
    rules = folder / "rules.yaml"
    rules.write_text(yaml.safe_dump(operator.get("prometheusrule", "pipetransformer")["spec"]))
    pod = operator_pod(operator)
    assert operator.find("servicemonitor", "pipetransformer") is not None
    monitor = operator.get("podmonitor", "pipetransformer-workers")
    return Prometheus(folder / "prometheus", f"{pod['status']['podIP']}:8080", monitor, rules)


def _panels(operator: Kube, namespace: str) -> set[tuple[str, str]]:
    """(panel, PromQL) of the dashboards in the cluster, for the guide's job."""
    variables = {"namespace": namespace, "job": "bert-text", "__rate_interval": "15s", "__range": "5m"}
    boards = operator.list("configmaps", "grafana_dashboard=1")
    panels = {
        found for board in boards for name, text in board["data"].items() for found in queries(name, text, variables)
    }
    return {(panel, query) for panel, query in panels if not any(metric in query for metric in OF_TROUBLE)}


def _accuracy(folder: Path) -> float:
    """Share of held-out texts that transformers, with nothing of ours, classifies right by the model in a folder."""
    options = yaml.safe_load((REPOSITORY / "examples" / "bert-text.yaml").read_text())["spec"]["data"]["options"]
    test = load_text(path="", dtype=torch.float32, **options).test
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids = range(min(len(test), 256))
    inputs, targets = test.batch(ids)
    used = lengths_of(test, ids, inputs.device)
    assert used is not None
    mask = torch.arange(inputs.shape[1]) < used[:, None]
    with torch.no_grad():
        logits = model(input_ids=inputs, attention_mask=mask.long()).logits
    return float((logits.argmax(-1) == targets).float().mean())


def _submit(terminal: Terminal, cluster: Cluster, shared: Path, folder: Path, *, on_pack: str) -> None:
    file = folder / "job.yaml"
    image = cluster.images["trainer"]
    job = digits_job("digits", image=image, shared=str(shared), on_pack=on_pack, epochs=EPOCHS)
    file.write_text(yaml.safe_dump(job))
    assert "digits created" in terminal.run("submit", str(file))


def _helm(cluster: Cluster, *words: str) -> str:
    done = subprocess.run([*cluster.helm, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"helm {' '.join(words)}: {done.stderr}"
    return done.stdout


def _uids(kube: Kube) -> set[str]:
    return {pod["metadata"]["uid"] for pod in kube.list("pods", WORKERS)}


def _lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_a_job_is_watched_followed_and_drawn_while_it_trains_and_its_model_is_taken_home(
    kube: Kube, cluster: Cluster, operator: Kube, shared: Path, tmp_path: Path, terminal: Terminal
) -> None:
    _submit(terminal, cluster, shared, tmp_path, on_pack="Widen")
    watched = terminal.start("watch", "digits")
    kube.wait("pipetrainingjob", "digits", has_condition("Running"), "Running", seconds=JOB_SECONDS)
    before = _uids(kube)
    followed = terminal.start("logs", "digits", "--follow")
    page = tmp_path / "live"
    terminal.run("timeline", "digits", str(page))
    assert "not ended yet" in (page / "timeline.html").read_text()

    out, err = watched.communicate(timeout=JOB_SECONDS)
    assert watched.returncode == 0, err
    assert "digits is complete" in out and "frozen 11/12" in out
    assert _uids(kube) <= before, "a worker was replaced"
    lines, err = followed.communicate(timeout=60)
    assert followed.returncode == 0, err
    assert {line.split()[1] for line in lines.splitlines()} == {f"digits-w{number}" for number in range(4)}

    terminal.run("fetch", "digits", str(tmp_path / "model"))
    there = shared / "output" / "digits" / "model"
    files = {path.name for path in there.iterdir()}
    assert files and {path.name for path in (tmp_path / "model").iterdir()} == files
    assert all((tmp_path / "model" / name).read_bytes() == (there / name).read_bytes() for name in files)
    terminal.run("timeline", "digits", str(tmp_path / "page"))
    assert "complete: " in (tmp_path / "page" / "timeline.html").read_text()
    deadline = time.monotonic() + LEAVING_SECONDS
    while {pod["metadata"]["uid"] for pod in kube.list("pods")} - before:
        assert time.monotonic() < deadline, "a pod that read the volume is still there"
        time.sleep(0.3)


def test_removing_the_operator_leaves_a_running_job_that_trains_on_and_can_be_deleted(
    kube: Kube, cluster: Cluster, operator: Kube, shared: Path, tmp_path: Path, terminal: Terminal
) -> None:
    _submit(terminal, cluster, shared, tmp_path, on_pack="Widen")
    kube.wait("pipetrainingjob", "digits", has_condition("Running"), "Running", seconds=JOB_SECONDS)
    before = _uids(kube)
    kube.wait("poddisruptionbudget", "digits-workers", lambda _: True, "protected", seconds=60)
    try:
        release = ("pipetransformer", "--namespace", SYSTEM_NAMESPACE)
        _helm(cluster, "uninstall", *release, "--wait", "--timeout", "90s")
        assert kube.list("poddisruptionbudgets") == [], "a node can be drained, although no operator replaces workers"
        steps = shared / "output" / "digits" / "steps.jsonl"
        reached = _lines(steps)
        worker = kube.list("pods", WORKERS)[0]["metadata"]["name"]

        def trained_on(_: Object) -> bool:
            return _lines(steps) > reached + 20

        kube.wait("pod", worker, trained_on, "20 more steps without an operator", seconds=120)
        assert _uids(kube) == before
        terminal.run("delete", "digits")
        kube.wait("namespace", kube.namespace, lambda _: not _uids(kube), "no worker is left", seconds=120)
        assert kube.find("pipetrainingjob", "digits") is None
    finally:
        assert install(cluster).returncode == 0
