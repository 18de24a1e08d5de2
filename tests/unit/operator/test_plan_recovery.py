"""What becomes of those that survive a failure, and of a job without any."""

import pytest

from pipetransformer_contract.messages import ResizeReason
from pipetransformer_operator.api.status import ConditionType
from pipetransformer_operator.plan import WorkerPhase
from tests.builders import make_job
from tests.unit.operator.world import World

pytestmark = pytest.mark.timeout(20)


def test_survivors_of_a_failure_train_on_and_the_job_grows_back() -> None:
    world = World(make_job().stages(2).workers(4))
    world.start()
    world.end("digits-w0", exit_code=137)
    world.settle()
    assert world.shape == (2, 1)
    assert world.plan.reason is ResizeReason.FAILURE
    assert world.plan.leader == "digits-w1"
    assert world.status.failures == 1
    world.commit()
    world.leave()
    world.warm_up()
    world.commit()
    assert world.shape == (2, 2)
    assert "digits-w0" not in world.workers


def test_too_few_survivors_hold_their_state_until_a_replacement_is_ready() -> None:
    world = World(make_job().stages(2).workers(2, least=2))
    world.start()
    world.end("digits-w1", exit_code=137)
    world.settle()
    assert world.plan.layout_generation == 1
    assert world.condition(ConditionType.RUNNING).reason == "Recovering"
    world.warm_up()
    assert world.shape == (2, 1)
    assert [member.name for member in world.plan.members] == ["digits-w0", "digits-w2"]
    assert world.status.failures == 1


def test_too_few_survivors_hold_no_accelerators_past_the_deadline_where_a_checkpoint_is_durable() -> None:
    world = World(make_job().stages(2).workers(2, least=2).checkpoint())
    world.start()
    world.commit(checkpoint=0)
    world.unschedulable = True
    world.end("digits-w1", exit_code=137)
    world.settle()
    assert "digits-w0" in world.workers
    world.wait(600)
    world.settle()
    assert not world.workers
    assert world.condition(ConditionType.RUNNING).reason == "Unschedulable"
    world.unschedulable = False
    world.wait(60)
    world.settle()
    world.warm_up()
    assert (world.shape, world.plan.reason, world.status.failures) == ((2, 1), ResizeReason.START, 1)


def test_survivors_that_hold_the_only_copies_stay_and_their_replacement_is_tried_ever_later() -> None:
    world = World(make_job().stages(2).workers(2, least=2))
    world.start()
    world.unschedulable = True
    world.end("digits-w1", exit_code=137)
    world.settle()
    for wait in (60, 120):
        world.wait(600)
        world.settle()
        assert sorted(world.workers) == ["digits-w0"]
        assert world.condition(ConditionType.RUNNING).reason == "Recovering"
        assert world.condition(ConditionType.RESIZING).reason == "Unschedulable"
        world.wait(wait)
        world.settle()
        assert len(world.workers) == 2
    world.unschedulable = False
    world.change("digits-w4", scheduled=True, waiting="", phase=WorkerPhase.RUNNING)
    world.warm_up()
    assert [member.name for member in world.plan.members] == ["digits-w0", "digits-w4"]
    assert world.status.failures == 1


def test_a_failure_outranks_a_published_resize_and_its_leavers_can_be_members_again() -> None:
    world = World(make_job().stages(4).workers(4).release())
    world.start()
    world.commit(boundary=8)
    world.kill("digits-w0")
    world.settle()
    assert world.plan.layout_generation == 3
    assert {member.name for member in world.plan.members} == {"digits-w1", "digits-w2"}


def test_a_job_without_survivors_starts_again_in_the_size_of_its_checkpoint() -> None:
    world = World(make_job().stages(4).workers(4).release())
    world.start()
    world.commit(boundary=8, checkpoint=8)
    for name in list(world.workers):
        world.kill(name)
    world.settle()
    world.warm_up()
    assert world.shape == (2, 1)
    assert world.plan.reason is ResizeReason.START
    assert world.plan.layout_generation == 3
