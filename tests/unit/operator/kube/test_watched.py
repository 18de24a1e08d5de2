"""What an operator that starts knows of the cluster, and from when on it decides."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable

import pytest

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.controller.ports import JobKey, Refused, Unavailable
from pipetransformer_operator.health import Health
from pipetransformer_operator.kube.client.api import NO_QUERY, Api, Query
from pipetransformer_operator.kube.client.lease import Lease
from pipetransformer_operator.kube.events import ClusterListener
from pipetransformer_operator.kube.node_health.signals import Signals
from pipetransformer_operator.kube.watched import AWAITED, WatchedCluster
from pipetransformer_operator.kube.watches.other_pods import QUERY
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


@pytest.mark.parametrize(("refused", "path"), [("nodes", "/api/v1/nodes"), ("others", "/api/v1/pods")])
async def test_no_job_waits_for_what_the_cluster_refuses_to_list(refused: str, path: str) -> None:
    api = Empty()
    cluster = Starting(api)
    for what in LISTS:
        if what != refused:
            await cluster.list(what)
    assert not cluster.has_job
    assert cluster.node_watch is not None and cluster.others is not None
    api.refused = (path,)
    watch = cluster.node_watch if refused == "nodes" else cluster.others
    watching = asyncio.create_task(watch.run())
    while not cluster.has_job:  # noqa: ASYNC110 - each turn of the loop counts
        await asyncio.sleep(0)
    watching.cancel()
    assert cluster.woken.times == len(LISTS)
    assert cluster.others.listed is (refused != "others"), "room stays unknown"


class Opening(Empty):
    """An API server that opens watches, and whose first list of other owners' pods does not come in time."""

    failures = 0

    async def get(self, path: str, query: Query = NO_QUERY, *, timeout: float = 0, accept: str = "") -> Object:
        if query.get("labelSelector") == QUERY["labelSelector"] and not self.failures:
            self.failures += 1
            raise Unavailable("timeout")
        return await super().get(path, query)

    async def watch(
        self,
        path: str,
        version: str,
        seconds: int,
        query: Query = NO_QUERY,
        *,
        bookmarks: bool = True,
        bookmarked: bool = False,
        opened: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[Object]:
        opened()
        await asyncio.Event().wait()
        yield {}


async def test_an_operator_is_not_ready_before_it_has_listed_other_owners_pods() -> None:
    """The watch of workers' pods has the same path, and is open before."""
    api = Opening()
    cluster = Starting(api)
    health = Health(["pods"], Lease(api, "default", "a", seconds=15), refusable=AWAITED, patience=270)
    cluster.events.add(health)
    assert cluster.node_watch is not None and cluster.others is not None
    watches = [asyncio.create_task(one.run()) for one in (cluster.others, cluster.pods, cluster.node_watch)]
    while set(health.opened_times) != {"pods", "nodes"}:  # noqa: ASYNC110 - each turn of the loop counts
        await asyncio.sleep(0)
    assert (api.failures, cluster.has_job, health.ready) == (1, False, False)
    while not health.ready:  # noqa: ASYNC110 - each turn of the loop counts
        await asyncio.sleep(0)
    assert cluster.has_job and set(health.opened_times) == {"pods", "nodes", "pods of other owners"}
    for one in watches:
        one.cancel()


async def test_an_operator_of_single_namespaces_waits_only_for_the_pods_there() -> None:
    cluster = Starting(Empty(), "default")
    assert not cluster.has_job
    await cluster.pods.list("default", "/api/v1/namespaces/default/pods")
    assert cluster.has_job
