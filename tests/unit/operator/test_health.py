"""When the kubelet restarts the operator, and when it sends workers to it."""

import pytest
from aiohttp.test_utils import TestClient, TestServer

from pipetransformer_operator.health import Health

pytestmark = pytest.mark.timeout(60)
JOBS, PODS = "/apis/training.pipetransformer.io/v1alpha1/pipetrainingjobs", "/api/v1/pods"


class World:
    def __init__(self) -> None:
        self.now, self.held = 0.0, True
        self.health = Health(["pipetrainingjobs", "pods"], self, patience=270, clock=lambda: self.now)


async def test_it_is_ready_once_everything_is_watched() -> None:
    world = World()
    async with TestClient(TestServer(world.health.application())) as client:
        assert (await client.get("/readyz")).status == 503
        world.health.on_watch_opened(JOBS)
        assert (await client.get("/readyz")).status == 503
        world.health.on_watch_opened(PODS)
        assert (await client.get("/readyz")).status == 200


async def test_what_the_server_may_refuse_delays_readiness_until_it_answers() -> None:
    health = Health(["pods"], World(), refusable=["/api/v1/nodes"], patience=270)
    health.on_watch_opened(PODS)
    assert not health.ready
    health.on_watch_refused("/api/v1/nodes")
    assert health.ready
    health.on_watch_opened("/api/v1/nodes")
    assert health.ready


async def test_a_watch_that_is_not_reopened_fails_liveness_and_is_named() -> None:
    world = World()
    async with TestClient(TestServer(world.health.application())) as client:
        assert (await client.get("/healthz")).status == 200
        world.health.on_watch_opened(JOBS)
        world.health.on_watch_opened(PODS)
        world.now = 120
        world.health.on_watch_opened(JOBS)
        world.now = 300
        opened = world.health.opened_times
        assert opened["pipetrainingjobs"] - opened["pods"] == pytest.approx(120)
        response = await client.get("/healthz")
        assert (response.status, await response.text()) == (503, f"watches are stuck: {PODS}")


async def test_an_outage_of_the_api_server_does_not_restart_the_operator() -> None:
    world = World()
    world.health.on_watch_opened(JOBS)
    world.now, world.held = 1000, False
    assert world.health.stuck == []


async def test_a_watch_that_the_server_refuses_is_not_stuck_until_it_is_reopened() -> None:
    world = World()
    world.health.on_watch_opened(PODS)
    world.health.on_watch_refused(PODS)
    world.now = 1000
    assert world.health.stuck == []
    world.health.on_watch_opened(PODS)
    world.now = 2000
    assert world.health.stuck == [PODS]


async def test_of_a_deleted_namespace_no_watch_is_stale_but_a_right_that_is_gone_shows() -> None:
    world = World()
    kept, deleted = (f"/api/v1/namespaces/{name}/pods" for name in ("kept", "deleted"))
    for path in (JOBS, kept, deleted):
        world.health.on_watch_opened(path)

    def opened() -> float:
        """Seconds from the opening of the jobs' watch to that of the pods' watches."""
        times = world.health.opened_times
        return times["pods"] - times["pipetrainingjobs"]

    world.health.on_watch_refused(deleted)
    world.now = 1000
    world.health.on_watch_opened(kept)
    assert opened() == pytest.approx(1000), "opened now"
    world.health.on_watch_refused(kept)
    assert opened() == 0
