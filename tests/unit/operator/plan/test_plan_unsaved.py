"""A job trains on while the storage does not take its checkpoint, and says so."""

from dataclasses import replace

from pipetransformer_contract.api.status import ConditionType, State
from pipetransformer_contract.messages import Outcome
from pipetransformer_operator.plan import plan
from pipetransformer_operator.plan.types import EventType
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.world import World

FULL = "spec.checkpoint.location: /storage: [Errno 28] No space left on device"


def training() -> World:
    world = World(make_job().stages(2).workers(2).checkpoint())
    world.start()
    world.commit(steps=10, checkpoint=0)
    return world


def warnings(world: World) -> list[str]:
    return [event.message for event in world.told if event.type is EventType.WARNING]


def test_a_job_whose_checkpoint_fails_trains_on_and_says_why_in_a_condition_and_one_event() -> None:
    world = training()
    assert world.status.condition(ConditionType.UNSAVED) is None
    world.unsaved = {"digits-w1": FULL}
    world.settle()

    unsaved = world.condition(ConditionType.UNSAVED)
    assert (unsaved.reason, world.state()) == ("CheckpointFails", State.RUNNING)
    assert f"digits-w1: {FULL}" in unsaved.message
    assert "the newest durable one is of step 1" in unsaved.message
    world.wait(60)
    world.settle()
    assert warnings(world) == [unsaved.message]
    assert len(world.workers) == 2 and world.status.failures == 0


def test_the_condition_is_taken_back_once_all_members_can_write() -> None:
    world = training()
    world.unsaved = {"digits-w1": FULL}
    world.settle()
    world.unsaved = {}
    world.settle()

    unsaved = world.condition(ConditionType.UNSAVED)
    assert (unsaved.status, unsaved.reason, unsaved.message) == ("False", "NothingWaits", "")


def test_a_new_operator_that_has_not_heard_the_members_yet_leaves_the_condition_as_it_is() -> None:
    world = training()
    world.unsaved = {"digits-w1": FULL}
    world.settle()
    decided = plan(world.spec, replace(world.observed(), beats={}), world.now)

    assert decided.status.is_true(ConditionType.UNSAVED)


def test_a_job_that_has_ended_waits_for_no_storage() -> None:
    world = training()
    world.unsaved = {"digits-w1": FULL}
    world.settle()
    world.finish(Outcome.FAILED)
    world.settle()

    unsaved = world.condition(ConditionType.UNSAVED)
    assert (unsaved.status, unsaved.reason) == ("False", "Finished")
