"""When the kubelet is told to restart the operator, and when workers are to be sent to it."""

import pytest
from aiohttp.test_utils import TestClient, TestServer

from pipetransformer_operator.health import Health

pytestmark = pytest.mark.timeout(60)
JOBS, PODS = "/apis/training.pipetransformer.io/v1alpha1/pipetrainingjobs", "/api/v1/pods"


class World:
    def __init__(self) -> None:
        self.now, self.held = 0.0, True
        self.health = Health(["pipetrainingjobs", "pods"], lambda: self.held, patience=270, clock=lambda: self.now)


async def test_it_is_ready_once_everything_is_watched() -> None:
    world = World()
    async with TestClient(TestServer(world.health.application())) as client:
        assert (await client.get("/readyz")).status == 503
        world.health.opened(JOBS)
        assert (await client.get("/readyz")).status == 503
        world.health.opened(PODS)
        assert (await client.get("/readyz")).status == 200


async def test_a_watch_that_is_not_opened_again_fails_liveness_and_is_named() -> None:
    world = World()
    async with TestClient(TestServer(world.health.application())) as client:
        assert (await client.get("/healthz")).status == 200
        world.health.opened(JOBS)
        world.health.opened(PODS)
        world.now = 120
        world.health.opened(JOBS)
        world.now = 300
        opened = world.health.opened_times
        assert opened["pipetrainingjobs"] - opened["pods"] == pytest.approx(120)
        response = await client.get("/healthz")
        assert (response.status, await response.text()) == (503, f"watches are stuck: {PODS}")


async def test_an_operator_is_not_restarted_because_the_api_server_is_away() -> None:
    world = World()
    world.health.opened(JOBS)
    world.now, world.held = 1000, False
    assert world.health.stuck == []


async def test_a_stream_that_the_server_refuses_is_not_stuck_until_it_was_opened_once_more() -> None:
    world = World()
    world.health.opened(PODS)
    world.health.refused(PODS)
    world.now = 1000
    assert world.health.stuck == []
    world.health.opened(PODS)
    world.now = 2000
    assert world.health.stuck == [PODS]
