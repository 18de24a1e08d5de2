"""What the other end-to-end tests take for granted of the cluster and of the images."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import Cluster
from tests.e2e.kube import Kube
from tests.e2e.manifests import pod

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def test_two_nodes_count_eight_gpus_each(kube: Kube) -> None:
    gpus = {n["metadata"]["name"]: n["status"]["allocatable"].get("nvidia.com/gpu") for n in kube.list("nodes")}

    assert len(gpus) >= 2
    assert set(gpus.values()) == {"8"}


def test_the_trainers_image_runs_torch_without_root_and_finds_services_by_name(kube: Kube, cluster: Cluster) -> None:
    program = (
        "import json, os, socket, torch; "
        "print(json.dumps([os.getuid(), torch.__version__, socket.gethostbyname('kubernetes.default.svc')]))"
    )
    kube.apply(pod("torch", image=cluster.images["trainer"], command=["python", "-c", program]))

    kube.wait("pod", "torch", lambda p: p["status"].get("phase") == "Succeeded", "Succeeded", seconds=180)

    uid, torch, address = json.loads(kube.run("logs", "torch"))
    assert (uid, address) == (65532, "10.96.0.1")
    assert torch.startswith("2.13")


def test_the_operators_image_has_no_torch(kube: Kube, cluster: Cluster) -> None:
    program = "import importlib.util; assert importlib.util.find_spec('torch') is None; import pipetransformer_operator"
    kube.apply(pod("operator", image=cluster.images["operator"], command=["python", "-c", program]))

    kube.wait(
        "pod",
        "operator",
        lambda p: p["status"].get("phase") == "Succeeded",
        "Succeeded",
        seconds=60,
        never=lambda p: p["status"].get("phase") == "Failed",
    )
