"""examples/shared-cluster: a job gives back what its frozen blocks no longer need; another, waiting, starts on it.

With `--pictures FOLDER` (`make pictures`) the run is drawn there: GPUs by job over time, and `watch`.
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from pipetransformer_client import Client
from pipetransformer_client.cli.view import LiveView
from pipetransformer_client.cli.watch import follow
from tests.testkit.cluster.cluster import Cluster
from tests.testkit.cluster.kube import Kube, Object, has_condition
from tests.testkit.cluster.manifests import idle_pod
from tools import pictures
from tools.devcluster.layout import REPOSITORY

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.usefixtures("operator")]
EXAMPLES = REPOSITORY / "examples"
FREE_GPUS = 4  #: that the fillers leave of the two nodes' sixteen
JOB_SECONDS = 900
POLL_SECONDS = 0.3


def test_a_job_that_waits_starts_because_another_gives_gpus_back(
    kube: Kube,
    cluster: Cluster,
    storage: Path,
    pictures_folder: Path | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, gpus in (("filler-a", 8), ("filler-b", 8 - FREE_GPUS)):
        kube.apply(idle_pod(name, image=cluster.images["operator"], gpus=gpus))
        kube.wait("pod", name, lambda p: p["status"].get("phase") == "Running", "Running", seconds=90)
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    for name in ("storage.yaml", "shared-cluster/first.yaml"):
        kube.apply(_example(name, cluster.images["trainer"]))
    kube.wait("pipetrainingjob", "first", has_condition("Running"), "Running", seconds=JOB_SECONDS)

    kube.apply(_example("shared-cluster/second.yaml", cluster.images["trainer"]))
    samples: list[tuple[float, Counter[str]]] = []
    with ThreadPoolExecutor() as pool:
        watching = pool.submit(_watch_while_two_stages, Client.connect(namespace=kube.namespace), "first")
        while not all(_complete(kube, job) for job in ("first", "second")):
            samples.append((time.monotonic(), _held(kube)))
            assert samples[-1][0] - samples[0][0] < JOB_SECONDS, samples[-1]
            time.sleep(POLL_SECONDS)
        watched = watching.result()

    assert max(held.total() for _, held in samples) <= FREE_GPUS
    assert samples[0][1] == {"first": 4}, "the second job did not have to wait"
    assert {"first": 2, "second": 2} in [held for _, held in samples], "no GPU went over while the first trained"
    if pictures_folder is not None:
        pictures.write(pictures_folder, "shared-cluster", lambda width: pictures.gpus_by_job(samples, FREE_GPUS, width))
        (pictures_folder / "watch.svg").write_text(watched)


def _example(name: str, image: str) -> Object:
    """A file of the examples with the trainer's image in its place, as docs/install.md sets it."""
    text = (EXAMPLES / name).read_text().replace("pipetransformer-trainer:latest", image)
    manifest: Object = yaml.safe_load(text)
    return manifest


def _complete(kube: Kube, job: str) -> bool:
    found = kube.get("pipetrainingjob", job)
    assert not has_condition("Failed")(found), found["status"]["conditions"]
    return has_condition("Complete")(found)


def _held(kube: Kube) -> Counter[str]:
    """GPUs by job: pods that have a node and have not ended."""
    pods = kube.list("pods", "training.pipetransformer.io/job")
    return Counter(
        pod["metadata"]["labels"]["training.pipetransformer.io/job"]
        for pod in pods
        if pod["spec"].get("nodeName") and pod["status"]["phase"] in ("Pending", "Running")
    )


def _watch_while_two_stages(client: Client, name: str) -> str:
    """The last that `watch` shows of the job while its pipeline has two stages."""
    picture = ""
    with LiveView(Console(width=pictures.TERMINAL_WIDTH, force_terminal=True, file=StringIO())) as view:
        for job in follow(client, name, view, timeout=JOB_SECONDS):
            if (
                job.status.generation is not None
                and job.status.generation.stages == 2
                and job.status.last_report is not None
            ):
                picture = pictures.terminal(view, f"kubectl pipetransformer watch {name}")
    assert picture, "it never had two stages"
    return picture
