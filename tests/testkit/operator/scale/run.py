"""One run: jobs are submitted, all train, some freeze; what it took."""

import asyncio
import gc
import os
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipetransformer_contract.api import GROUP, KIND, PLURAL, VERSION
from pipetransformer_contract.api.requests import Object
from tests.testkit.cluster.api_server import ApiServer, api_server
from tools.devcluster.layout import Layout

from .cluster import (
    OperatorProcess,
    control_plane,
    install,
    make_namespaces,
    processor_seconds,
    requests,
    spent,
)
from .living import LivingJobs
from .nodes import GPU, GPUS_PER_NODE
from .workers import Job

STAGES = 8
JOBS_PER_NAMESPACE = 20
FREEZES_PER_SECOND = 2
MOST_FREEZES = 200
SUBMITTED_AT_ONCE = 16
STEADY_SECONDS = 30
PHASE_SECONDS = 600
_CALLS = re.compile(r'^pipetransformer_api_requests_total\{code="(.*)",resource="(.*)",verb="(.*)"\} (\S+)$', re.M)
#: The operator's own, by the clock; watches are opened anew now and then.
_UNCOUNTED = ("leases", "watch ")
_HELD = re.compile(r"^pipetransformer_job_gpus_held\{.*\} (\S+)$", re.M)


@dataclass(frozen=True)
class Figures:
    """What one run took. Seconds of processors by process.

    Attributes:
        seconds_pods_running: from the first job's submission until all pods run.
        seconds_all_running: until the operator has every job's first layout, committed by all of its members, in its
            status: all jobs are `Running`.
        plan_p50_seconds: of a leader that reports frozen blocks until it has the generation that follows.
        plan_p99_seconds: the same.
        rss_mb: the operator's largest resident size, 10^6 bytes.
        calls_per_job: requests of the operator to the API server from submission to running, by verb and resource.
        requests_per_job: requests of anybody to the API server from submission to running, by verb and resource.
        calls_per_freeze: from the freeze until the freed workers' pods are gone, or more pipelines train.
        lists: LIST requests for pods or jobs that the API server got from anybody during the freezes and releases.
        beats_per_second: answered heartbeats while nothing changed.
        beat_p99_seconds: of a heartbeat, with its connection.
        refused: requests of workers that were not served, by status code or error; each was sent again.
        cpu_pods: until all pods ran.
        cpu_start: until all jobs ran.
        cpu_steady: a second while nothing changed.
        cpu_freeze: from the first freeze to the last release.
    """

    jobs: int
    workers: int
    seconds_pods_running: float
    seconds_all_running: float
    plan_p50_seconds: float
    plan_p99_seconds: float
    rss_mb: float
    calls_per_job: dict[str, float]
    requests_per_job: dict[str, float]
    calls_per_freeze: dict[str, float]
    lists: int
    beats_per_second: float
    beat_p99_seconds: float
    refused: dict[str, int]
    cpu_pods: dict[str, float]
    cpu_start: dict[str, float]
    cpu_steady: dict[str, float]
    cpu_freeze: dict[str, float]

    def document(self) -> dict[str, Any]:
        """For a result file."""
        return asdict(self)


