"""A job on a queue whose nodes are cordoned: who replaces its workers, on which quota."""

import pytest

from pipetransformer_contract.api.status import ConditionStatus, State
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.fake_queue import FakeQueue
from tests.testkit.operator.queued import admitted, claimed, members, queued, releasing, requests
from tests.testkit.operator.world import World

pytestmark = pytest.mark.timeout(60)


def replaced() -> tuple[World, FakeQueue]:
    """Two pipelines of two, all of whose nodes were cordoned one after the other."""
    world, queue = queued(make_job().stages(2).workers(4))
    world.start()
    world.commit(checkpoint=0)
    for name in list(world.workers):
        world.change(name, draining=True)
        world.settle()
        world.warm_up()
        world.commit(checkpoint=0)
        world.leave()
        world.bury()
    return world, queue


def test_workers_on_a_cordoned_node_are_replaced_on_quota_of_their_own() -> None:
    world, _ = releasing()
    world.start()
    world.change("digits-w3", draining=True)
    world.settle()
    assert requests(world)[1] == ("digits-q1", 1, [4])
    world.warm_up()
    world.commit(checkpoint=0)
    world.bury()
    assert "digits-w3" not in world.workers
    assert requests(world) == [("digits-q0", 3, [0, 1, 2]), ("digits-q1", 1, [4])]


def test_nodes_cordoned_one_after_the_other_turn_no_worker_into_a_claim() -> None:
    world, queue = replaced()
    assert requests(world) == [("digits-q0", 0, []), *((f"digits-q{n}", 1, [n + 3]) for n in range(1, 5))]
    assert world.status.own_requests == world.status.quota_requests and queue.held == 4
    assert (world.shape, world.status.claimed_ids) == ((2, 2), [])
    for member in world.generation.members:
        world.end(member.name, exit_code=137)
    world.settle()
    assert not world.status.claimed_ids
    for name in [name for name, worker in world.workers.items() if not worker.alive]:
        world.kill(name)
    world.settle()
    world.warm_up()
    assert (world.shape, world.status.claimed_ids, queue.held) == ((2, 2), [], 4), "it starts again on what it has"


def test_a_drain_asks_for_its_own_quota_and_withdraws_a_waiting_claim() -> None:
    world, queue = queued(make_job().stages(2).workers(4, most=8), size=5)
    world.start()
    world.commit(checkpoint=0)
    assert requests(world)[1:] == [("digits-q1", 2, [])]
    world.wait(100)
    world.change("digits-w0", draining=True)
    world.settle()
    assert requests(world)[1:] == [("digits-q2", 1, [4])]
    assert world.status.resize is not None and world.status.resize.start_time == world.now, "it has all its time"
    queue.size = 6
    world.warm_up()
    world.commit(checkpoint=0)
    world.leave()
    world.bury()
    assert requests(world) == [("digits-q0", 3, [1, 2, 3]), ("digits-q2", 1, [4]), ("digits-q3", 2, [5, 6])]
    assert world.status.claimed_ids == [5, 6]


def test_a_drain_takes_the_quota_of_a_claim_that_warms_up() -> None:
    world, queue = queued(make_job().stages(2).workers(4, most=8), size=6)
    world.start()
    world.commit(checkpoint=0)
    assert requests(world)[1:] == [("digits-q1", 2, [4, 5])]
    world.change("digits-w0", draining=True)
    world.settle()
    world.bury()
    assert requests(world)[1:] == [("digits-q2", 1, [6])]
    assert (world.status.claimed_ids, queue.held) == ([], 5)


@pytest.mark.parametrize("with_queue", [True, False])
def test_a_claimed_worker_does_not_replace_one_of_the_starting_size(with_queue: bool) -> None:
    world, _ = queued(make_job().stages(2).workers(4, most=8))
    if not with_queue:
        world = World(make_job().stages(2).workers(4, most=8).checkpoint())
    world.start()
    assert world.status.claimed_ids == [4, 5]
    world.change("digits-w0", draining=True)
    world.settle()
    assert world.status.claimed_ids == []
    world.bury()
    world.warm_up()
    assert members(world) == {"digits-w1", "digits-w2", "digits-w3", "digits-w6"}
    world.commit(checkpoint=0)
    world.leave()
    world.bury()
    assert world.status.claimed_ids == [7, 8]
    if with_queue:
        assert sum(request.granted for request in world.status.own_requests) == 4


