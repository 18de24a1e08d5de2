"""`python -m tests.soak --faults N [--seed S]`: random faults over several jobs; see `draw` for the kinds.

A control plane of its own (API server, controllers, scheduler), the operator as a process, and real trainers as
processes on nodes that this program plays. In the end every job has to be complete, every ledger exact, every
accelerator accounted for, and nothing left behind. Prints the seed, every fault with what proves that it struck, and a
table; exits 1 if anything is wrong.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from pipetransformer_contract.api import GROUP, PLURAL, VERSION
from pipetransformer_contract.api.requests import APPLY_PATCH
from pipetransformer_operator.controller.ports import Conflict
from pipetransformer_operator.kube.client.api import Api, NotFound
from tests.testkit.operator.crd import CRD
from tests.testkit.operator.operating import SYSTEM, Operator, Wire
from tests.testkit.results import print_table, write_result
from tools.devcluster import cluster
from tools.devcluster.layout import Layout

from .draw import SHARE, Kind, draw_faults
from .nodes import Nodes
from .patient import PatientApi
from .slot import Hit, Slot, World
from .watch import Watch

NAMESPACE = "soak"
SLOTS = 4
NODES = 8
ACCELERATORS = 4
READY_SECONDS = 60
LEADS_SECONDS = 0.25
LEFT_SECONDS = 180


class Breaker:
    """Breaks the operator, or its way to the API server, one at a time.

    Attributes:
        blind: when the operator saw nothing or could not write, in monotonic seconds; some of it more than once.
        problems: what all slots found.
    """

    def __init__(self, operator: Operator, wire: Wire) -> None:
        self._operator = operator
        self._wire = wire
        self._lock = asyncio.Lock()
        self.blind: list[tuple[float, float]] = []
        self.problems: list[str] = []

    async def kill(self, seconds: float, moment: Callable[[], Awaitable[None]]) -> str:
        """Kills the operator when the moment has come, and starts it again after so long."""
        async with self._lock:
            await moment()
            began = time.monotonic()
            assert self._operator.running, f"the operator ended by itself, see {self._operator.log}"
            await self._operator.kill()
            code = await self._operator.exit_code()
            await asyncio.sleep(seconds)
            await self._operator.start()
            await self._ready()
            self.blind.append((began, time.monotonic()))
        return f"the operator ended with {code} and was away for {self.blind[-1][1] - began:.1f} s"

    async def cut(self, seconds: float, moment: Callable[[], Awaitable[None]]) -> str:
        """Cuts the operator off the API server for so long when the moment has come."""
        async with self._lock:
            await moment()
            began = time.monotonic()
            broken = await self._wire.cut()
            await asyncio.sleep(seconds)
            await self._wire.mend()
            await self._ready()
            self.blind.append((began, time.monotonic()))
        assert broken, "nothing was connected"
        return f"{broken} connections broke, none was possible for {seconds:.1f} s"

    async def watch(self) -> None:
        """Notes for ever when the operator did not lead: on a busy machine it may renew its Lease too late."""
        led, leads = time.monotonic(), True
        while True:
            before, leads = leads, False
            with contextlib.suppress(OSError, aiohttp.ClientError):
                leads = bool(await self._operator.figure("pipetransformer_leader"))
            if leads:
                if not before:
                    self.blind.append((led, time.monotonic()))
                led = time.monotonic()
            await asyncio.sleep(LEADS_SECONDS)

    async def _ready(self) -> None:
        """Until it leads, can write, and has come back to the API server: it is ready all along a short cut."""
        async with asyncio.timeout(READY_SECONDS):
            while True:
                with contextlib.suppress(OSError, StopIteration):
                    if (
                        self._wire.connected
                        and await self._operator.figure("pipetransformer_leader")
                        and await self._operator.asked("/readyz") == 200
                    ):
                        return
                await asyncio.sleep(0.1)


async def soak(kubeconfig: Path, folder: Path, seed: int, count: int) -> tuple[dict[str, Any], list[str]]:
    """Runs it; returns its figures, and what was wrong."""
    os.environ["KUBECONFIG"] = str(kubeconfig)
    connection = await Api.connect()
    api = PatientApi(connection)
    await _prepare(api)
    path = f"/apis/{GROUP}/{VERSION}/namespaces/{NAMESPACE}/{PLURAL}"
    jobs, pods = Watch(kubeconfig, path), Watch(kubeconfig, f"/api/v1/namespaces/{NAMESPACE}/pods")
    nodes = Nodes(api, pods, NAMESPACE, folder / "pods", ACCELERATORS)
    wire = Wire(kubeconfig, folder)
    await wire.mend()
    operator = Operator(wire.kubeconfig, folder / "operator.log", namespace="")
    await operator.start()
    breaker = Breaker(operator, wire)
    for _ in range(NODES):
        await nodes.add()
    world = World(
        api,
        jobs,
        pods,
        nodes,
        NAMESPACE,
        folder,
        breaker.kill,
        breaker.cut,
        breaker.blind,
        path,
        breaker.problems,
    )
    faults = draw_faults(seed, count)
    slots = [Slot(world, seed, number, faults[number::SLOTS]) for number in range(min(SLOTS, count))]
    began = time.monotonic()
    try:
        async with asyncio.TaskGroup() as world_goes_on:
            lives = [world_goes_on.create_task(life) for life in (jobs.run(), pods.run(), nodes.run(), breaker.watch())]
            async with asyncio.TaskGroup() as group:
                for slot in slots:
                    group.create_task(slot.run())
            await pods.until("the control plane has cleared all pods away", lambda: not pods.objects, LEFT_SECONDS)
            for life in lives:
                life.cancel()
    finally:
        await nodes.stop()
        await operator.kill()
        await wire.cut()
        await _clear(api, path)
        await connection.close()
    hits = [hit for slot in slots for hit in slot.hits]
    figures = _figures(hits, sum(len(slot.jobs) for slot in slots), time.monotonic() - began)
    figures["accelerator_seconds"] = _accounted(world)
    return figures, [*breaker.problems, *nodes.errors, *_too_few(hits, count)]


async def _prepare(api: PatientApi) -> None:
    definition = yaml.safe_load(CRD.read_text())
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{definition['metadata']['name']}"
    await api.request("PATCH", path, definition, content_type=APPLY_PATCH)
    for name in (SYSTEM, NAMESPACE):
        with contextlib.suppress(Conflict):
            await api.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    async with asyncio.timeout(READY_SECONDS):
        for needed in (
            f"/apis/{GROUP}/{VERSION}/{PLURAL}",
            f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default",
        ):
            while True:
                with contextlib.suppress(NotFound):
                    await api.get(needed)
                    break
                await asyncio.sleep(0.1)


async def _clear(api: PatientApi, path: str) -> None:
    with contextlib.suppress(NotFound):
        await api.request("DELETE", path, {})
        await api.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods", {"gracePeriodSeconds": 0})


def _too_few(hits: Iterable[Hit], count: int) -> list[str]:
    """Where what struck is less than what was to strike."""
    hits = list(hits)
    problems = [
        f"{kind.value}: struck {struck} times, {count // SHARE} were wanted"
        for kind in Kind
        if (struck := sum(hit.fault.kind is kind for hit in hits)) < count // SHARE
    ]
    resizing = sum(bool(hit.phase) for hit in hits)
    if 3 * resizing < count:
        problems.append(f"{resizing} of {len(hits)} faults struck during a resize, a third was wanted")
    return problems


def _figures(hits: list[Hit], jobs: int, seconds: float) -> dict[str, Any]:
    """What struck, in which phase of a resize, and how long jobs took to train again."""
    kinds = {}
    for kind in Kind:
        mine = [hit for hit in hits if hit.fault.kind is kind]
        times = [hit.seconds for hit in mine]
        kinds[kind.value] = {
            "struck": len(mine),
            "in_a_resize": sum(bool(hit.phase) for hit in mine),
            "median_seconds": round(statistics.median(times), 1) if times else None,
            "longest_seconds": round(max(times), 1) if times else None,
        }
    return {
        "faults": len(hits),
        "jobs": jobs,
        "seconds": round(seconds),
        "in_a_resize": Counter(hit.phase for hit in hits if hit.phase),
        "kinds": kinds,
    }


def _accounted(world: World) -> dict[str, Any]:
    """Accelerator seconds of all jobs by their statuses and by their pods, and how far one job's are apart at most."""
    accounts = world.accounts
    apart = [max(abs(a.said_saved - a.saved), abs(a.said_held - a.held)) for a in accounts]
    return {
        "saved": round(sum(a.said_saved for a in accounts), 1),
        "saved_by_pods": round(sum(a.saved for a in accounts), 1),
        "held": round(sum(a.said_held for a in accounts), 1),
        "held_by_pods": round(sum(a.held for a in accounts), 1),
        "most_apart": round(max(apart, default=0.0), 1),
        "most_allowed": round(max((a.allowed(world.blind) for a in accounts), default=0.0), 1),
    }


