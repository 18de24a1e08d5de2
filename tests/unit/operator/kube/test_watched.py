"""What an operator that starts knows of the cluster, and from when on it decides."""

import asyncio
import itertools

import pytest

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.controller.ports import JobKey, Refused
from pipetransformer_operator.kube.client.api import NO_QUERY, Api, Query
from pipetransformer_operator.kube.events import ClusterListener
from pipetransformer_operator.kube.watched import WatchedCluster
from pipetransformer_operator.kube.watches.signals import Signals
from tests.testkit.operator.builders import make_job

pytestmark = pytest.mark.timeout(60)
KEY = JobKey("default", "digits")
LISTS = ("pods", "others", "nodes")


class Empty(Api):
    """An API server that has nothing, and refuses some lists."""

    def __init__(self, *refused: str) -> None:
        self.refused = refused

    async def get(self, path: str, query: Query = NO_QUERY, *, timeout: float = 0, accept: str = "") -> Object:
        if path in self.refused:
            raise Refused(f"GET {path}: 403")
        return {"metadata": {"resourceVersion": "9"}, "items": []}


class Woken(ClusterListener):
    """How often all jobs were woken, because a list had come."""

    times = 0

    def on_pods_listed(self, namespace: str) -> None:
        self.times += 1

    def on_cluster_listed(self) -> None:
        self.times += 1


class Starting(WatchedCluster):
    """What an operator knows that has seen one job so far."""

    def __init__(self, api: Api, *namespaces: str) -> None:
        super().__init__(api, namespaces, Signals())
        self.woken = Woken()
        self.events.add(self.woken)
        manifest = make_job().manifest()
        known = {"namespace": "default", "uid": "job-uid", "resourceVersion": "5", "generation": 1}
        self.jobs.note({**manifest, "metadata": {**manifest["metadata"], **known}})

    @property
    def has_job(self) -> bool:
        return self.store.read(KEY) is not None

    async def list(self, what: str) -> None:
        """The first answer to a list comes."""
        assert self.others is not None and self.node_watch is not None
        match what:
            case "pods":
                await self.pods.list("", "/api/v1/pods")
            case "others":
                await self.others.relist()
            case "nodes":
                await self.node_watch.relist()


@pytest.mark.parametrize("order", list(itertools.permutations(LISTS)), ids="-".join)
async def test_no_job_exists_before_its_pods_the_nodes_and_other_pods_are_known(order: tuple[str, ...]) -> None:
    cluster = Starting(Empty())
    for what in order:
        assert not cluster.has_job
        await cluster.list(what)
    assert cluster.has_job and cluster.woken.times == len(LISTS)
    for what in order:
        await cluster.list(what)
    assert cluster.woken.times == len(LISTS), "only the first list is news"


async def test_where_nodes_may_not_be_seen_no_job_waits_for_them() -> None:
    cluster = Starting(Empty("/api/v1/nodes"))
    for what in ("pods", "others"):
        await cluster.list(what)
    assert not cluster.has_job
    assert cluster.node_watch is not None
    watching = asyncio.create_task(cluster.node_watch.run())
    while not cluster.has_job:  # noqa: ASYNC110 - each turn of the loop counts
        await asyncio.sleep(0)
    watching.cancel()
    assert cluster.woken.times == len(LISTS)


async def test_an_operator_of_single_namespaces_waits_only_for_the_pods_there() -> None:
    cluster = Starting(Empty(), "default")
    assert not cluster.has_job
    await cluster.pods.list("default", "/api/v1/namespaces/default/pods")
    assert cluster.has_job
