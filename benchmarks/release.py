"""`make bench-release`: from a freeze to another owner's pod on the freed GPUs, by phase, on real kubelets.

Real trainers, one job after another. Every GPU of the two nodes is taken: by the job, by fillers, and a pod of another
owner waits for what the job will give back. One clock serves all: the trainers' record, and when a watch shows what the
operator, the scheduler and the kubelets did. The cluster is the tests' (`tools.devcluster`); it needs root.
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_contract.api.requests import Object, jobs_path
from pipetransformer_operator.kube.client.api import NotFound
from tests.testkit.cluster.api_server import ApiServer, api_server
from tests.testkit.cluster.manifests import digits_job, idle_pod
from tests.testkit.results import print_table, write_result
from tools.devcluster import cluster, gobuild, images
from tools.devcluster.layout import REPOSITORY, Layout

SYSTEM, NAMESPACE = "pipetransformer-system", "bench-release"
PHASES = ("decide", "prepare", "regroup", "confirm", "checkpoint", "delete", "schedule", "start")
#: Up to here the operator, the trainers and the kubelet of the leavers; then the scheduler and the other pod's kubelet.
USABLE = PHASES[: PHASES.index("schedule") + 1]
FREEZES = ({"step": 20, "boundary": 8}, {"step": 120, "boundary": 11})
STEPS = 240
#: GPUs that each freeze frees: 4 stages, 2, 1.
FREED = (2, 1)
JOB_SECONDS = 240


class Journal:
    """When each thing of a namespace was first seen."""

    def __init__(self, api: ApiServer, namespace: str = NAMESPACE) -> None:
        self._api, self._namespace = api, namespace
        self._changed = asyncio.Condition()
        self.jobs: dict[str, list[tuple[float, Object]]] = {}
        self.pods: dict[str, list[tuple[float, Object]]] = {}
        self.gone: dict[str, float] = {}

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Keeps the journal meanwhile."""
        async with asyncio.TaskGroup() as tasks:
            watches = []
            for path, seen in ((jobs_path(self._namespace), self.jobs), (pods_path(self._namespace), self.pods)):
                version = (await self._api.send("GET", path))["metadata"]["resourceVersion"]
                watches.append(tasks.create_task(self._watch(path, version, seen)))
            yield
            for watch in watches:
                watch.cancel()

    async def _watch(self, path: str, version: str, seen: dict[str, list[tuple[float, Object]]]) -> None:
        async for event in self._api.events(path, version):
            now, found = time.time(), event["object"]
            name = found["metadata"]["name"]
            seen.setdefault(name, []).append((now, found))
            if event["type"] == "DELETED":
                self.gone[name] = now
            async with self._changed:
                self._changed.notify_all()

    async def until(self, what: str, condition: Callable[[], Any], seconds: float = JOB_SECONDS) -> Any:
        """What the condition gives, as soon as that is true.

        Raises:
            RuntimeError: it was not, within `seconds`.
        """
        try:
            async with self._changed, asyncio.timeout(seconds):
                await self._changed.wait_for(condition)
                return condition()
        except TimeoutError:
            raise RuntimeError(f"{what}: not within {seconds:g} s") from None

    def first(self, job: str, holds: Callable[[Object], bool]) -> float | None:
        """When the job's status first was so; None: not yet."""
        return next((when for when, found in self.jobs.get(job, ()) if holds(found.get("status", {}))), None)

    def pod_first(self, pod: str, holds: Callable[[Object], bool]) -> float | None:
        """When the pod first was so; None: not yet."""
        return next((when for when, found in self.pods.get(pod, ()) if holds(found)), None)


