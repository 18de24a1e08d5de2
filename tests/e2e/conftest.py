"""The cluster, the operator and one namespace a test.

By default the tests start the dev cluster (`tools.devcluster`) where it does not run, build and push the images, and
stop what they started; PIPETRANSFORMER_KEEP_CLUSTER=1 leaves it. Any other cluster must be named on purpose:
PIPETRANSFORMER_TEST_CONTEXT (a context of the current kubeconfig), PIPETRANSFORMER_TEST_IMAGES (JSON, as
`python -m tools.devcluster images` prints) and PIPETRANSFORMER_TEST_SHARED (a folder that all nodes and the tests see).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.testkit.cluster.cluster import SYSTEM_NAMESPACE, Cluster, install
from tests.testkit.cluster.kube import Kube
from tools.devcluster import cluster as devcluster
from tools.devcluster import controlplane, gobuild, images
from tools.devcluster.layout import CONTEXT, REPOSITORY

_CRD = "pipetrainingjobs.training.pipetransformer.io"
_FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The named cluster, else the dev cluster with freshly built images."""
    context = os.environ.get("PIPETRANSFORMER_TEST_CONTEXT", CONTEXT)
    if context != CONTEXT:
        yield Cluster(
            kubectl=("kubectl", "--context", context),
            helm=(str(gobuild.helm()), "--kube-context", context),
            images=json.loads(os.environ["PIPETRANSFORMER_TEST_IMAGES"]),
            shared=Path(os.environ["PIPETRANSFORMER_TEST_SHARED"]),
            kubeconfig=Path(os.environ.get("KUBECONFIG") or Path.home() / ".kube/config"),
            is_ours=False,
        )
        return
    with devcluster.started() as layout:
        yield Cluster(
            kubectl=(*controlplane.kubectl_command(layout), "--context", CONTEXT),
            helm=(str(gobuild.helm()), "--kubeconfig", str(layout.kubeconfig), "--kube-context", CONTEXT),
            images=images.publish(layout),
            shared=layout.shared,
            kubeconfig=layout.kubeconfig,
        )


@pytest.fixture(scope="session")
def operator(cluster: Cluster) -> Iterator[Kube]:
    """The operator; yields its namespace."""
    kube = cluster.kube(SYSTEM_NAMESPACE)
    done = install(cluster)
    if done.returncode != 0:
        pytest.fail(f"helm: {done.stderr}\nsee {kube.dump(_dumps())}")
    yield kube
    subprocess.run(
        [*cluster.helm, "uninstall", "pipetransformer", "--namespace", SYSTEM_NAMESPACE, "--wait"], check=True
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let fixtures know whether the test's body failed."""
    report = yield
    if report.when == "call":
        item.stash[_FAILED] = report.failed
    return report


@pytest.fixture
def kube(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Kube]:
    """A namespace of the test's own; when the test fails, all that is in it is written down first."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_"))
    name = f"e2e-{words}"[:50].strip("-")
    system = cluster.kube("default")
    system.delete("namespace", name)
    system.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    kube = cluster.kube(name)
    yield kube
    if request.node.stash.get(_FAILED, False):
        print(f"\nwritten down in {kube.dump(_dumps())}")
        if "operator" in request.fixturenames:
            print(f"and in {cluster.kube(SYSTEM_NAMESPACE).dump(_dumps())}")
    _empty(kube)
    system.run("delete", "namespace", name, "--wait=false")
    if (folder := cluster.shared / name).exists():
        shutil.rmtree(folder)


def _empty(kube: Kube) -> None:
    """Returns once its jobs and pods are gone; the namespace itself takes five seconds more, for which nobody waits."""
    if kube.find("crd", _CRD) is not None:
        kube.delete_all("pipetrainingjobs")
    kube.delete_all("pods")


@pytest.fixture
def storage(cluster: Cluster, kube: Kube, shared: Path) -> Iterator[Path]:
    """The folder behind the claim that `examples/storage.yaml` makes: a default storage class with one volume."""
    name = f"{kube.namespace}-storage"
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    kube.delete("persistentvolume", name)  # one that a broken run left is bound to a claim that is gone
    kube.apply(
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": name, "annotations": default},
            "provisioner": "kubernetes.io/no-provisioner",
        }
    )
    kube.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "capacity": {"storage": "10Gi"},
                "accessModes": ["ReadWriteMany"],
                "storageClassName": name,
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": str(shared)},
            },
        }
    )
    yield shared
    kube.run("delete", "persistentvolume,storageclass", name, "--wait=false")


@pytest.fixture
def shared(cluster: Cluster, kube: Kube) -> Path:
    """A folder that the test and the pods of every node can write; it goes after them, with the namespace."""
    folder = cluster.shared / kube.namespace
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where tests that run what the documentation shows draw it."""
    parser.addoption("--pictures", metavar="FOLDER", type=Path, help="draw the documentation's pictures there")


@pytest.fixture
def pictures_folder(request: pytest.FixtureRequest) -> Path | None:
    """The folder of `--pictures`; None without it."""
    folder: Path | None = request.config.getoption("--pictures", None)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _dumps() -> Path:
    return REPOSITORY / "runs" / "e2e"
