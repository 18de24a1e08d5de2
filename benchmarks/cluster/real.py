"""`make bench-cluster-real`: the simulator against real kubelets, on the same jobs.

Twenty-four jobs of 1 to 8 virtual devices arrive within six minutes on a development cluster of 16 GPUs that nobody
has. Operator, trainers, scheduler and kubelets are real. The simulator gets the same arrivals and declared times. How
much slower a step is than declared, and how long a worker takes to start, are measured on other jobs before.
Under `static` and `release_starting` a queue admits a job once its GPUs are free, as the simulator does. Under `auto`
all jobs are admitted at once, so that the operator makes room for them. It needs root.
"""

import argparse
import asyncio
import random
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.release import Journal, namespace_of, operator
from benchmarks.virtual import profile
from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_contract.api.requests import MERGE_PATCH, Object, jobs_path
from pipetransformer_contract.choose import OnPack
from pipetransformer_contract.wire import Env
from tests.testkit import ROOT
from tests.testkit.cluster.api_server import ApiServer
from tests.testkit.cluster.manifests import STORAGE, digits_job
from tests.testkit.results import print_table, write_result
from tools.devcluster import cluster, images
from tools.devcluster.layout import Layout

from . import picture
from .delays import Delays, measured
from .metrics import quantile
from .policies import AUTO, RELEASE_STARTING, STATIC, Policy
from .scaling import LAYERS, LAYERS_PER_GPU, STAGES, scaling
from .simulation import simulate
from .trace import Job

