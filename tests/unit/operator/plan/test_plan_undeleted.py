"""Workers that the cluster refuses to delete, as a policy does: the job says so, and goes on with all else."""

import pytest

from pipetransformer_contract.api.status import ConditionStatus, ConditionType, State
from pipetransformer_contract.messages import Outcome
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.world import World, training

pytestmark = pytest.mark.timeout(60)
WORDS = "403 pods is forbidden: ask the platform team"


def keeping(world: World) -> World:
    """The cluster refuses deletions from now on; what was told before is forgotten."""
    world.keeps_pods = WORDS
    world.told.clear()
    return world


def reasons(world: World) -> list[str]:
    """Of the events since then."""
    return [event.reason.value for event in world.told]


def says(world: World, kind: ConditionType = ConditionType.RUNNING) -> tuple[ConditionStatus, str, str]:
    """What the condition says."""
    condition = world.condition(kind)
    return condition.status, condition.reason, condition.message


def let_go(world: World) -> None:
    """The cluster takes deletions again."""
    world.keeps_pods = ""
    world.settle()


@pytest.mark.parametrize(("deleted", "reason"), [(False, "SuspendedByUser"), (True, "BeingDeleted")])
def test_a_suspended_job_says_who_is_not_deleted_and_why_until_they_are(deleted: bool, reason: str) -> None:
    world = keeping(training(1))
    if deleted:
        world.kept_by = ("example.com/parent",)
    else:
        world.builder.suspended()
    world.settle()
    world.wait(3600)
    world.settle()

    assert world.state() is State.SUSPENDED
    status, why, message = says(world, ConditionType.SUSPENDED)
    assert (status, why) == (ConditionStatus.TRUE, "DeletionRefused")
    assert message.endswith(f"the cluster refuses to delete digits-w0, digits-w1: {WORDS}")
    assert reasons(world) == [reason, "StepsLost", "DeletionRefused"], "each is told once"
    assert not any("deleted" in event.message for event in world.told if event.reason == "SuspendedByUser")
    assert (world.status.gpus.held, len(world.workers)) == (2, 2)

    let_go(world)
    assert says(world, ConditionType.SUSPENDED)[1] == reason
    assert (world.status.gpus.held, world.workers) == (0, {})
    assert reasons(world) == [reason, "StepsLost", "DeletionRefused"]


def test_a_job_that_trains_says_so_while_it_trains_on_and_recovers() -> None:
    world = World(make_job().stages(4).workers(4).release().checkpoint())
    world.start()
    keeping(world)
    world.commit(boundary=8)
    world.commit(checkpoint=8)
    assert world.shape == (2, 1)
    left = "the cluster refuses to delete digits-w2, digits-w3: " + WORDS
    assert says(world) == (ConditionStatus.TRUE, "DeletionRefused", f"generation 2: 1 pipeline of 2 stages; {left}")
    assert (world.state(), world.status.gpus.held, world.status.gpus.released) == (State.RUNNING, 4, 0)
    assert reasons(world).count("DeletionRefused") == 1

    world.end("digits-w1", exit_code=1)
    world.settle()
    for _ in range(2):
        world.commit()
        world.warm_up()
    world.commit()
    assert (world.shape, world.status.failures, world.state()) == ((2, 1), 1, State.RUNNING)
    assert "digits-w1" in says(world)[2]

    let_go(world)
    assert says(world)[:2] == (ConditionStatus.TRUE, "Training")
    assert (world.status.gpus.held, world.status.gpus.released) == (2, 2)
    assert reasons(world).count("DeletionRefused") == 1


def test_a_start_that_was_put_off_leaves_no_more_pods_than_those_that_cannot_be_deleted() -> None:
    world = World(make_job().stages(2).workers(2))
    keeping(world)
    world.unschedulable = True
    world.settle()
    for _ in range(10):
        world.wait(700)
        world.settle()
    assert sorted(world.workers) == ["digits-w0", "digits-w1"]
    assert says(world) == (
        ConditionStatus.FALSE,
        "DeletionRefused",
        f"the cluster refuses to delete digits-w0, digits-w1: {WORDS}",
    )
    assert reasons(world).count("DeletionRefused") == 1

    world.unschedulable = False
    let_go(world)
    assert sorted(world.workers) == ["digits-w2", "digits-w3"]
    assert says(world)[1] == "WaitingForWorkers"


