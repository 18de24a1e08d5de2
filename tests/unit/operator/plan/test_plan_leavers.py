"""Workers that a generation left out: they wait, and keep what they hold until a checkpoint is durable."""

from datetime import timedelta

import pytest

from pipetransformer_contract.api.status import ConditionType, Share
from pipetransformer_contract.messages import ResizeReason
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.world import World

pytestmark = pytest.mark.timeout(60)


def releasing() -> World:
    return World(make_job().stages(4).workers(4).release())


def giving_way() -> World:
    """Four pipelines of two that became two for other jobs; nothing is durable yet."""
    world = World(make_job().stages(2).workers(2, most=8).checkpoint())
    world.start()
    while world.shape != (2, 4):
        world.warm_up()
        world.commit()
    world.share = Share(workers=4, layout_generation=world.generation.layout_generation, for_others=True)
    world.settle()
    world.part()
    world.commit()
    return world


def test_as_many_leavers_take_the_places_of_lost_members_as_were_lost() -> None:
    world = giving_way()
    assert (world.shape, len(world.status.leaving_ids)) == ((2, 2), 4)
    world.end(world.generation.members[-1].name, exit_code=1)
    world.settle()
    assert (world.shape, len(world.status.leaving_ids)) == ((2, 2), 3)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_hold_keeps_the_leavers_as_spares(checkpoint: bool) -> None:
    job = make_job().stages(4).workers(4).on_pack("Hold")
    world = World(job.checkpoint() if checkpoint else job)
    world.start()
    pods = dict(world.workers)
    world.commit(boundary=8)
    assert world.shape == (2, 1)
    world.part()
    world.commit()
    assert world.condition(ConditionType.RESIZING).reason == ("Releasing" if checkpoint else "Settled")
    world.commit(checkpoint=8 if checkpoint else None)
    world.wait(5000)
    world.settle()
    assert world.workers == pods
    assert (world.shape, world.status.leaving_ids, world.status.gpus.released) == ((2, 1), [], 0)
    assert world.condition(ConditionType.RESIZING).reason == "Settled"
    world.end("digits-w0", exit_code=1)
    world.settle()
    assert [member.name for member in world.generation.members] == ["digits-w1", "digits-w2"]
    assert set(world.workers) == {"digits-w1", "digits-w2", "digits-w3"}, "nobody asked for another spare"


def test_a_held_worker_is_a_spare_once_it_waits_and_one_that_ends_as_older_trainers_do_is_let_go() -> None:
    world = World(make_job().stages(4).workers(4).on_pack("Hold"))
    world.start()
    world.commit(boundary=8)
    world.commit()
    assert len(world.workers) == 4
    world.commit(boundary=2)
    assert world.shape == (2, 1), "the leavers may be about to end"
    for name in ("digits-w2", "digits-w3"):
        world.end(name, exit_code=0, message='{"outcome": "Left"}')
    world.settle()
    assert world.status.failures == 0
    assert world.status.is_true(ConditionType.RESIZING)
    assert sorted(world.workers) == ["digits-w0", "digits-w1", "digits-w4", "digits-w5"]


def test_a_spare_that_goes_before_the_operator_looks_is_replaced_under_a_new_name() -> None:
    world = World(make_job().stages(2).workers(4))
    world.start()
    world.end("digits-w0", exit_code=1)
    world.settle()
    world.commit()
    assert (world.shape, world.status.leaving_ids) == ((2, 1), [])
    assert sorted(world.workers) == ["digits-w1", "digits-w2", "digits-w3", "digits-w4"], "w3 is a spare, w4 is new"
    world.kill("digits-w3")
    world.settle()
    assert sorted(world.workers) == ["digits-w1", "digits-w2", "digits-w4", "digits-w5"]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_who_is_left_over_by_a_failure_waits_for_the_replacement_and_is_not_replaced_itself(checkpoint: bool) -> None:
    job = make_job().stages(2).workers(4, least=2)
    world = World(job.checkpoint() if checkpoint else job)
    world.start()
    world.end("digits-w3", exit_code=1)
    world.settle()
    world.part()
    world.commit(checkpoint=0 if checkpoint else None)
    assert world.shape == (2, 1)
    world.bury()
    assert sorted(world.workers) == ["digits-w0", "digits-w1", "digits-w2", "digits-w4"]
    world.warm_up()
    world.commit()
    assert world.shape == (2, 2)
    assert {member.name for member in world.generation.members} == set(world.workers)
    assert world.status.gpus.released == 0