NAMESPACE = "bench-cluster"
POLICIES = (STATIC, RELEASE_STARTING, AUTO)
GPUS = 16
#: Times are this often those of the file, so that two cores serve sixteen workers.
DILATE = 2.0
#: Completion times that differ by this much count as equal.
CLOSE_SECONDS = 3.0
SAMPLES_PER_GPU = 16
_WIDTH = 128
#: A device has memory for so many layers that train beyond `LAYERS_PER_GPU`: for activations.
_SLACK_LAYERS = 0.6
_ARRIVALS_SECONDS = 360.0
_PATIENCE_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one job.

    Attributes:
        completion: seconds from its arrival to its end.
        gpu_seconds: seconds times GPUs that its pods held.
        start: seconds from its admission until it trains.
        trained: seconds from then to its end; 0 for a simulated job, because only real ones are asked for it.
    """

    completion: float
    gpu_seconds: float
    start: float
    trained: float


def jobs_of(count: int, seed: int) -> list[Job]:
    """Jobs that train for 40 to 120 declared seconds. A half of those that can freeze do."""
    draws = random.Random(seed)
    arrivals = sorted(draws.uniform(0, _ARRIVALS_SECONDS * count / 24) for _ in range(count))
    sizes = [draws.choice((1, 2, 4, 4, 8)) for _ in range(count)]
    return [
        Job(number, arrival, gpus, draws.uniform(40.0, 120.0), freezes=gpus >= STAGES and draws.random() < 0.5)
        for number, (arrival, gpus) in enumerate(zip(arrivals, sizes, strict=True))
    ]


def manifest(job: Job, policy: Policy, image: str, shared: Path, *, waits: bool) -> Object:
    """The job as its user would write it; `waits` if a queue admits it later."""
    name, layers = _name(job), LAYERS if job.elastic else LAYERS_PER_GPU
    found = digits_job(name, image=image, shared=str(shared), on_pack=policy.on_pack, epochs=1)
    spec: Object = found["spec"]
    batch = SAMPLES_PER_GPU * job.gpus
    steps, points = _steps(job, policy)
    spec["model"] = {
        "name": "benchmarks.virtual:model",
        "numLayers": layers,
        "options": {"layers": layers, "width": _WIDTH, "dilate": DILATE},
    }
    spec["data"] = {"name": "benchmarks.virtual:data", "options": {"samples": batch * max(1, round(steps / 10))}}
    spec["training"] = {"steps": steps, "globalBatchSize": batch, "seed": 0}
    spec["freeze"] = {"policy": "Explicit", "boundaries": points} if points else {"policy": "None"}
    spec["pipeline"] = {"stages": STAGES if job.elastic else 1, "packing": "Measured"}
    spec["evaluation"] = {"everySteps": steps}
    most = min(GPUS, policy.most_workers(job.gpus)) if job.elastic else job.gpus
    spec["elasticPolicy"] = {"workers": job.gpus, "minWorkers": 1, "maxWorkers": most}
    spec["elasticPolicy"]["onPack"] = policy.on_pack if job.elastic and not policy.one_layout else OnPack.HOLD
    if job.elastic and not policy.one_layout:
        spec["elasticPolicy"]["releaseDownTo"] = policy.release_down_to
    spec["suspend"] = waits
    (container,) = spec["podTemplate"]["spec"]["containers"]
    container["env"] = [{"name": "PYTHONPATH", "value": STORAGE}, {"name": "OMP_NUM_THREADS", "value": "1"}]
    if job.elastic:
        container["env"].append({"name": Env.DEVICE_BYTES, "value": str(_device_bytes())})
    return found


def _device_bytes() -> int:
    """Memory for the layers that a device can train: parameters, gradients and two moments in float32."""
    layer = _WIDTH * _WIDTH + _WIDTH + 1
    return round((LAYERS_PER_GPU + _SLACK_LAYERS) * 4 * 4 * layer)


def _steps(job: Job, policy: Policy) -> tuple[int, list[Object]]:
    """Its steps, and where layers freeze."""
    if not job.elastic:
        return max(1, round(job.seconds / (DILATE * _rigid_step()))), []
    parts = policy.run_of(replace(job, seconds=job.seconds / DILATE), measured()).parts
    points, before = [], 0
    for part, following in pairwise(parts):
        if following.frozen.boundary != before:
            before = following.frozen.boundary
            points.append({"step": part.end, "boundary": before})
    return parts[-1].end, points


def _rigid_step() -> float:
    """Declared seconds of a step of a rigid job: one stage, whatever its micro-batches."""
    units = profile().units(LAYERS_PER_GPU)
    return sum(unit.forward(SAMPLES_PER_GPU) * (1 + unit.input_gradient + unit.weight_gradient) for unit in units)


class Field:
    """The real cluster while jobs run under one policy."""

    def __init__(
        self, api: ApiServer, journal: Journal, policy: Policy, image: str, shared: Path, namespace: str
    ) -> None:
        self._api, self._journal, self._policy, self._jobs = api, journal, policy, jobs_path(namespace)
        self._image, self._shared = image, shared
        self._began = time.time()
        self._arrived: dict[Job, float] = {}
        self._admitted: dict[Job, float] = {}

    async def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """What became of each job."""
        async with asyncio.TaskGroup() as tasks:
            queue = tasks.create_task(self._admit())
            for job in jobs:
                await asyncio.sleep(max(0.0, self._began + job.arrival - time.time()))
                await self._submit(job)
            for job in jobs:
                await self._journal.until(f"{_name(job)} ends", partial(self._ended, job), _PATIENCE_SECONDS)
            queue.cancel()
        failed = [_name(job) for job in jobs if self._first(job, "Failed") is not None]
        if failed:
            raise RuntimeError(f"jobs that failed: {', '.join(failed)}")
        await self._journal.until("all pods are gone or have ended", lambda: not self._holding(), _PATIENCE_SECONDS)
        return [self._outcome(job) for job in jobs]

    @property
    def _queues(self) -> bool:
        return not self._policy.grows

    async def _submit(self, job: Job) -> None:
        body = manifest(job, self._policy, self._image, self._shared, waits=self._queues)
        self._arrived[job] = time.time()
        if not self._queues:
            self._admitted[job] = self._arrived[job]
        await self._api.send("POST", self._jobs, body)

    async def _admit(self) -> None:
        """Admits jobs that wait, in the order of their arrival, while some fit."""
        while self._queues:
            job = await self._journal.until("a job fits", self._fitting, _PATIENCE_SECONDS)
            self._admitted[job] = time.time()
            admitted = {"spec": {"suspend": False}}
            await self._api.send("PATCH", f"{self._jobs}/{_name(job)}", admitted, content_type=MERGE_PATCH)

    def _fitting(self) -> Job | None:
        free = GPUS - self._taken()
        waiting = (job for job in self._arrived if job not in self._admitted)
        return next((job for job in waiting if job.gpus <= free), None)

    def _taken(self) -> int:
        """GPUs of pods that hold them, and of jobs that have not created theirs."""
        held = self._holding()
        starting = [job for job in self._admitted if self._first(job, "Running") is None and not self._ended(job)]
        return sum(held.get(_name(job), 0) for job in self._admitted if job not in starting) + sum(
            job.gpus for job in starting
        )

    def _holding(self) -> dict[str, int]:
        """Pods that hold a GPU, by job."""
        held: dict[str, int] = {}
        for name, seen in self._journal.pods.items():
            pod = seen[-1][1]
            if name not in self._journal.gone and not _has_ended(pod):
                job = pod["metadata"].get("labels", {}).get(JOB_LABEL, "")
                held[job] = held.get(job, 0) + 1
        return held

    def _first(self, job: Job, kind: str) -> float | None:
        """When the condition of that kind was first true."""
        return self._journal.first(_name(job), lambda status: _is_true(status, kind))

    def _ended(self, job: Job) -> bool:
        return self._first(job, "Complete") is not None or self._first(job, "Failed") is not None

    def _outcome(self, job: Job) -> Outcome:
        ended, trains = self._first(job, "Complete"), self._first(job, "Running")
        assert ended is not None and trains is not None
        held = sum(self._held_seconds(name) for name, seen in self._journal.pods.items() if _is_of(seen[-1][1], job))
        return Outcome(ended - self._arrived[job], held, trains - self._admitted[job], ended - trains)

    def _held_seconds(self, pod: str) -> float:
        """Seconds from when the pod got its node until it ended or was gone."""
        bound = self._journal.pod_first(pod, lambda found: "nodeName" in found["spec"])
        ended = [self._journal.pod_first(pod, _has_ended), self._journal.gone.get(pod)]
        return 0.0 if bound is None else min(when for when in ended if when is not None) - bound


def _name(job: Job) -> str:
    return f"job-{job.number:02}"


def _is_of(pod: Object, job: Job) -> bool:
    return bool(pod["metadata"].get("labels", {}).get(JOB_LABEL) == _name(job))


def _has_ended(pod: Object) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def _is_true(status: Object, kind: str) -> bool:
    return any(one["type"] == kind and one["status"] == "True" for one in status.get("conditions", ()))


def simulated(jobs: Sequence[Job], policy: Policy, delays: Delays, slowness: float) -> list[Outcome]:
    """What the simulator says of the same jobs."""
    declared = DILATE * slowness
    steps = [_steps(job, policy)[0] * _declared_step(job) for job in jobs]
    slower = [replace(job, seconds=declared * seconds) for job, seconds in zip(jobs, steps, strict=True)]
    runs = simulate(policy, slower, GPUS, delays, slowness=declared)
    return [
        Outcome(run.ended - run.job.arrival, run.gpu_seconds(), delays.start, 0.0)
        for run in runs
        if run.ended is not None
    ]


def _declared_step(job: Job) -> float:
    """Seconds of a step at the start, before they are dilated."""
    return scaling(job.gpus, 1.0).starting_seconds if job.elastic else _rigid_step()


def fitted(jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """How much slower than declared steps are, and how long a worker takes to start, by medians of a static run."""
    slowness = [
        outcome.trained / (DILATE * _steps(job, STATIC)[0] * _declared_step(job))
        for job, outcome in zip(jobs, outcomes, strict=True)
    ]
    return statistics.median(slowness), statistics.median(outcome.start for outcome in outcomes)


def errors(real: Sequence[Outcome], said: Sequence[Outcome]) -> list[float]:
    """Relative errors of the times from arrival to end; close ones have none."""
    differences = [abs(one.completion - other.completion) for one, other in zip(real, said, strict=True)]
    return [
        0.0 if difference <= CLOSE_SECONDS else difference / outcome.completion
        for difference, outcome in zip(differences, real, strict=True)
    ]


async def _measure(layout: Layout, image: str, policy: Policy, jobs: Sequence[Job], name: str) -> list[Outcome]:
    namespace = f"{NAMESPACE}-{name}".replace("_", "-")
    async with namespace_of(layout, namespace) as (api, shared):
        for package in ("__init__.py", "virtual"):
            source, target = ROOT / "benchmarks" / package, shared / "benchmarks" / package
            target.parent.mkdir(exist_ok=True)
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        journal = Journal(api, namespace)
        async with journal.watching():
            found = await Field(api, journal, policy, image, shared, namespace).run(jobs)
            for job in jobs:
                path = f"{jobs_path(namespace)}/{_name(job)}"
                await api.send("DELETE", path, {"propagationPolicy": "Background"})
            await journal.until("all pods are gone", lambda: set(journal.pods) <= set(journal.gone), _PATIENCE_SECONDS)
    return found


def main() -> int:
    """Runs the jobs for real under each policy, simulates them, and writes both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="write no result")
    arguments = parser.parse_args()
    jobs = jobs_of(arguments.jobs, arguments.seed)
    others = jobs_of(max(2, arguments.jobs // 4), arguments.seed + 1000)
    with cluster.started() as layout:
        references = images.publish(layout)
        with operator(layout, references["operator"]):
            image = references["trainer"]
            slowness, start = fitted(others, asyncio.run(_measure(layout, image, STATIC, others, "others")))
            print(f"steps take {slowness:.3f} of their declared times, and starts {start:.1f} s", file=sys.stderr)
            real = {one.name: asyncio.run(_measure(layout, image, one, jobs, one.name)) for one in POLICIES}
    delays = replace(measured(), start=start)
    said = {policy.name: simulated(jobs, policy, delays, slowness) for policy in POLICIES}
    return _write(jobs, real, said, {"slowness": slowness, "start_seconds": start}, dry=arguments.dry)


def _write(
    jobs: Sequence[Job],
    real: dict[str, list[Outcome]],
    said: dict[str, list[Outcome]],
    knobs: dict[str, float],
    *,
    dry: bool,
) -> int:
    of_jobs = {name: errors(real[name], said[name]) for name in real}
    of_gpus = {name: abs(_gpu_seconds(said[name]) / _gpu_seconds(real[name]) - 1) for name in real}
    rows = [
        [name, quantile(of_jobs[name], 0.5), quantile(of_jobs[name], 0.95), _gpu_seconds(real[name]), of_gpus[name]]
        for name in real
    ]
    print_table(f"{len(jobs)} jobs", ["policy", "job error p50", "p95", "GPU-seconds", "error"], rows)
    if dry:
        return 0
    each: dict[str, Any] = {
        name: [
            {"gpus": job.gpus, "freezes": job.freezes, "real": ours.completion, "simulated": theirs.completion}
            for job, ours, theirs in zip(jobs, real[name], said[name], strict=True)
        ]
        for name in real
    }  # fmt: skip
    figures = {
        "job_error_p95": quantile([error for found in of_jobs.values() for error in found], 0.95),
        "gpu_seconds_error": max(of_gpus.values()),
        "job_error_p95_by_policy": {name: quantile(found, 0.95) for name, found in of_jobs.items()},
        "gpu_seconds_error_by_policy": of_gpus,
        **knobs,
    }
    path = write_result("worth-cluster-real", {"cluster_real": figures, "each": each}, "make bench-cluster-real")
    picture.scatter(each, path.with_suffix(".png"))
    print(f"written to {path.relative_to(ROOT)} and {path.stem}.png")
    return 0


def _gpu_seconds(outcomes: Sequence[Outcome]) -> float:
    return sum(outcome.gpu_seconds for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
