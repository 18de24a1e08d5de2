"""The same pods without any operator: plain Jobs of Kubernetes, on the same nodes behind the same control plane.

What they take is what this machine needs for the pods alone. Nobody listens to their workers.
"""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from pipetransformer_contract.api.requests import Object
from tests.testkit.cluster.api_server import ApiServer, api_server

from .cluster import control_plane, make_namespaces, processor_seconds, requests, spent
from .nodes import GPU, GPUS_PER_NODE, FakeNodes
from .run import JOBS_PER_NAMESPACE, PHASE_SECONDS, STAGES, SUBMITTED_AT_ONCE


@dataclass(frozen=True)
class Baseline:
    """What it took until all pods and all jobs ran.

    Attributes:
        seconds_pods_running: from the first Job's submission until all pods run.
        seconds_all_running: until the status of each Job counts all its pods as ready.
        requests_per_job: of anybody to the API server until all Jobs ran, by verb and resource.
        cpu_pods: processor seconds until all pods ran, by process; `clients` are the nodes.
        cpu_start: the same until all Jobs ran.
    """

    jobs: int
    workers: int
    seconds_pods_running: float
    seconds_all_running: float
    requests_per_job: dict[str, float]
    cpu_pods: dict[str, float]
    cpu_start: dict[str, float]

    def document(self) -> dict[str, Any]:
        """For a result file."""
        return asdict(self)


async def run_baseline(jobs: int, say: Callable[[str], None] = lambda text: None) -> Baseline:
    """Runs `jobs` Jobs of 8 pods from submission until all pods run.

    Raises:
        RuntimeError: they did not.
    """
    async with control_plane() as layout, api_server(layout.kubeconfig) as api:
        namespaces = [f"team-{index}" for index in range(-(-jobs // JOBS_PER_NAMESPACE))]
        await make_namespaces(api, namespaces)
        started: list[str] = []
        nodes = FakeNodes(api, lambda pod, token: started.append(token), lambda uid: None)
        await nodes.create(-(-jobs * STAGES // GPUS_PER_NODE))
        keeping = asyncio.create_task(nodes.run())
        used, asked = processor_seconds(layout, clients=os.getpid()), await requests(api)
        begun = time.monotonic()
        try:
            await _submit(api, jobs, namespaces)
            while len(started) < jobs * STAGES:
                if keeping.done():
                    keeping.result()
                if time.monotonic() > begun + PHASE_SECONDS:
                    raise RuntimeError(f"after {PHASE_SECONDS} s {len(started)} of {jobs * STAGES} pods run")
                await asyncio.sleep(0.1)
            pods, pods_used = time.monotonic() - begun, processor_seconds(layout, clients=os.getpid())
            while not await _all_ready(api):
                if time.monotonic() > begun + PHASE_SECONDS:
                    raise RuntimeError(f"after {PHASE_SECONDS} s not all Jobs run")
                await asyncio.sleep(0.2)
            seconds, all_used = time.monotonic() - begun, processor_seconds(layout, clients=os.getpid())
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])
        say(f"{jobs} plain Jobs: all pods running after {pods:.1f} s, all Jobs after {seconds:.1f} s")
        now = await requests(api)
        return Baseline(
            jobs=jobs,
            workers=jobs * STAGES,
            seconds_pods_running=pods,
            seconds_all_running=seconds,
            requests_per_job={call: count / jobs for call, count in sorted((now - asked).items())},
            cpu_pods=spent(used, pods_used),
            cpu_start=spent(used, all_used),
        )


async def _all_ready(api: ApiServer) -> bool:
    """Whether no Job lacks a ready pod. Lists in parts, and ends at the first Job that lacks one, because it costs."""
    async for part in api.list("/apis/batch/v1/jobs"):
        if any(job["status"].get("ready") != STAGES for job in part["items"]):
            return False
    return True


async def _submit(api: ApiServer, jobs: int, namespaces: list[str]) -> None:
    slots = asyncio.Semaphore(SUBMITTED_AT_ONCE)

    async def one(index: int) -> None:
        namespace = namespaces[index // JOBS_PER_NAMESPACE]
        async with slots:
            await api.send("POST", f"/apis/batch/v1/namespaces/{namespace}/jobs", _manifest(f"job-{index}"))

    await asyncio.gather(*(one(index) for index in range(jobs)))


def _manifest(name: str) -> Object:
    container = {"name": "trainer", "image": "trainer", "resources": {"limits": {GPU: 1}}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "parallelism": STAGES,
            "completions": STAGES,
            "template": {"spec": {"containers": [container], "restartPolicy": "Never"}},
        },
    }