async def _release(
    journal: Journal, api: ApiServer, job: str, index: int, image: str, run_dir: Path
) -> dict[str, float]:
    """One release: seconds of each phase."""
    other, old = f"{job}-other-{index}", index + 1
    await api.send("POST", _pods(), idle_pod(other, image=image, gpus=FREED[index]))
    pods = {name for name, seen in journal.pods.items() if _is_worker(seen[-1][1], job) and name not in journal.gone}
    await journal.until("another pod on the freed GPUs", lambda: journal.pod_first(other, _runs))
    await journal.until("released", lambda: len([name for name in pods if name in journal.gone]) >= FREED[index])
    gone = max(journal.gone[name] for name in pods if name in journal.gone)
    bound = journal.pod_first(other, lambda pod: "nodeName" in pod["spec"])
    boundary = FREEZES[index]["boundary"]
    frozen = _event(run_dir, "Frozen", lambda event: event["frozenLayers"] == boundary)
    committed = _event(run_dir, "GenerationCommitted", lambda event: event["generation"] == old + 1)
    times = [
        frozen["time"],
        journal.first(job, lambda status: status.get("frozen", "").startswith(f"{boundary}/")),
        journal.first(job, lambda status: status.get("layoutGeneration", 0) > old),
        committed["time"] - committed["phases"]["first step"],
        journal.first(job, lambda status: status.get("generation", {}).get("confirmedGeneration", 0) > old),
        journal.first(
            job, lambda status: status.get("layoutGeneration", 0) > old and len(status["workerIds"]) < len(pods)
        ),
        min(gone, bound or gone),  # the scheduler takes a pod whose containers have ended for gone
        bound,
        journal.pod_first(other, _runs),
    ]
    seen = [when for when in times if when is not None]
    if len(seen) != len(times):
        raise RuntimeError(f"{job}, release {index + 1}: not all phases were seen: {times}")
    return {name: after - before for name, before, after in zip(PHASES, seen, seen[1:], strict=False)}


async def run_releases(api: ApiServer, references: dict[str, str], shared: Path, jobs: int) -> list[dict[str, float]]:
    """Runs the jobs one after another; the phases of each release."""
    releases: list[dict[str, float]] = []
    journal = Journal(api)
    async with journal.watching():
        for name, gpus in (("filler-a", 8), ("filler-b", 4)):  # with a job's 4 all 16 GPUs of the two nodes are held
            await api.send("POST", _pods(), idle_pod(name, image=references["operator"], gpus=gpus))
            await journal.until(f"{name} runs", partial(journal.pod_first, name, _runs))
        for number in range(jobs):
            job = f"job-{number}"
            await api.send("POST", _jobs(), _manifest(job, references["trainer"], shared))
            await journal.until(f"{job} trains", partial(journal.first, job, _trains))
            for index in range(len(FREEZES)):
                run_dir = shared / "output" / job
                releases.append(await _release(journal, api, job, index, references["operator"], run_dir))
                print(f"{job}: {json.dumps({name: round(s, 2) for name, s in releases[-1].items()})}", file=sys.stderr)
            await _clear(journal, api, job)
    return releases


async def _clear(journal: Journal, api: ApiServer, job: str) -> None:
    """Removes the job and those that waited for its GPUs, and waits until they are gone."""
    await api.send("DELETE", f"{_jobs()}/{job}", {"propagationPolicy": "Background"})
    pods = [name for name, seen in journal.pods.items() if name.startswith(f"{job}-") and name not in journal.gone]
    for name in pods:
        with contextlib.suppress(NotFound):
            await api.send("DELETE", f"{_pods()}/{name}", {"gracePeriodSeconds": 0})
    await journal.until(f"{job} is gone", lambda: all(name in journal.gone for name in pods))


def _manifest(job: str, image: str, shared: Path) -> Object:
    manifest = digits_job(job, image=image, shared=str(shared), on_pack="Release", epochs=1)
    manifest["spec"]["training"] = {"steps": STEPS, "globalBatchSize": 64, "seed": 0}
    manifest["spec"]["freeze"]["boundaries"] = list(FREEZES)
    return manifest


def _event(run_dir: Path, kind: str, holds: Callable[[Object], bool]) -> Object:
    lines = (json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines())
    return next(line for line in lines if line["kind"] == kind and holds(line))