def test_who_is_left_over_by_a_failure_is_given_back_where_the_job_may_not_grow_again() -> None:
    world = World(make_job().stages(2).workers(4, least=2))
    world.start()
    world.builder.set("elasticPolicy.maxWorkers", 2)
    world.end("digits-w1", exit_code=1)
    world.settle()
    world.part()
    world.commit()
    world.bury()
    assert world.shape == (2, 1)
    assert set(world.workers) == {member.name for member in world.generation.members}


def test_leavers_that_wait_break_no_group_and_are_no_joiners() -> None:
    world = releasing()
    world.start()
    world.commit(boundary=8)
    world.part()
    for _ in range(20):
        world.wait(30)
        world.settle()
    assert (world.generation.layout_generation, world.status.leaving_ids, world.status.failures) == (2, [2, 3], 0)
    world.end("digits-w3", exit_code=137)
    world.settle()
    world.commit()
    assert (world.generation.layout_generation, world.status.failures) == (2, 0), "it had left"
    world.wait(1000)
    world.settle()
    assert world.status.leaving_ids == [2, 3]
    world.commit(checkpoint=8)
    assert (set(world.workers), world.deleted_alive) == ({"digits-w0", "digits-w1"}, ["digits-w2"])
    assert world.status.gpus.released == 2


@pytest.mark.parametrize("confirmed", [False, True])
def test_leavers_that_wait_take_the_place_of_a_member_that_dies_before_the_checkpoint_is_durable(
    confirmed: bool,
) -> None:
    world = releasing()
    world.start()
    world.commit(boundary=8)
    world.part()
    if confirmed:
        world.commit()
    world.unschedulable = True
    world.end("digits-w0", exit_code=137)
    world.settle()
    assert [member.name for member in world.generation.members] == ["digits-w1", "digits-w2"]
    assert (world.generation.leavers, world.status.leaving_ids) == ([], [3])
    world.commit()
    assert set(world.workers) == {"digits-w1", "digits-w2", "digits-w3"}
    world.commit(checkpoint=8)
    assert set(world.workers) == {"digits-w1", "digits-w2"}


def test_leavers_that_wait_make_a_job_no_wider_than_it_was_when_a_member_dies() -> None:
    world = giving_way()
    assert (world.shape, len(world.status.leaving_ids)) == ((2, 2), 4)
    world.end("digits-w0", exit_code=137)
    world.settle()
    assert (world.shape, world.generation.reason) == ((2, 2), ResizeReason.FAILURE)
    assert len(world.status.leaving_ids) == 3


@pytest.mark.parametrize(("on_pack", "released"), [("Hold", 0), ("Release", 2)])
def test_spares_that_an_edit_lets_go_count_as_released(on_pack: str, released: int) -> None:
    world = World(make_job().stages(4).workers(4).on_pack("Hold").checkpoint())
    world.start()
    world.commit(boundary=8)
    world.part()
    world.commit(checkpoint=8)
    world.builder.on_pack(on_pack)
    world.settle()
    assert (world.status.gpus.released, world.status.gpus.held) == (released, 4 - released)


def test_a_held_spare_whose_pod_vanishes_is_not_made_again() -> None:
    world = World(make_job().stages(4).workers(4).on_pack("Hold"))
    world.start()
    world.commit(boundary=8)
    world.part()
    world.commit()
    world.kill("digits-w3")
    world.settle()
    assert set(world.workers) == {"digits-w0", "digits-w1", "digits-w2"}
    assert world.condition(ConditionType.RESIZING).reason == "Settled"


@pytest.mark.parametrize("num_cordoned", [0, 1, 2])
def test_the_sleep_after_giving_way_is_prolonged_once_by_the_time_that_the_checkpoint_takes(num_cordoned: int) -> None:
    world = giving_way()
    next_time = world.status.next_resize_time
    assert next_time is not None
    for name in sorted(set(world.workers) - {member.name for member in world.generation.members})[:num_cordoned]:
        world.wait(300)
        world.change(name, draining=True)
        world.settle()
    world.wait(900 - 300 * num_cordoned)
    world.commit(checkpoint=0)
    assert world.status.leaving_ids == []
    assert world.status.next_resize_time == next_time + timedelta(seconds=900)


@pytest.mark.parametrize("confirmed", [False, True])
def test_leavers_that_wait_are_the_first_of_the_next_start_where_all_members_die(confirmed: bool) -> None:
    world = releasing()
    world.start()
    world.commit(boundary=8)
    world.part()
    if confirmed:
        world.commit()
    for name in ("digits-w0", "digits-w1"):
        world.end(name, exit_code=137)
    world.settle()
    world.warm_up()
    assert (world.shape, world.generation.reason) == ((4, 1), ResizeReason.START)
    assert {"digits-w2", "digits-w3"} < {member.name for member in world.generation.members}
