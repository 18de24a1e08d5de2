"""How many requests each change of layout costs the API server: bounded by the pods that it creates or deletes.

The bounds are those of docs/decisions/0018. Counted at the seam that all requests go through; watches, and the lists
that they begin with, are kopf's and happen once.
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import partial

import aiohttp
import pytest

from pipetransformer_contract.api.requests import MERGE_PATCH
from tests.testkit.operator.fake_kubelet import FakeKubelet
from tests.testkit.operator.jobs import packing_job
from tests.testkit.operator.namespace import Namespace, until
from tests.testkit.operator.operating import Operator

pytestmark = pytest.mark.timeout(180)
_LINE = re.compile(r'^pipetransformer_api_requests_total\{code="(.*)",resource="(.*)",verb="(.*)"\} (.*)$', re.M)


@dataclass(frozen=True)
class Budget:
    """Requests of one change; `created` and `deleted` pods. What a job has one of is created by its first. A worker
    that still asks when its pod is gone has its token reviewed once more."""

    statuses: int
    events: int
    protections: int
    created: int = 0
    deleted: int = 0
    first: bool = False

    def allows(self, calls: dict[str, int]) -> bool:
        """Whether so many requests are within it."""
        limits = {
            "update pipetrainingjobs/status": self.statuses,
            "create events": self.events,
            "patch poddisruptionbudgets": self.protections,
            "create poddisruptionbudgets": int(self.first),
            "create networkpolicies": int(self.first),
            "create configmaps": int(self.first),
            "create pods": self.created,
            "delete pods": self.deleted,
            "create tokenreviews": self.created + self.deleted,
        }
        return all(count <= limits.get(call, 0) for call, count in calls.items())


def start(workers: int) -> Budget:
    return Budget(statuses=6, events=3, protections=2, created=workers, first=True)


def widen() -> Budget:
    return Budget(statuses=3, events=3, protections=2)


def release(workers: int) -> Budget:
    return Budget(statuses=4 + workers, events=4 + workers, protections=3, deleted=workers)


def claim(workers: int) -> Budget:
    return Budget(statuses=6, events=4, protections=4, created=workers)


def replacement(workers: int) -> Budget:
    return Budget(statuses=7 + workers, events=6, protections=4, created=workers, deleted=workers)


def suspension(workers: int) -> Budget:
    return Budget(statuses=2 + workers, events=2, protections=2, deleted=workers)


def resumption(workers: int) -> Budget:
    return Budget(statuses=6, events=4, protections=4, created=workers)


class Meter:
    """Counts what the operator asked since the last look."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._before: Counter[str] = Counter()

    async def read(self) -> dict[str, int]:
        """Requests since the last look, by verb and resource."""
        async with aiohttp.ClientSession() as session, session.get(self._operator.metrics) as response:
            lines = _LINE.findall(await response.text())
        now: Counter[str] = Counter()
        for _, resource, verb, count in lines:
            if verb != "watch" and resource != "leases":  # by the clock, whatever jobs do
                now[f"{verb} {resource}"] += int(float(count))
        spent = {call: count - self._before[call] for call, count in now.items()}
        self._before = now
        return {call: count for call, count in spent.items() if count}