def test_a_start_whose_workers_are_deleted_before_it_is_tried_again_says_when_that_is() -> None:
    world = keeping(World(make_job().stages(2).workers(2)))
    world.unschedulable = True
    world.settle()
    world.wait(600)
    world.settle()
    let_go(world)
    assert world.workers == {}
    assert says(world) == (
        ConditionStatus.FALSE,
        "WaitingForWorkers",
        "the next attempt begins at 2026-01-01T00:11:00Z",
    )


def test_a_claim_that_was_cancelled_leaves_no_more_pods_than_those_that_cannot_be_deleted() -> None:
    world = World(make_job().stages(2).workers(2, most=4))
    world.unschedulable = True
    world.settle()
    for name in list(world.workers):
        world.change(name, scheduled=True)
    world.warm_up()
    keeping(world)
    world.commit()
    for _ in range(10):
        world.wait(4000)
        world.settle()
    assert len(world.workers) == 4
    assert says(world)[:2] == (ConditionStatus.TRUE, "DeletionRefused")
    let_go(world)
    assert len(world.workers) == 4 and "digits-w4" in world.workers, "it claims again"


def test_a_claim_goes_on_although_one_of_its_lost_workers_cannot_be_deleted() -> None:
    world = training(1, most=4)
    world.end("digits-w2", exit_code=1)
    world.settle()
    world.wait(61)
    world.settle()
    assert (world.status.resize_failures, sorted(world.workers)[2:]) == (1, ["digits-w4", "digits-w5"])
    keeping(world)
    world.silent = {"digits-w4"}
    world.change("digits-w4", node_lost=True, node="dead")
    world.settle()
    assert "digits-w4" in says(world)[2]
    world.silent.clear()
    world.warm_up()
    assert world.shape == (2, 2)
    assert {member.name for member in world.generation.members} >= {"digits-w5", "digits-w6"}


def test_a_job_takes_back_its_size_although_workers_that_it_released_cannot_be_deleted() -> None:
    world = World(make_job().stages(4).workers(4).release().checkpoint())
    world.start()
    keeping(world)
    world.commit(boundary=8)
    world.commit(checkpoint=8)
    assert (world.shape, len(world.workers)) == ((2, 1), 4)
    world.commit(boundary=0, checkpoint=0)
    world.warm_up()
    assert (world.shape, len(world.workers)) == ((4, 1), 6)


def test_a_job_without_a_legal_start_says_so_once_while_its_workers_cannot_be_deleted() -> None:
    world = World(make_job().stages(2).workers(2, most=2))
    world.settle()
    keeping(world)
    world.builder.workers(2, most=1)
    for _ in range(3):
        world.wait(700)
        world.settle()
    assert says(world)[1] == "NoLegalStart"
    assert says(world)[2].endswith(f"; the cluster refuses to delete digits-w0, digits-w1: {WORDS}")
    assert reasons(world).count("NoLegalStart") == 1


def test_a_refusal_to_create_workers_stands_before_one_to_delete_them_and_both_are_said() -> None:
    world = keeping(training(1))
    world.end("digits-w0", exit_code=1)
    world.end("digits-w1", exit_code=1)
    world.settle()
    world.refusal = "exceeded quota: team"
    for name in ("digits-w2", "digits-w3"):
        world.workers.pop(name, None)
    world.turn()
    world.wait(10)
    world.turn()
    status, reason, message = says(world)
    assert (status, reason) == (ConditionStatus.FALSE, "CreationRefused")
    assert message == f"exceeded quota: team; the cluster refuses to delete digits-w0, digits-w1: {WORDS}"
    told = reasons(world).count("CreationRefused")
    world.turn()
    assert reasons(world).count("CreationRefused") == told == 1


@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
def test_a_job_that_has_ended_says_who_still_holds_something(outcome: Outcome) -> None:
    world = keeping(training(1))
    world.finish(outcome)
    world.wait(60)
    world.settle()
    assert world.status.finished
    assert says(world) == (
        ConditionStatus.FALSE,
        "DeletionRefused",
        f"the cluster refuses to delete digits-w0, digits-w1: {WORDS}",
    )
    assert (world.status.gpus.held, reasons(world).count("DeletionRefused")) == (2, 1)
    let_go(world)
    assert says(world)[1] == "Finished"
    assert world.status.gpus.held == 0


def test_a_drain_whose_attempts_cannot_be_deleted_makes_no_more() -> None:
    world = keeping(training(1))
    world.change("digits-w1", draining=True)
    world.settle()
    for _ in range(6):
        world.wait(4000)
        world.settle()
    assert len(world.workers) == 3, "one replacement, which never got warm"