async def run_scale(jobs: int, log: Path, say: Callable[[str], None] = lambda text: None) -> Figures:
    """Runs `jobs` jobs of 8 workers from submission to release.

    Args:
        jobs: how many.
        log: the operator's.
        say: told of the progress.

    Raises:
        RuntimeError: a phase did not come to its end.
    """
    async with control_plane() as layout, api_server(layout.kubeconfig) as api:
        namespaces = [f"team-{index}" for index in range(-(-jobs // JOBS_PER_NAMESPACE))]
        await install(api)
        await make_namespaces(api, namespaces)
        async with OperatorProcess(layout, log) as operator:
            return await _Run(jobs, layout, api, operator, namespaces, say).all()


@dataclass(frozen=True)
class _Look:
    """What was used and asked until a moment."""

    seconds: dict[str, float]
    calls: Counter[str]
    requests: Counter[str]


class _Run:
    def __init__(
        self,
        jobs: int,
        layout: Layout,
        api: ApiServer,
        operator: OperatorProcess,
        namespaces: list[str],
        say: Callable[[str], None],
    ) -> None:
        self._count = jobs
        self._layout = layout
        self._api = api
        self._operator = operator
        self._namespaces = namespaces
        self._say = say
        self._frozen: dict[int, Job] = {}

    async def all(self) -> Figures:
        api, operator = self._api, self._operator
        self._living = await LivingJobs.of(operator, api, STAGES)
        await self._living.nodes.create(-(-self._count * STAGES // GPUS_PER_NODE))
        self._say(f"{self._count} jobs of {STAGES} workers: nodes are there")
        self._keeping = asyncio.create_task(self._living.nodes.run())
        try:
            looks, seconds = await self._start()
            gc.collect()
            gc.freeze()  # pauses of this process are none of the operator's
            beats = self._living.counts.beats
            await asyncio.sleep(STEADY_SECONDS)  # nothing happens: that is what is measured
            rate = (self._living.counts.beats - beats) / STEADY_SECONDS
            looks.append(await self._look())
            latencies = await self._freeze()
            await self._until_released()
            self._say("all are through with the freeze")
            looks.append(await self._look())
        finally:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        return self._figures(seconds, latencies, rate, looks)

    async def _start(self) -> tuple[list[_Look], list[float]]:
        """Submits all jobs. Returns three looks: before, when all pods run, and when all jobs do; and the seconds until
        the last two."""
        looks = [await self._look()]
        begun = time.monotonic()
        await self._submit()
        self._say(f"submitted in {time.monotonic() - begun:.1f} s")
        await self._until("pods run", self._count * STAGES, lambda: len(self._living.tasks))
        seconds = [time.monotonic() - begun]
        looks.append(await self._look())
        self._say(f"all pods running after {seconds[0]:.1f} s")
        await self._until_all("train", lambda job: job.confirmed >= 1)
        seconds.append(time.monotonic() - begun)
        looks.append(await self._look())
        await self._check_running()
        self._say(f"all jobs running after {seconds[1]:.1f} s")
        return looks, seconds

    async def _look(self) -> _Look:
        seconds = processor_seconds(self._layout, operator=self._operator.pid, clients=os.getpid())
        return _Look(seconds, await self._calls(), await requests(self._api))

    def _figures(self, seconds: list[float], latencies: list[float], rate: float, looks: list[_Look]) -> Figures:
        start, pods, ran, steady, end = looks
        return Figures(
            jobs=self._count,
            workers=self._count * STAGES,
            seconds_pods_running=seconds[0],
            seconds_all_running=seconds[1],
            plan_p50_seconds=statistics.median(latencies),
            plan_p99_seconds=statistics.quantiles(latencies, n=100, method="inclusive")[98],
            rss_mb=self._operator.peak_mb,
            calls_per_job=_each(start.calls, ran.calls, self._count),
            requests_per_job=_each(start.requests, ran.requests, self._count),
            calls_per_freeze=_each(steady.calls, end.calls, len(self._frozen)),
            lists=sum((end.requests - steady.requests)[f"LIST {kind}"] for kind in ("pods", PLURAL)),
            beats_per_second=rate,
            beat_p99_seconds=statistics.quantiles(self._living.counts.slow, n=100)[98],
            refused=dict(self._living.counts.refused),
            cpu_pods=spent(start.seconds, pods.seconds),
            cpu_start=spent(start.seconds, ran.seconds),
            cpu_steady={name: value / STEADY_SECONDS for name, value in spent(ran.seconds, steady.seconds).items()},
            cpu_freeze=spent(steady.seconds, end.seconds),
        )

    async def _submit(self) -> None:
        slots = asyncio.Semaphore(SUBMITTED_AT_ONCE)

        async def one(index: int) -> None:
            job = manifest(f"job-{index}", release=_releases(index))
            async with slots:
                await self._living.submit(self._namespaces[index // JOBS_PER_NAMESPACE], job)

        await asyncio.gather(*(one(index) for index in range(self._count)))

    async def _freeze(self) -> list[float]:
        """Freezes half of the blocks of some jobs, one job after another; seconds from report to the next layout."""
        frozen = random.Random(0).sample(range(self._count), min(self._count, MOST_FREEZES))
        by_name = {job.key.partition("/")[2]: job for job in self._living.by_uid.values()}
        self._frozen = {index: by_name[f"job-{index}"] for index in frozen}

        async def one(turn: int, job: Job) -> float:
            await asyncio.sleep(turn / FREEZES_PER_SECOND)
            assert job.generation is not None
            present, begun = job.generation.layout_generation, time.monotonic()
            job.freeze(job.report().num_layers // 2)
            async with job.changed:
                await job.changed.wait_for(
                    lambda: job.generation is not None and job.generation.layout_generation > present
                )
            return job.learned - begun

        async with asyncio.timeout(PHASE_SECONDS):
            return await asyncio.gather(*(one(turn, job) for turn, job in enumerate(self._frozen.values())))

    async def _until_released(self) -> None:
        await self._until_all("are through with the freeze", lambda job: job.confirmed >= 1 + bool(job.boundary))
        released = sum(_releases(index) for index in self._frozen) * (STAGES // 2)
        held = self._count * STAGES - released
        async with asyncio.timeout(PHASE_SECONDS):
            while await self._held() != held:  # noqa: ASYNC110 - it waits for another process
                await asyncio.sleep(2.0)

    async def _held(self) -> int:
        return int(sum(map(float, _HELD.findall(await self._operator.metrics()))))

    async def _check_running(self) -> None:
        jobs = await self._api.send("GET", f"/apis/{GROUP}/{VERSION}/{PLURAL}")
        states = [job["status"]["state"] for job in jobs["items"]]
        if states.count("Running") != self._count:
            raise RuntimeError(f"not all jobs run: {states}")

    async def _calls(self) -> Counter[str]:
        calls: Counter[str] = Counter()
        for _, resource, verb, count in _CALLS.findall(await self._operator.metrics()):
            call = f"{verb} {resource}"
            if not any(one in call for one in _UNCOUNTED):
                calls[call] += int(float(count))
        return calls

    async def _until_all(self, what: str, reached: Callable[[Job], bool]) -> None:
        await self._until(f"jobs {what}", self._count, lambda: sum(map(reached, self._living.by_uid.values())))

    async def _until(self, what: str, wanted: int, counted: Callable[[], int]) -> None:
        end = time.monotonic() + PHASE_SECONDS
        while (count := counted()) < wanted:
            for task in (self._keeping, *self._living.tasks.values()):
                if task.done() and not task.cancelled():
                    task.result()
            if time.monotonic() > end:
                used = (await self._look()).seconds
                raise RuntimeError(f"after {PHASE_SECONDS} s {count} of {wanted} {what}: {used}")
            await asyncio.sleep(0.2)


def _each(before: Counter[str], after: Counter[str], count: int) -> dict[str, float]:
    """What is new, for each of so many."""
    return {call: value / count for call, value in sorted((after - before).items())}


def _releases(index: int) -> bool:
    """Whether the job of that number gives back what packing frees; the others train more pipelines."""
    return index % 2 == 0


def manifest(name: str, *, release: bool) -> Object:
    """A job of 8 stages on 8 workers: when half of its blocks are frozen it gives 4 back, or trains two pipelines."""
    container = {"name": "trainer", "image": "trainer", "resources": {"limits": {GPU: 1}}}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {
            "model": {"name": "vit", "numLayers": 16},
            "data": {"name": "digits"},
            "training": {"steps": 1_000_000},
            "freeze": {"policy": "Explicit", "boundaries": [{"step": 2, "boundary": 8}]},
            "pipeline": {"stages": STAGES},
            "elasticPolicy": {"workers": STAGES, "maxWorkers": STAGES, "onPack": "Release" if release else "Widen"},
            "checkpoint": {"location": "/checkpoints"},
            "podTemplate": {"spec": {"containers": [container]}},
        },
    }
