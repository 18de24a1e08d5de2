"""Gangs on real schedulers that know them (that of Kubernetes 1.37, and Volcano), with fake nodes and workers that only
speak."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_contract.api.requests import MERGE_PATCH, Object
from tests.testkit.operator.living_cluster import JOBS, PODS, TEAM, LivingCluster, living_cluster
from tests.testkit.operator.scale.nodes import GPU
from tests.testkit.operator.scale.run import STAGES, manifest
from tools.devcluster import gobuild, volcano
from tools.devcluster.layout import Layout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # it builds another Kubernetes and Volcano, once


@dataclass(frozen=True)
class Scheduler:
    """A scheduler that knows gangs.

    Attributes:
        value: of the chart's `gangScheduling`.
        kubernetes: the version of the cluster.
        api: group and version of its `PodGroup`.
        size: of a group, from its spec.
        start: starts it on a control plane that does not have it.
    """

    value: str
    kubernetes: str
    api: str
    size: Callable[[Object], int]
    start: Callable[[Layout], None] = lambda _: None

    @property
    def groups(self) -> str:
        return f"/apis/{self.api}/namespaces/{TEAM}/podgroups"


KUBERNETES = Scheduler(
    "PodGroup",
    gobuild.KUBERNETES_WITH_GANGS,
    "scheduling.k8s.io/v1beta1",
    lambda spec: spec["schedulingPolicy"]["gang"]["minCount"],
)
VOLCANO = Scheduler(
    "Volcano", gobuild.KUBERNETES, "scheduling.volcano.sh/v1beta1", lambda spec: spec["minMember"], volcano.start
)


@pytest.fixture(params=[KUBERNETES, VOLCANO], ids=lambda scheduler: scheduler.value)
def scheduler(request: pytest.FixtureRequest) -> Scheduler:
    found: Scheduler = request.param
    return found


@pytest.fixture
async def cluster(tmp_path: Path, scheduler: Scheduler, nodes: int) -> AsyncIterator[LivingCluster]:
    value = f'"{scheduler.value}"'
    async with living_cluster(tmp_path, STAGES, scheduler.kubernetes, scheduler.start, gangScheduling=value) as made:
        await made.jobs.nodes.create(nodes)
        made.run(PODS, scheduler.groups)
        yield made


async def sizes(cluster: LivingCluster, scheduler: Scheduler) -> dict[str, int]:
    """How many pods each group needs together."""
    groups = (await cluster.api.send("GET", scheduler.groups))["items"]
    return {group["metadata"]["name"]: scheduler.size(group["spec"]) for group in groups}


def job(name: str, **policy: Any) -> Object:
    """A job of eight workers."""
    made = manifest(name, release=True)
    made["spec"]["elasticPolicy"] |= policy
    return made


@pytest.mark.parametrize("nodes", [1])
async def test_two_jobs_on_room_for_one_never_hold_half_of_it_each(cluster: LivingCluster) -> None:
    first, second = await asyncio.gather(*(cluster.jobs.submit(TEAM, job(name)) for name in ("one", "two")))

    async def trains() -> bool:
        return bool(first.confirmed or second.confirmed)

    await cluster.until("one of them trains", trains)
    ahead, behind = ("one", "two") if first.confirmed else ("two", "one")
    assert {name: len(pods) for name, pods in (await cluster.bound()).items()} == {ahead: STAGES}
    await cluster.api.send("DELETE", f"{JOBS}/{ahead}")
    await cluster.until("the other one trains", lambda: cluster.trains(behind, STAGES))

    holders: dict[str, set[str]] = {}
    for kind, pod in cluster.news:
        if pod["kind"] != "Pod":
            continue
        held = holders.setdefault(pod["metadata"]["labels"][JOB_LABEL], set())
        if kind == "DELETED":
            held.discard(pod["metadata"]["uid"])
        elif pod["spec"].get("nodeName"):
            held.add(pod["metadata"]["uid"])
        assert min(map(len, holders.values()), default=0) == 0 or len(holders) == 1, "both hold GPUs"
    assert set(holders) == {"one", "two"}


@pytest.mark.parametrize("nodes", [2])
async def test_a_claimed_pipeline_gets_all_of_its_gpus_or_none(cluster: LivingCluster, scheduler: Scheduler) -> None:
    container = {"name": "main", "image": "x", "resources": {"limits": {GPU: "4"}}}
    other = {"metadata": {"name": "other"}, "spec": {"containers": [container]}}
    await cluster.api.send("POST", PODS, other)
    await cluster.jobs.submit(TEAM, job("wide", maxWorkers=2 * STAGES, onPack="Widen", claimFrom="Autoscaler"))
    await cluster.until("the job trains", lambda: cluster.trains("wide", STAGES))

    async def claims() -> bool:
        claimed = {name: size for name, size in (await sizes(cluster, scheduler)).items() if name.endswith("-claimed")}
        return claimed == {f"wide-{STAGES}-1-claimed": STAGES} and len(await cluster.unscheduled()) == STAGES

    await cluster.until("the scheduler looked at a claimed pipeline, and has no nodes for it", claims)
    assert {name: len(pods) for name, pods in (await cluster.bound()).items()} == {"wide": STAGES}
    assert (await sizes(cluster, scheduler))["wide-start"] == STAGES
    await cluster.api.send("DELETE", f"{PODS}/other")
    await cluster.until("the job trains with the claimed pipeline", lambda: cluster.trains("wide", 2 * STAGES))


@pytest.mark.parametrize("nodes", [1])
async def test_a_group_needs_fewer_pods_before_the_released_ones_go(
    cluster: LivingCluster, scheduler: Scheduler
) -> None:
    made = await cluster.jobs.submit(TEAM, job("packs"))

    async def trains() -> bool:
        return made.confirmed == 1

    await cluster.until("the job trains", trains)
    made.freeze(made.report().num_layers // 2)

    async def released() -> bool:
        return len((await cluster.bound())["packs"]) == STAGES // 2

    await cluster.until("half of the pods are gone", released)
    assert await sizes(cluster, scheduler) == {"packs-start": STAGES // 2}
    lowered = next(
        int(one["metadata"]["resourceVersion"])
        for _, one in cluster.news
        if one["kind"] == "PodGroup" and scheduler.size(one["spec"]) == STAGES // 2
    )
    ended = min(
        int(one["metadata"]["resourceVersion"]) for _, one in cluster.news if "deletionTimestamp" in one["metadata"]
    )
    assert lowered < ended


@pytest.mark.parametrize(("scheduler", "nodes"), [(VOLCANO, 1)], indirect=["scheduler"])
async def test_a_job_keeps_to_the_limit_of_its_queue_of_volcano(cluster: LivingCluster, scheduler: Scheduler) -> None:
    queues = f"/apis/{scheduler.api}/queues"
    queue = {"kind": "Queue", "apiVersion": scheduler.api, "metadata": {"name": TEAM}, "spec": _limit(STAGES - 1)}
    await cluster.api.send("POST", queues, queue)
    queued = job("queued")
    queued["spec"]["podTemplate"]["metadata"] = {"annotations": {"scheduling.volcano.sh/queue-name": TEAM}}
    await cluster.jobs.submit(TEAM, queued)

    async def held_back() -> bool:
        return len(await cluster.unscheduled()) == STAGES

    await cluster.until("Volcano looked at all pods, and the queue has no room", held_back)
    await cluster.api.send("PATCH", f"{queues}/{TEAM}", {"spec": _limit(STAGES)}, content_type=MERGE_PATCH)
    await cluster.until("the job trains", lambda: cluster.trains("queued", STAGES))


def _limit(gpus: int) -> Object:
    return {"weight": 1, "capability": {GPU: str(gpus)}}