async def test_requests_of_a_start_and_of_a_widening_are_within_their_budgets(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    meter = Meter(operator)

    async def ready() -> bool:
        return await operator.asked("/readyz") == 200

    await until("what there was before is listed", ready)
    await meter.read()
    await namespace.apply(packing_job())
    assert await namespace.layout(1) == (4, 1)
    await namespace.told("GenerationConfirmed")
    spent = await meter.read()
    assert spent["create pods"] == spent["create tokenreviews"] == 4
    assert start(4).allows(spent), spent
    namespace.advance(15)
    assert await namespace.layout(2) == (2, 2)
    await _settled(namespace)
    spent = await meter.read()
    assert spent["update pipetrainingjobs/status"] >= 2
    assert widen().allows(spent), spent


async def test_requests_of_a_release_are_within_its_budget(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    meter = Meter(operator)
    await namespace.apply(packing_job().release())
    assert await namespace.layout(1) == (4, 1)
    await namespace.told("GenerationConfirmed")
    await meter.read()
    namespace.advance(15)

    async def released() -> bool:
        return bool((await namespace.status())["gpus"]["released"] == 2)

    await until("two workers are gone", released)
    await namespace.told("GPUsReleased")
    spent = await meter.read()
    assert spent["delete pods"] == 2
    assert release(2).allows(spent), spent


async def test_requests_of_a_claim_are_within_its_budget(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    meter = Meter(operator)
    await namespace.apply(packing_job().stages(1).workers(1, most=1).set("elasticPolicy.maxPipelines", 2))
    assert await namespace.layout(1) == (1, 1)
    await namespace.told("GenerationConfirmed")
    await meter.read()
    await namespace.patch("digits", {"elasticPolicy": {"maxWorkers": 2}})
    assert await namespace.layout(2) == (1, 2)
    await _settled(namespace)
    spent = await meter.read()
    assert spent["create pods"] == 1
    assert claim(1).allows(spent), spent


async def test_requests_of_a_worker_that_dies_and_is_replaced_are_within_their_budget(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    meter = Meter(operator)
    await namespace.apply(packing_job().stages(2).workers(4, least=2))
    assert await namespace.layout(1) == (2, 2)
    await namespace.told("GenerationConfirmed")
    pod = (await namespace.pods())["digits-w3"]
    await meter.read()
    kubelet.processes[pod["metadata"]["uid"]].kill()
    assert await namespace.layout(2) == (2, 1)
    assert await namespace.layout(3) == (2, 2)
    await _settled(namespace)
    spent = await meter.read()
    assert spent["create pods"] == 1
    assert replacement(1).allows(spent), spent


async def test_requests_of_a_worker_that_leaves_its_cordoned_node_are_within_their_budget(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet, node: str
) -> None:
    meter = Meter(operator)
    await namespace.apply(packing_job())
    assert await namespace.layout(1) == (4, 1)
    await namespace.told("GenerationConfirmed")
    await namespace.bind("digits-w1", node)
    await meter.read()
    cordon = {"spec": {"unschedulable": True}}
    await namespace.api.request("PATCH", f"/api/v1/nodes/{node}", cordon, content_type=MERGE_PATCH)
    assert await namespace.layout(2) == (4, 1)
    await until("the old worker ends", partial(_ends, namespace, "digits-w1"))  # no kubelet lets its pod go
    spent = await meter.read()
    assert spent["create pods"] == spent["delete pods"] == 1
    assert replacement(1).allows(spent), spent


async def test_requests_of_a_suspension_and_of_what_resumes_it_are_within_their_budgets(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    meter = Meter(operator)
    await namespace.apply(packing_job().stages(1).workers(2, least=2).release())
    assert await namespace.layout(1) == (1, 2)
    await namespace.told("GenerationConfirmed")
    await meter.read()
    await namespace.patch("digits", {"suspend": True})
    await namespace.state("Suspended")
    await until("all pods are gone", partial(_holds_none, namespace))
    spent = await meter.read()
    assert spent["delete pods"] == 2
    assert suspension(2).allows(spent), spent
    await namespace.patch("digits", {"suspend": False})
    assert await namespace.layout(2) == (1, 2)
    await _settled(namespace)
    spent = await meter.read()
    assert spent["create pods"] == 2
    assert resumption(2).allows(spent), spent


async def _ends(namespace: Namespace, pod: str) -> bool:
    return "deletionTimestamp" in (await namespace.pods())[pod]["metadata"]


async def _holds_none(namespace: Namespace) -> bool:
    return not (await namespace.status())["gpus"]["held"]


async def _settled(namespace: Namespace) -> None:
    """Waits until the resize is over: nothing is left to write."""

    async def over() -> bool:
        return "resize" not in await namespace.status()

    await until("the resize is over", over)
