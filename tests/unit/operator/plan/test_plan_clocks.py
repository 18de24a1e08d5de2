"""Operators that follow each other and whose clocks differ: what one wrote down is read by the other's clock."""

from datetime import timedelta

import pytest

from pipetransformer_contract.api.status import ConditionType, State
from pipetransformer_contract.messages import ResizeReason
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.world import World

pytestmark = pytest.mark.timeout(60)
SKEWS = pytest.mark.parametrize("skew", [-900, 900])


def take_over(world: World, skew: int) -> None:
    """Another operator begins, which has heard nobody yet."""
    world.now += timedelta(seconds=skew)
    world.since = world.now
    world.settle()


@SKEWS
def test_a_job_that_trains_trains_on(skew: int) -> None:
    world = World(make_job().stages(2).workers(4).set("runPolicy.stallTimeoutSeconds", 60))
    world.start()
    before = world.generation
    take_over(world, skew)
    stalled = world.status.condition(ConditionType.STALLED)
    assert world.generation.layout_generation == before.layout_generation
    assert stalled is None or stalled.status == "False"
    assert world.status.failures == 0


@SKEWS
def test_a_start_that_took_long_is_not_put_off_before_the_next_operator_heard_who_is_ready(skew: int) -> None:
    world = World(make_job().stages(2).workers(2))
    world.settle()
    world.wait(3000)
    world.warm_up(["digits-w0"])
    world.wait(599)
    world.warm.clear()
    take_over(world, skew)
    world.wait(599)
    world.settle()
    world.warm_up()
    assert (world.shape, world.deleted) == ((2, 1), [])


@pytest.mark.parametrize(("skew", "attempts"), [(-900, 1), (900, 1), (900, 2)])
def test_survivors_of_a_failure_wait_until_the_next_operator_heard_who_is_ready(skew: int, attempts: int) -> None:
    """Their replacement got warm while no operator was there: given back, all since the checkpoint would be lost."""
    world = World(make_job().stages(2).workers(2, least=2).checkpoint())
    world.start()
    world.commit(checkpoint=0)
    world.end("digits-w1", exit_code=137)
    world.settle()
    if attempts == 2:
        world.wait(400)
        world.end("digits-w2", exit_code=1)
        world.settle()
        world.wait(61)
        world.settle()
    deleted = list(world.deleted)
    take_over(world, skew)
    assert (world.state(), world.deleted) == (State.STARTING, deleted)
    world.wait(30)
    world.warm_up()
    assert (world.shape, world.generation.reason) == ((2, 1), ResizeReason.FAILURE)


@SKEWS
def test_survivors_of_a_failure_hold_no_accelerators_for_longer_than_the_next_operator_has(skew: int) -> None:
    world = World(make_job().stages(2).workers(2, least=2).checkpoint())
    world.start()
    world.commit(checkpoint=0)
    world.end("digits-w1", exit_code=137)
    world.settle()
    take_over(world, skew)
    world.wait(599)
    world.settle()
    assert world.workers
    world.wait(1)
    world.settle()
    assert not world.workers


@SKEWS
def test_a_replacement_for_a_cordoned_worker_that_is_warm_is_not_given_back_by_the_next_operator(skew: int) -> None:
    world = World(make_job().stages(4).workers(4))
    world.start()
    world.change("digits-w1", draining=True)
    world.settle()
    take_over(world, skew)
    world.wait(30)
    world.warm_up()
    assert (world.generation.reason, world.status.next_worker_id) == (ResizeReason.DRAIN, 5)


@SKEWS
def test_a_claim_that_was_being_prepared_succeeds_in_the_end(skew: int) -> None:
    world = World(make_job().stages(2).workers(2, most=4))
    world.start()
    assert world.status.resize is not None
    take_over(world, skew)
    for _ in range(20):
        world.wait(60)
        world.settle()
        world.warm_up()
        if world.shape == (2, 2):
            break
    world.commit()
    assert (world.shape, world.status.failures) == ((2, 2), 0)


@SKEWS
def test_a_published_generation_is_not_taken_back_at_once(skew: int) -> None:
    world = World(make_job().stages(4).workers(4))
    world.start()
    world.commit(boundary=8)
    before = world.generation
    assert not before.confirmed
    take_over(world, skew)
    world.wait(5)
    world.settle()
    assert world.generation.layout_generation == before.layout_generation
    world.commit()
    assert world.generation.confirmed


@SKEWS
def test_what_was_saved_never_shrinks(skew: int) -> None:
    world = World(make_job().stages(4).workers(4).release())
    world.start()
    world.commit(boundary=8)
    world.commit(checkpoint=8)
    world.leave()
    world.wait(100)
    saved = world.status.gpu_seconds_saved
    take_over(world, skew)
    world.commit(boundary=11)
    world.commit(checkpoint=11)
    world.leave()
    assert world.status.gpu_seconds_saved >= saved


@SKEWS
def test_progress_is_written_as_soon_as_before(skew: int) -> None:
    world = World(make_job().stages(2).workers(4))
    world.start()
    take_over(world, skew)
    world.commit()
    world.wait(30)
    world.settle()
    assert world.status.last_report is not None and world.report is not None
    assert world.status.last_report.step == world.report.step


@SKEWS
def test_a_worker_that_hangs_is_replaced_as_soon_as_before(skew: int) -> None:
    world = World(make_job().stages(2).workers(4).set("runPolicy.stallTimeoutSeconds", 60))
    world.start()
    take_over(world, skew)
    world.silent.add("digits-w3")
    world.wait(61)
    world.settle()
    assert (world.shape, world.status.failures) == ((2, 1), 1)


@SKEWS
def test_a_claim_that_no_node_takes_is_given_up_as_soon_as_before(skew: int) -> None:
    world = World(make_job().stages(2).workers(2, most=4))
    world.settle()
    world.warm_up()
    world.unschedulable = True
    world.commit()
    assert len(world.workers) == 4
    take_over(world, skew)
    world.wait(120)
    world.settle()
    assert world.status.resize_failures == 1
