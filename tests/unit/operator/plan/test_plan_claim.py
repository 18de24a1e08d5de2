"""Where workers beyond the starting size come from: what nodes have free, or whatever an attempt finds."""

from datetime import timedelta

import pytest

from pipetransformer_contract.api.status import ConditionType, Share
from pipetransformer_operator.plan import WorkerPhase
from tests.testkit.operator.builders import JobBuilder, make_job
from tests.testkit.operator.world import World

pytestmark = pytest.mark.timeout(60)


def elastic(workers: int = 1, most: int = 8) -> JobBuilder:
    return make_job().stages(1).workers(workers, most=most).checkpoint()


def trains(builder: JobBuilder, *, room: int | None = 0, free: int | None = 0) -> World:
    """A job that trains at its starting size; nodes have so much room for more."""
    world = World(builder)
    world.free, world.room = free, room
    world.start()
    return world


def test_nothing_is_claimed_where_no_accelerator_is_free() -> None:
    world = trains(elastic())
    decided = world.turn()
    assert (len(world.workers), decided.waits_for_room) == (1, True)
    assert "no node has free accelerators" in world.condition(ConditionType.RESIZING).message


def test_a_claim_takes_all_that_is_free_at_once() -> None:
    world = trains(elastic())
    world.free, world.room, world.unschedulable = 3, 3, True
    world.settle()
    assert len(world.workers) == 4
    for name in world.workers:
        world.change(name, scheduled=True, phase=WorkerPhase.RUNNING)
    world.free = world.room = 0
    world.warm_up()
    assert world.shape == (1, 4)


def test_a_claim_that_others_were_quicker_to_take_is_withdrawn_at_once() -> None:
    world = trains(elastic())
    world.free, world.room, world.unschedulable = 2, 2, True
    world.settle()
    assert len(world.workers) == 3
    world.change("digits-w1", scheduled=True, phase=WorkerPhase.RUNNING)
    world.free = world.room = 0
    world.settle()
    assert set(world.workers) == {"digits-w0", "digits-w1"}
    world.warm_up(["digits-w1"])
    assert world.shape == (1, 2)


def test_with_claim_from_autoscaler_one_more_pipeline_is_tried_whatever_is_free() -> None:
    world = trains(elastic().set("elasticPolicy.claimFrom", "Autoscaler"))
    assert len(world.workers) == 2


def test_an_operator_that_sees_no_nodes_claims_nothing_but_what_others_give_up() -> None:
    world = trains(elastic().on_pack("Auto"), free=None)
    world.room_unknown = "this operator sees no nodes"
    world.settle()
    assert len(world.workers) == 1
    said = world.condition(ConditionType.RESIZING).message
    assert "this operator sees no nodes, so the job claims no free accelerators; with" in said
    assert "claimFrom: Autoscaler" in said
    world.share = Share(workers=3, layout_generation=world.status.layout_generation)
    world.settle()
    assert len(world.workers) == 3


def test_the_starting_size_is_taken_back_whatever_is_free() -> None:
    world = trains(elastic(4))
    world.kill("digits-w3")
    world.settle()
    assert (world.shape, len(world.workers)) == ((1, 3), 3)
    world.commit()
    assert len(world.workers) == 4, "an autoscaler may add a node"


def test_what_was_given_up_is_not_taken_back_by_preemption_that_gets_only_a_part() -> None:
    world = trains(elastic(4).on_pack("Auto").stages(2))
    world.share = Share(workers=2, layout_generation=world.status.layout_generation)
    world.settle()
    world.commit(checkpoint=0)
    world.leave()
    assert len(world.workers) == 2
    world.share, world.reach = None, 1
    world.wait(timedelta(hours=2).total_seconds())
    world.settle()
    assert len(world.workers) == 2
    world.reach = 2
    world.settle()
    assert len(world.workers) == 4


def test_a_start_that_nodes_cannot_take_whole_takes_no_workers_from_others_any_longer() -> None:
    world = World(elastic(4))
    world.free = world.room = world.reach = 3
    world.unschedulable = True
    attempts = 0
    for _ in range(12 * 60):
        before = len(world.workers)
        world.wait(60)
        world.settle()
        attempts += len(world.workers) > before
    assert attempts == 1
    assert "3 of 4 workers" in world.condition(ConditionType.RUNNING).message
    world.reach = 4
    world.settle()
    assert len(world.workers) == 4


def test_a_start_without_room_tries_again_within_a_day_of_a_release() -> None:
    world = World(elastic(4))
    world.free = world.room = world.reach = 3
    world.unschedulable = True
    world.settle()
    world.wait(600)
    world.settle()
    assert not world.workers
    world.wait(5)
    world.released = world.now
    world.settle()
    assert not world.workers, "too little was released"
    attempts = 0
    for _ in range(25 * 60):
        before = len(world.workers)
        world.wait(60)
        world.settle()
        attempts += len(world.workers) > before
    assert attempts == 1


def on_nodes(nodes: str) -> World:
    """A job of one base worker and claims, each on the node of that letter."""
    world = trains(elastic(1, len(nodes)).on_pack("Auto"), room=None, free=None)
    while len(world.generation.members) < len(nodes):
        world.warm_up()
        world.commit(checkpoint=0)
    for number, node in enumerate(nodes):
        world.change(f"digits-w{number}", node=node)
    return world


def leavers(world: World, workers: int) -> set[str]:
    """Who leaves when the job is told to make do with so many workers; by number."""
    world.share = Share(workers=workers, layout_generation=world.status.layout_generation)
    world.settle()
    return {member.name.removeprefix("digits-w") for member in world.generation.leavers}


def test_of_equal_candidates_those_leave_that_leave_a_node_empty() -> None:
    assert leavers(on_nodes("aabbca"), 4) == {"4", "5"}, "one node is empty then, and the base's is not either way"
    assert leavers(on_nodes("aabbcca"), 4) == {"2", "3", "6"}


def test_the_only_worker_of_a_node_goes_before_one_of_two() -> None:
    assert leavers(on_nodes("abbcaa"), 5) == {"3"}


def test_a_node_that_others_keep_busy_is_not_emptied_by_who_leaves() -> None:
    world = on_nodes("abbc")
    world.change("digits-w3", shares_node=True)
    assert leavers(world, 2) == {"1", "2"}


def test_a_node_with_a_worker_of_the_starting_size_is_not_emptied_and_gives_the_rest() -> None:
    assert leavers(on_nodes("aabb"), 3) == {"1"}
