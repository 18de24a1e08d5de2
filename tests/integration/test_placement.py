"""Placement by labels of nodes, on a real scheduler with fake nodes and workers that only speak."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pipetransformer_contract.api.labels import PLACEMENT_GROUP_LABEL
from pipetransformer_contract.api.requests import MERGE_PATCH, Object
from tests.testkit.operator.living_cluster import PODS, TEAM, LivingCluster, living_cluster
from tests.testkit.operator.scale.nodes import GPU, GPUS_PER_NODE
from tests.testkit.operator.scale.run import STAGES, manifest

RACK = "example.com/rack"
HALF = STAGES // 2


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LivingCluster]:
    async with living_cluster(tmp_path, STAGES) as made:
        made.run()
        yield made


async def build(cluster: LivingCluster, nodes: list[tuple[str, int]]) -> None:
    """Makes nodes, each in a rack and with so many free GPUs."""
    await cluster.jobs.nodes.create(len(nodes))
    for index, (rack, free) in enumerate(nodes):
        await label(cluster, index, rack)
        resources = {"limits": {GPU: str(GPUS_PER_NODE - free)}}
        other = {"containers": [{"name": "main", "image": "x", "resources": resources}], "nodeName": f"fake-{index}"}
        await cluster.api.send("POST", PODS, {"metadata": {"name": f"other-{index}"}, "spec": other})


async def label(cluster: LivingCluster, index: int, rack: str) -> None:
    labels = {"metadata": {"labels": {RACK: rack}}}
    await cluster.api.send("PATCH", f"/api/v1/nodes/fake-{index}", labels, content_type=MERGE_PATCH)


def job(workers: int, **placement: bool) -> Object:
    """A job with a wish about racks: required, or not."""
    made = manifest("wide", release=True)
    made["spec"]["elasticPolicy"] |= {"workers": workers, "maxWorkers": workers}
    made["spec"]["placement"] = {
        wish: {"topologyKey": RACK, "required": required} for wish, required in placement.items()
    }
    return made


async def racks_of(cluster: LivingCluster) -> dict[str, set[str]]:
    """The racks of each group of workers that have nodes."""
    nodes = (await cluster.api.send("GET", "/api/v1/nodes"))["items"]
    rack = {node["metadata"]["name"]: node["metadata"]["labels"][RACK] for node in nodes}
    found: dict[str, set[str]] = {}
    for pod in await cluster.pods():
        group = pod["metadata"].get("labels", {}).get(PLACEMENT_GROUP_LABEL)
        if group is not None and "nodeName" in pod["spec"]:
            found.setdefault(group, set()).add(rack[pod["spec"]["nodeName"]])
    return found


async def test_each_pipeline_has_a_rack_and_no_two_have_the_same(cluster: LivingCluster) -> None:
    await build(cluster, [(rack, HALF) for rack in "abcabc"])
    await cluster.jobs.submit(TEAM, job(2 * STAGES, within=True, spread=True))
    await cluster.until("the job trains", lambda: cluster.trains("wide", 2 * STAGES))
    racks = list((await racks_of(cluster)).values())
    assert list(map(len, racks)) == [1, 1]
    assert racks[0] != racks[1]


async def test_a_pipeline_gets_the_only_rack_with_room_for_all_of_it(cluster: LivingCluster) -> None:
    await build(cluster, [("a", STAGES - 1), ("b", HALF), *((rack, STAGES - 1) for rack in "cdef"), ("b", HALF)])
    await cluster.jobs.submit(TEAM, job(STAGES, within=True))
    await cluster.until("the job trains", lambda: cluster.trains("wide", STAGES))
    assert await racks_of(cluster) == {f"{STAGES}-0": {"b"}}


async def test_a_second_pipeline_waits_for_a_rack_of_its_own_only_if_that_is_required(cluster: LivingCluster) -> None:
    await build(cluster, [("a", HALF)] * 4)
    await cluster.jobs.submit(TEAM, job(2 * STAGES, spread=True))

    async def one_waits() -> bool:
        return len(await cluster.unscheduled()) == STAGES

    await cluster.until("the scheduler has no rack for the second pipeline", one_waits)
    assert await racks_of(cluster) == {f"{STAGES}-0": {"a"}}
    taken = {pod["spec"].get("nodeName") for pod in await cluster.pods() if PLACEMENT_GROUP_LABEL in _labels(pod)}
    for index in range(4):
        if f"fake-{index}" not in taken:
            await label(cluster, index, "b")
    await cluster.until("the job trains", lambda: cluster.trains("wide", 2 * STAGES))
    assert await racks_of(cluster) == {f"{STAGES}-0": {"a"}, f"{STAGES}-1": {"b"}}


async def test_a_wish_that_is_not_required_makes_no_worker_wait(cluster: LivingCluster) -> None:
    await build(cluster, [(rack, HALF) for rack in "abcd"])
    await cluster.jobs.submit(TEAM, job(2 * STAGES, within=False, spread=False))
    await cluster.until("the job trains", lambda: cluster.trains("wide", 2 * STAGES))


def _labels(pod: Object) -> dict[str, Any]:
    labels: dict[str, Any] = pod["metadata"].get("labels", {})
    return labels
