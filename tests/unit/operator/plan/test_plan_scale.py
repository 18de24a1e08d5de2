"""What large jobs cost: all share one event loop, so a turn grows as the workers do, and each has to fit into etcd."""

import json
import sys
from collections.abc import Callable
from types import FrameType

import pytest

from pipetransformer_contract.api.job import MAX_WORKERS
from pipetransformer_contract.api.status import QuotaRequest
from pipetransformer_contract.messages import Member
from pipetransformer_operator.plan import plan
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.world import World

pytestmark = pytest.mark.timeout(180)


def calls(world: World) -> int:
    """How many functions a turn calls, built in ones included."""
    spec, observed, count = world.spec, world.observed(), 0

    def note(_: FrameType, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        plan(spec, observed, world.now)
    finally:
        sys.setprofile(None)
    return count


def half(world: World) -> list[str]:
    return list(world.workers)[: len(world.workers) // 2]


def given_back(world: World) -> None:
    world.commit(boundary=8)
    world.commit(checkpoint=8)
    world.leave()


def leaving(world: World) -> None:
    world.commit(boundary=8)
    for member in world.generation.leavers:
        world.end(member.name, exit_code=0)


def silent(world: World) -> None:
    world.commit(boundary=8)
    world.silent.update(world.workers)
    world.wait(60)


def deaf(world: World) -> None:
    world.commit(boundary=8)
    world.wait(60)


def cordoned(world: World) -> None:
    for name in half(world):
        world.change(name, draining=True)


def replaced(world: World) -> None:
    cordoned(world)
    world.settle()
    world.warm |= {worker.uid for worker in world.workers.values()}


def lost(world: World) -> None:
    for name in half(world):
        world.end(name, exit_code=1)


@pytest.mark.parametrize("happens", [given_back, leaving, silent, deaf, cordoned, replaced, lost])
def test_a_turn_costs_as_much_more_as_the_job_is_larger(happens: Callable[[World], None]) -> None:
    costs = []
    for workers in (32, 256):
        world = World(make_job().stages(4).workers(workers).release())
        world.start()
        happens(world)
        costs.append(calls(world))
    assert costs[1] < 10 * costs[0]


def test_the_status_of_the_largest_job_fits_into_etcd_with_long_names_too() -> None:
    world = World(make_job().stages(2).workers(2))
    world.start()
    ids = list(range(MAX_WORKERS))
    members = [
        Member(name=f"{key:0>63}", uid=f"{key:0>36}", address=f"[{key:0>39}]:29500", node=f"{key:0>63}") for key in ids
    ]
    layout = {"stages": 1, "pipelines": MAX_WORKERS, "members": members, "leader": members[0].name}
    lists = ("worker_ids", "leaving_ids", "releasing_ids", "claimed_ids")
    status = world.status.model_copy(
        update={
            "generation": world.generation.model_copy(update=layout),
            "quota_requests": [QuotaRequest(name="q", queue="q", workers=MAX_WORKERS, worker_ids=ids)],
            **dict.fromkeys(lists, ids),
        }
    )
    size = len(json.dumps(status.to_wire(), separators=(",", ":")))
    assert 1.0e6 < size < 1.25e6, "of 1.5 MiB: the rest is for the spec, and for long words"
