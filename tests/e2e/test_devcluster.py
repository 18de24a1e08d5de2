"""What the other end-to-end tests take for granted of the cluster and of the images."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from tests.testkit.cluster.cluster import Cluster
from tests.testkit.cluster.kube import Kube, Object
from tests.testkit.cluster.manifests import pod
from tools.devcluster import images
from tools.devcluster.layout import CONTEXT, REPOSITORY, Layout

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


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

    # A node that has no image yet needs a minute to pull it, and a slow machine several.
    kube.wait("pod", "torch", lambda p: p["status"].get("phase") == "Succeeded", "Succeeded", seconds=480)

    uid, torch, address = json.loads(kube.run("logs", "torch"))
    assert (uid, address) == (65532, "10.96.0.1")
    assert torch.startswith("2.13")


@pytest.mark.slow
def test_a_change_of_our_code_runs_in_a_pod_within_30_seconds(kube: Kube, cluster: Cluster, tmp_path: Path) -> None:
    if CONTEXT not in cluster.kubectl:
        pytest.skip("builds for the dev cluster's own registry")
    subprocess.run(["git", "clone", "--quiet", "--shared", REPOSITORY, tmp_path / "changed"], check=True)
    images.build("trainer", tmp_path / "changed")  # what the developer had built before the change

    (tmp_path / "changed/trainer_image/pipetransformer/changed.py").write_text("print('changed', flush=True)\n")
    began = time.monotonic()
    image = images.push(Layout(), images.build("trainer", tmp_path / "changed"))
    kube.apply(pod("changed", image=image, command=["python", "-c", "import pipetransformer.changed"]))
    kube.wait("pod", "changed", lambda p: p["status"].get("phase") == "Succeeded", "Succeeded", seconds=60)
    took = time.monotonic() - began

    assert kube.run("logs", "changed") == "changed\n"
    assert took < 30


_INVENTORY = """
import json, os, shutil
import pipetransformer_operator.__main__
skipped = {"/proc", "/sys", "/dev", "/run", "/var/run"}
size = 0
for folder, folders, files in os.walk("/"):
    folders[:] = [name for name in folders if os.path.join(folder, name) not in skipped]
    size += sum(os.lstat(os.path.join(folder, name)).st_size for name in files)
bill = json.load(open("/opt/venv/sbom.cdx.json"))
names = [component["name"] for component in bill["components"]]
print(json.dumps({"size": size, "names": names, "shell": shutil.which("sh"), "user": os.getuid()}))
"""


def test_the_operators_image_is_small_and_says_what_is_in_it(kube: Kube, cluster: Cluster) -> None:
    kube.apply(pod("operator", image=cluster.images["operator"], command=["python", "-c", _INVENTORY]))
    kube.wait(
        "pod",
        "operator",
        lambda p: p["status"].get("phase") == "Succeeded",
        "Succeeded",
        seconds=60,
        never=lambda p: p["status"].get("phase") == "Failed",
    )

    found = json.loads(kube.run("logs", "operator"))
    assert found["size"] < 200e6
    assert {"kopf", "pydantic", "libc6", "python3.11-minimal"} <= set(found["names"])
    assert not {"torch", "pip"} & set(found["names"])
    assert (found["shell"], found["user"]) == (None, 65532)


@pytest.mark.parametrize("target", ["operator", "trainer"])
def test_an_image_says_what_it_is(cluster: Cluster, target: str) -> None:
    host, _, rest = cluster.images[target].partition("/")
    if not host.startswith("127.0.0.1:"):
        pytest.skip("needs the dev cluster's own registry")
    name, _, tag = rest.rpartition(":")

    def read(path: str) -> Object:
        accepted = {"Accept": "application/vnd.oci.image.manifest.v1+json"}
        request = urllib.request.Request(f"http://{host}/v2/{name}/{path}", headers=accepted)
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: Object = json.load(answer)
            return found

    labels = read(f"blobs/{read(f'manifests/{tag}')['config']['digest']}")["config"]["Labels"]
    assert labels["org.opencontainers.image.title"] == f"PipeTransformer {target}"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.version"] == "0.1.0"
    assert len(labels["org.opencontainers.image.revision"]) == (40 if (REPOSITORY / ".git").exists() else 0)