def _show(figures: Mapping[str, Any]) -> None:
    columns = ["fault", "struck", "in a resize", "median s", "longest s"]
    title = f"{figures['faults']} faults over {figures['jobs']} jobs in {figures['seconds']} s"
    print_table(title, columns, [[kind, *row.values()] for kind, row in figures["kinds"].items()])
    print(", ".join(f"{count} in {phase}" for phase, count in figures["in_a_resize"].items()))
    print(
        "accelerator seconds:", ", ".join(f"{what} {value}" for what, value in figures["accelerator_seconds"].items())
    )


def main() -> int:
    """Runs a soak on a control plane of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/soak.json")
    options = parser.parse_args()
    print(f"SEED={options.seed}", flush=True)
    logging.basicConfig(level=logging.WARNING)
    port = int(os.environ.get("PIPETRANSFORMER_TEST_PORT", "17443")) + 220  # beyond integration's and the benchmark's
    layout = Layout(name=f"soak-{port}", port=port)
    folder = Path(tempfile.mkdtemp(prefix="pipetransformer-soak-"))
    with cluster.held(layout):
        cluster.down(layout)  # what a soak left behind that was killed
        cluster.up_control_plane(layout)
        try:
            figures, problems = asyncio.run(soak(layout.kubeconfig, folder, options.seed, options.faults))
        finally:
            cluster.down(layout)
            print(f"SEED={options.seed}")
    _show(figures)
    if options.record:
        command = f"make soak FAULTS={options.faults} SEED={options.seed}"
        print(write_result("soak", {**figures, "problems": problems}, command))
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problems" + (f", see {folder}" if problems else ""))
    if not problems:
        shutil.rmtree(folder)
    return 1 if problems else 0