def _is_worker(pod: Object, job: str) -> bool:
    return bool(pod["metadata"].get("labels", {}).get(JOB_LABEL) == job)


def _runs(pod: Object) -> bool:
    return bool(pod["status"].get("phase") == "Running")


def _trains(status: Object) -> bool:
    return bool(status.get("generation", {}).get("confirmedGeneration"))


def _jobs() -> str:
    return jobs_path(NAMESPACE)


def pods_path(namespace: str) -> str:
    """Path of the pods of a namespace."""
    return f"/api/v1/namespaces/{namespace}/pods"


def _pods() -> str:
    return pods_path(NAMESPACE)


@contextlib.contextmanager
def operator(layout: Layout, image: str) -> Iterator[None]:
    """The operator, installed from its chart."""
    repository, _, tag = image.rpartition(":")
    helm = [str(gobuild.helm()), "--kubeconfig", str(layout.kubeconfig), "--namespace", SYSTEM]
    install = ["upgrade", "--install", "pipetransformer", str(REPOSITORY / "charts/pipetransformer")]
    values = ["--set", f"image.repository={repository}", "--set-string", f"image.tag={tag}"]
    subprocess.run([*helm, *install, "--create-namespace", "--wait", "--timeout", "90s", *values], check=True)
    try:
        yield
    finally:
        subprocess.run([*helm, "uninstall", "pipetransformer", "--wait"], check=True)


@contextlib.asynccontextmanager
async def namespace_of(layout: Layout, name: str) -> AsyncIterator[tuple[ApiServer, Path]]:
    """A namespace and a shared folder of one benchmark's own."""
    shared = layout.shared / name
    shutil.rmtree(shared, ignore_errors=True)
    shared.mkdir()
    shared.chmod(0o1777)
    async with api_server(layout.kubeconfig) as api:
        await api.send("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        try:
            await _served(api, f"/api/v1/namespaces/{name}/serviceaccounts/default")
            yield api, shared
        finally:
            await api.send("DELETE", f"/api/v1/namespaces/{name}")
            shutil.rmtree(shared)


async def _in_namespace(layout: Layout, references: dict[str, str], jobs: int) -> list[dict[str, float]]:
    async with namespace_of(layout, NAMESPACE) as (api, shared):
        return await run_releases(api, references, shared, jobs)


async def _served(api: ApiServer, path: str) -> None:
    async with asyncio.timeout(JOB_SECONDS):
        while True:
            with contextlib.suppress(NotFound):
                await api.send("GET", path)
                return
            await asyncio.sleep(0.1)


def main() -> int:
    """Runs all releases and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10, help="two releases each")
    parser.add_argument("--dry", action="store_true", help="write no result")
    arguments = parser.parse_args()
    with cluster.started() as layout:
        references = images.publish(layout)
        with operator(layout, references["operator"]):
            releases = asyncio.run(_in_namespace(layout, references, arguments.jobs))
    phases = {name: [release[name] for release in releases] for name in PHASES}
    usable = [sum(release[name] for name in USABLE) for release in releases]
    running = [sum(release.values()) for release in releases]
    rows = {**phases, "usable by another pod": usable, "another pod runs": running}
    figures = {name: {"p50": _percentile(values, 50), "p95": _percentile(values, 95)} for name, values in rows.items()}
    print_table(
        f"{len(releases)} releases, seconds", ["phase", "p50", "p95"], [[n, *f.values()] for n, f in figures.items()]
    )
    if not arguments.dry:
        headline = {
            "releases": len(releases),
            "p50_seconds": _percentile(usable, 50),
            "p95_seconds": _percentile(usable, 95),
        }
        print(write_result("release", {**headline, "phases": figures, "each": releases}))
    return 0


def _percentile(values: list[float], percent: int) -> float:
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


if __name__ == "__main__":
    sys.exit(main())
