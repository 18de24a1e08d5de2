"""Members that all live and cannot train together, generation after generation: it is said, and it ends."""

import math
from datetime import timedelta

import pytest

from pipetransformer_contract.api.status import ConditionStatus, ConditionType, State
from pipetransformer_contract.messages import ResizeReason
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.world import World, training

pytestmark = pytest.mark.timeout(60)


def starting() -> World:
    """A job whose first generation is published, and none of whose members has come yet."""
    world = World(make_job().stages(2).workers(4))
    world.settle()
    world.warm_up()
    return world


def breaks(world: World, seconds: float, hung: str = "") -> list[State]:
    """Each published generation breaks at once, for so long, or until the job ends or is without the worker that hangs
    in its regroup; the states of each second."""
    end, states = world.now + timedelta(seconds=seconds), []
    while world.now < end and not world.status.finished:
        before, names = world.generation, [member.name for member in world.generation.members]
        if hung and hung not in names:
            break
        world.break_group([name for name in names if name != hung])
        if world.generation != before:
            continue
        pause = math.ceil(min(world.turn().requeue_after or 1.0, (end - world.now).total_seconds()))
        states += [world.state()] * pause
        world.wait(pause)
        world.settle()
    return [*states, world.state()]


@pytest.mark.parametrize("met", [False, True])
def test_members_that_cannot_train_together_are_no_running_job_and_use_up_the_budget(met: bool) -> None:
    world = training() if met else starting()
    states = breaks(world, 7200)
    assert states[-1] is State.FAILED
    assert set(states[10:-1]) == {State.STALLED}, "nobody is told that it trains"
    failed = world.condition(ConditionType.FAILED)
    assert failed.reason == "BackoffLimitExceeded"
    assert "9 generations in a row broke although all workers are alive" in failed.message
    assert (world.status.failures, world.status.layout_generation) == (4, 9)
    assert 600 < len(states) < 1200, "an outage of minutes is waited out"


@pytest.mark.parametrize("first", [True, False])
def test_one_that_hangs_in_its_regroup_is_replaced_and_the_others_train(first: bool) -> None:
    builder = make_job().stages(1).workers(4).checkpoint().set("runPolicy.backoffLimit", 2)
    world = World(builder)
    if first:
        world.settle()
        world.warm_up()
    else:
        world.start()
        world.end("digits-w3", exit_code=137)
        world.settle()
    states = breaks(world, 7200, hung="digits-w1")
    assert "digits-w1" not in [member.name for member in world.generation.members]
    assert 600 < len(states) < 700, "its peers may just be quicker"
    assert world.status.failures == (1 if first else 2)
    world.commit()
    assert world.condition(ConditionType.RUNNING).status is ConditionStatus.TRUE


def test_one_that_hangs_and_still_sends_heartbeats_is_a_failure_at_once_and_no_silence_of_its_node() -> None:
    world = World(make_job().stages(1).workers(4))
    world.start()
    world.change("digits-w1", node="n1")
    world.break_group(["digits-w0", "digits-w2", "digits-w3"])
    world.wait(600)
    world.settle()
    assert "digits-w1" not in [member.name for member in world.generation.members]
    assert (world.status.failures, world.status.silences) == (1, [])


def test_a_group_that_breaks_again_and_again_says_why_there_are_no_steps() -> None:
    world = training()
    assert State.STALLED not in breaks(world, 3), "it may meet again at once"
    breaks(world, 40)
    stalled, running = world.condition(ConditionType.STALLED), world.condition(ConditionType.RUNNING)
    assert (stalled.status, stalled.reason) == (ConditionStatus.TRUE, "GroupBroken")
    assert "no step was made since step 1" in stalled.message
    assert (running.status, running.reason) == (ConditionStatus.FALSE, "GroupBroken")
    world.commit(steps=0)
    assert world.state() is State.STALLED, "it met again, and no step is made yet"
    world.commit()
    assert (world.state(), world.status.failures) == (State.RUNNING, 0)
    assert world.condition(ConditionType.STALLED).reason == "Progressing"


def test_why_generations_break_is_said_as_their_leader_saw_it() -> None:
    world = training()
    words = "generation 3 was not committed: digits-w9 would train on other data than those who train already"
    world.why_broken = {"digits-w1": "Connection closed by peer", world.generation.leader: words}
    breaks(world, 40)
    said = f"; {world.generation.leader}: {words}"
    assert world.condition(ConditionType.STALLED).message.endswith(said)
    breaks(world, 7200)
    assert world.condition(ConditionType.FAILED).message.endswith(said)


def test_a_group_that_meets_again_each_time_and_never_makes_a_step_is_published_ever_later_and_ends() -> None:
    world = training()
    generations = []
    for _ in range(3600):
        if not world.generation.confirmed:
            world.commit(steps=0)
        world.break_group([member.name for member in world.generation.members])
        generations.append(world.status.layout_generation)
        if world.status.finished:
            break
        world.wait(1)
    assert world.state() is State.FAILED
    assert (generations[3], generations[4], generations[59], generations[60]) == (2, 3, 5, 6)


def test_a_group_that_breaks_after_each_step_trains_however_often() -> None:
    world = training()
    for _ in range(20):
        world.break_group([member.name for member in world.generation.members])
        world.settle()
        world.commit(steps=1)
        assert world.state() is State.RUNNING
    assert (world.status.layout_generation, world.status.failures) == (21, 0)


def test_deaths_one_after_another_are_counted_as_deaths_alone() -> None:
    world = World(make_job().stages(2).workers(16).set("runPolicy.backoffLimit", 7))
    world.start()
    for number in range(7):
        breaks(world, 5)
        world.end(f"digits-w{15 - number * 2}", exit_code=137)
        world.settle()
        assert world.generation.reason is ResizeReason.FAILURE
        assert world.state() is not State.STALLED
    assert world.status.failures == 7


def test_what_is_published_and_not_confirmed_yet_does_not_run_yet() -> None:
    world = starting()
    running = world.condition(ConditionType.RUNNING)
    assert (world.state(), running.reason) == (State.STARTING, "WaitingForWorkers")
    world.wait(3600)
    world.settle()
    assert world.status.failures == 0, "who reads a checkpoint for an hour breaks nothing"
    world.commit(steps=0)
    assert world.state() is State.RUNNING


def test_a_job_is_suspended_while_its_group_breaks_and_resumed_without_a_word_of_it() -> None:
    world = starting()
    breaks(world, 40)
    world.builder.checkpoint().suspended(True)
    world.settle()
    assert world.state() is State.SUSPENDED
    world.builder.suspended(False)
    world.settle()
    world.warm_up()
    assert world.state() is State.STARTING
    assert world.condition(ConditionType.STALLED).status is ConditionStatus.FALSE


def test_a_first_generation_that_is_slow_to_make_a_step_is_not_undone() -> None:
    world = starting()
    world.wait(601)
    world.settle()
    assert (world.generation.layout_generation, world.generation.reason) == (1, ResizeReason.START)
