"""A pod that is deleted has its reason in an event of the job, as `kubectl describe` shows it."""

from collections.abc import Callable

import pytest

from pipetransformer_contract.api.status import Reason
from pipetransformer_contract.messages import Outcome
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.world import World, training


def release(world: World) -> None:
    world.commit(boundary=8, checkpoint=8)
    world.commit()
    world.part()


def suspend(world: World) -> None:
    world.builder.suspended()
    world.settle()


def finish(world: World) -> None:
    world.finish(Outcome.SUCCEEDED)
    world.wait(31)
    world.settle()


@pytest.mark.parametrize(
    ("happens", "why"),
    [
        (release, "not part of generation 2 (Release), which needs fewer workers"),
        (finish, "the job has ended (spec.runPolicy.cleanPodPolicy)"),
    ],
    ids=["a release", "the end of the job"],
)
def test_an_event_says_why_living_workers_are_deleted(happens: Callable[[World], None], why: str) -> None:
    world = World(make_job().stages(2).workers(4).on_pack("Release"))
    world.start()
    happens(world)
    assert world.deleted_alive
    told = [event.message for event in world.told if event.reason == "WorkersDeleted"]
    assert told == [f"Deleting {', '.join(world.deleted)}: {why}"]


def test_the_event_of_a_lost_worker_is_not_repeated_by_one_of_its_deletion() -> None:
    world = training()
    world.end("digits-w1", exit_code=1, message="it broke")
    decided = world.turn()
    assert [(one.name, one.why) for one in decided.delete] == [("digits-w1", "exit code 1: it broke")]
    reasons = [event.reason for event in decided.events]
    assert "WorkerLost" in reasons and "WorkersDeleted" not in reasons


def test_the_event_of_a_suspension_is_not_repeated_by_one_of_its_deletions() -> None:
    world = training()
    suspend(world)
    assert world.deleted_alive
    reasons = [event.reason for event in world.told]
    assert "SuspendedByUser" in reasons and "WorkersDeleted" not in reasons


def test_a_worker_whose_deletion_is_refused_is_told_once() -> None:
    world = World(make_job().stages(2).workers(4).on_pack("Release"))
    world.start()
    world.keeps_pods = "denied"
    release(world)
    world.wait(60)
    world.settle()
    told = [event for event in world.told if event.reason == "WorkersDeleted"]
    assert len(told) == 1 and told[0].message.startswith("Deleting digits-w")


def test_an_event_about_many_workers_names_eight_of_them() -> None:
    world = World(make_job().workers(10))
    world.start()
    finish(world)
    (said,) = (event.message for event in world.told if event.reason is Reason.WORKERS_DELETED)
    assert said.startswith("Deleting digits-w0, ") and "digits-w7 and 2 more: " in said