@pytest.mark.parametrize("with_queue", [True, False])
def test_replacements_of_a_drain_that_is_over_are_no_part_of_a_claim(with_queue: bool) -> None:
    world, _ = queued(make_job().stages(2).workers(4, most=6))
    if not with_queue:
        world = World(make_job().stages(2).workers(4, most=6).checkpoint())
    world.start()
    world.change("digits-w0", draining=True)
    world.change("digits-w1", draining=True)
    world.settle()
    assert {"digits-w6", "digits-w7"} < set(world.workers) and not world.status.claimed_ids
    world.wait(300)
    world.change("digits-w0", draining=False)
    world.change("digits-w1", draining=False)
    world.settle()
    assert world.status.resize is not None and world.status.resize.start_time == world.now, "it has all its time"
    world.bury()
    world.warm_up()
    world.commit(checkpoint=0)
    assert world.shape == (2, 3)
    assert len(world.status.claimed_ids) == 2
    if with_queue:
        assert sum(request.granted for request in world.status.own_requests) == 4


def test_a_sleeping_job_returns_only_excess_quota_of_its_starting_size() -> None:
    world, queue = queued(make_job().stages(2).workers(4))
    world.start()
    world.commit(checkpoint=0)
    world.unschedulable = True
    world.change("digits-w0", draining=True)
    world.settle()
    world.end("digits-w1", exit_code=137)
    world.settle()
    world.commit(checkpoint=0)
    world.leave()
    world.commit(checkpoint=0)
    world.change("digits-w0", draining=False)
    world.settle()
    assert sum(request.granted for request in world.status.own_requests) == 5
    world.wait(700)
    world.settle()
    world.bury()
    assert (world.shape, queue.held) == ((2, 1), 4)
    world.unschedulable = False
    world.wait(3600)
    world.settle()
    world.warm_up()
    assert (world.shape, world.status.claimed_ids) == ((2, 2), [])


@pytest.mark.parametrize("left", [0, 2])
def test_a_start_whose_replacement_quota_is_reclaimed_shrinks_or_waits(
    left: int,
) -> None:
    world, queue = replaced()
    for member in world.generation.members:
        world.end(member.name, exit_code=137)
    world.settle()
    for name in [name for name, worker in world.workers.items() if not worker.alive]:
        world.kill(name)
    world.settle()
    assert world.status.generation is None and len(world.workers) == 4
    queue.size = left
    queue.evicted |= {request.name for request in world.status.quota_requests[1 + left :]}
    world.settle()
    if not left:
        assert (admitted(world).status, admitted(world).reason) == (ConditionStatus.FALSE, "QuotaLost")
    world.bury()
    if not left:
        assert (world.state(), admitted(world).reason) == (State.PENDING, "WaitingForQuota")
        assert requests(world) == [("digits-q5", 4, [])], "all of it waits again, in its own priority"
        queue.size = 4
        world.settle()
    world.warm_up()
    assert (len(world.generation.members), world.status.claimed_ids) == (left or 4, [])
    assert queue.held == (left or 4)


def test_a_job_whose_replacement_quota_is_reclaimed_shrinks_or_waits() -> None:
    world, queue = queued(make_job().stages(2).workers(4))
    world.start()
    world.commit(checkpoint=0)
    world.change("digits-w3", draining=True)
    world.settle()
    world.warm_up()
    world.commit(checkpoint=0)
    world.leave()
    world.commit(checkpoint=0)
    world.bury()
    queue.size = 0
    queue.evicted.add("digits-q1")
    world.settle()
    assert world.shape == (2, 1)
    world.commit(checkpoint=0)
    world.leave()
    world.commit(checkpoint=0)
    world.bury()
    assert requests(world)[0][0] == "digits-q0"
    assert len(world.workers) == 2 and queue.held == 2


def test_a_claimed_worker_on_a_cordoned_node_is_replaced_by_a_claimed_one() -> None:
    world, _ = claimed()
    world.change("digits-w3", draining=True)
    world.change("digits-w0", draining=True)
    world.settle()
    assert requests(world)[2:] == [("digits-q2", 1, [4]), ("digits-q3", 1, [5])]
    assert [request.name for request in world.status.own_requests] == ["digits-q0", "digits-q2"]
    assert world.status.claimed_ids == [2, 3, 5]
