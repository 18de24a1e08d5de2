"""The cluster that end-to-end tests run on, with the operator in it."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.testkit.cluster.kube import Kube, Object
from tests.testkit.cluster.manifests import GPU, idle_pod
from tools.devcluster.layout import REPOSITORY

SYSTEM_NAMESPACE = "pipetransformer-system"


@dataclass(frozen=True)
class Cluster:
    """Where the tests run. `images` maps the Dockerfile's targets to references that its nodes can pull."""

    kubectl: tuple[str, ...]
    helm: tuple[str, ...]
    images: dict[str, str]
    shared: Path
    kubeconfig: Path
    is_ours: bool = True  #: the dev cluster, which may be emptied
    chart: Path = REPOSITORY / "charts/pipetransformer"

    def kube(self, namespace: str) -> Kube:
        return Kube(self.kubectl, namespace)


def install(
    cluster: Cluster, *, chart: Path | None = None, image: str | None = None, values: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Installs the operator by Helm, by default today's with the chart's own values, or upgrades to it; returns once it
    is ready.

    Args:
        values: that differ from the chart's, each as `--set` takes it.
    """
    repository, _, tag = (image or cluster.images["operator"]).rpartition(":")
    command = [
        *cluster.helm, "upgrade", "--install", "pipetransformer", str(chart or cluster.chart),
        "--namespace", SYSTEM_NAMESPACE, "--create-namespace", "--wait", "--timeout", "90s",
        "--set", f"image.repository={repository}", "--set-string", f"image.tag={tag}",
        *(word for value in values for word in ("--set", value)),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False)


def operator_pod(kube: Kube) -> Object:
    """The pod of the operator in a namespace, once it alone is there and leads."""

    def settled(deployment: Object) -> bool:
        status = deployment.get("status", {})
        seen = status.get("observedGeneration") == deployment["metadata"]["generation"]
        counts = [status.get(count) for count in ("replicas", "updatedReplicas", "readyReplicas")]
        return bool(seen and counts == [1, 1, 1])

    kube.wait("deployment", "pipetransformer", settled, "one operator, which leads", seconds=90)
    (pod,) = (
        pod
        for pod in kube.list("pods", "app.kubernetes.io/component=operator")
        if "deletionTimestamp" not in pod["metadata"]
    )
    return pod


@contextmanager
def reinstalled(cluster: Cluster, *values: str) -> Iterator[None]:
    """The operator with other values of the chart meanwhile."""
    try:
        done = install(cluster, values=values)
        assert done.returncode == 0, done.stderr
        yield
    finally:
        done = install(cluster)
        assert done.returncode == 0, done.stderr


def fill(kube: Kube, cluster: Cluster, *, leave: int = 0) -> list[str]:
    """Takes all accelerators that are free but for the last `leave`; the names of the pods that hold them."""
    held: Counter[str] = Counter()
    for pod in json.loads(kube.run("get", "pods", "--all-namespaces", "-o", "json"))["items"]:
        if pod["status"]["phase"] in ("Pending", "Running") and (node := pod["spec"].get("nodeName")):
            held[node] += sum(int(_limits(container).get(GPU, 0)) for container in pod["spec"]["containers"])
    pods = []
    for node in kube.list("nodes"):
        name = node["metadata"]["name"]
        free = int(node["status"]["allocatable"].get(GPU, 0)) - held[name]
        kept = min(leave, free)
        leave -= kept
        if free > kept:
            pods.append(idle_pod(f"filler-{name}", image=cluster.images["operator"], gpus=free - kept))
            kube.apply(pods[-1] | {"spec": pods[-1]["spec"] | {"nodeName": name}})
    names: list[str] = [pod["metadata"]["name"] for pod in pods]
    for name in names:
        kube.wait("pod", name, lambda pod: pod["status"].get("phase") == "Running", "Running", seconds=90)
    return names


def _limits(container: Object) -> Object:
    limits: Object = container.get("resources", {}).get("limits", {})
    return limits
