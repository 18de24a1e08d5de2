"""What becomes of those that survive a failure, and of a job without any."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from pipetransformer_contract.api.status import ConditionType, State
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Offer, ResizeReason
from pipetransformer_operator.plan import EventType, WorkerPhase
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.world import World, training

pytestmark = pytest.mark.timeout(60)


def test_survivors_of_a_failure_train_on_and_the_job_grows_back() -> None:
    world = World(make_job().stages(2).workers(4))
    world.start()
    world.end("digits-w0", exit_code=137)
    world.settle()
    assert world.shape == (2, 1)
    assert world.generation.reason is ResizeReason.FAILURE
    assert world.generation.leader == "digits-w1"
    assert world.status.failures == 1
    world.commit()
    world.leave()
    world.warm_up()
    world.commit()
    assert world.shape == (2, 2)
    assert "digits-w0" not in world.workers


def test_a_generation_that_cannot_be_undone_has_no_deadline() -> None:
    world = World(make_job().stages(2).workers(4))
    world.start()
    world.end("digits-w0", exit_code=137)
    world.settle()
    assert world.status.resize is not None and world.status.resize.deadline is None
    assert "(Failure): generation 2 is published" in world.condition(ConditionType.RESIZING).message
    world.commit()
    world.leave()
    world.warm_up()
    assert world.generation.reason is ResizeReason.CLAIM
    assert world.status.resize is not None and world.status.resize.deadline == world.now + timedelta(seconds=600)


def test_too_few_survivors_hold_their_state_until_a_replacement_is_ready() -> None:
    world = World(make_job().stages(2).workers(2, least=2))
    world.start()
    world.end("digits-w1", exit_code=137)
    world.settle()
    assert world.generation.layout_generation == 1
    assert world.condition(ConditionType.RUNNING).reason == "Recovering"
    world.warm_up()
    assert world.shape == (2, 1)
    assert [member.name for member in world.generation.members] == ["digits-w0", "digits-w2"]
    assert world.status.failures == 1


def test_a_job_whose_bounds_allow_one_layout_replaces_a_lost_worker_although_layers_froze() -> None:
    world = World(make_job().stages(4).workers(4, least=4).set("elasticPolicy.maxPipelines", 1))
    world.start()
    world.commit(boundary=8)
    assert world.shape == (4, 1)
    world.end("digits-w1", exit_code=137)
    world.settle()
    world.warm_up()
    assert world.shape == (4, 1)
    assert [member.name for member in world.generation.members] == [f"digits-w{key}" for key in (0, 2, 3, 4)]


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
    running = world.condition(ConditionType.RUNNING)
    assert (running.status, running.reason) == ("False", "Unschedulable")
    assert running.message.startswith("too few workers were left to train, all are released: ")
    assert (running.message, EventType.WARNING) in [(event.message, event.type) for event in world.told]
    world.unschedulable = False
    world.wait(60)
    world.settle()
    resize = world.status.resize
    assert resize is not None and resize.start_time == world.now, "the start has all its time"
    world.warm_up()
    assert (world.shape, world.generation.reason, world.status.failures) == ((2, 1), ResizeReason.START, 1)


def test_a_job_that_waits_for_those_without_whom_it_cannot_train_is_starting_and_not_resizing() -> None:
    world = World(make_job().stages(2).workers(2, least=2).checkpoint())
    world.start()
    world.end("digits-w1", exit_code=137)
    world.settle()
    assert world.status.is_true(ConditionType.RESIZING) and not world.status.is_true(ConditionType.RUNNING)
    assert world.state() is State.STARTING
    world.warm_up()
    world.commit()
    assert world.state() is State.RUNNING


def test_a_job_that_starts_again_no_longer_says_that_it_resizes() -> None:
    world = World(make_job().stages(2).workers(2, most=4).checkpoint().set("elasticPolicy.claimFrom", "Autoscaler"))
    world.start()
    assert world.status.is_true(ConditionType.RESIZING)
    for name in list(world.workers):
        world.kill(name)
    world.settle()
    assert world.state() is State.STARTING
    assert world.condition(ConditionType.RESIZING).reason == "Settled"


def live_through(world: World, seconds: int, end: Callable[[str], None]) -> None:
    """Turns for so long; whoever is to join meets that end soon after it was created."""
    until = world.now + timedelta(seconds=seconds)
    while world.now < until and not world.status.finished:
        members = {member.name for member in world.status.generation.members} if world.status.generation else set()
        for name in [name for name, worker in world.workers.items() if worker.alive and name not in members]:
            end(name)
        world.settle()
        world.wait(min(world.turn().requeue_after or 30, 30, (until - world.now).total_seconds()))
        world.settle()


@pytest.mark.parametrize("kind", ["crash", "refusal of the spec", "preemption"])
def test_survivors_whose_replacements_end_hold_no_accelerators_past_the_deadline_of_the_first(kind: str) -> None:
    """As on the one free node, whose driver is broken: each attempt ends before a deadline of its own would."""
    world = World(make_job().stages(2).workers(2, least=2).checkpoint().set("runPolicy.backoffLimit", 3))
    world.start()
    world.commit(checkpoint=0)

    def end(name: str) -> None:
        if kind == "preemption":
            world.change(name, disrupted=True)
        else:
            world.end(name, exit_code=2 if kind == "refusal of the spec" else 1)

    world.end("digits-w1", exit_code=137)
    world.settle()
    live_through(world, 590, end)
    assert world.condition(ConditionType.RUNNING).reason == "Recovering"
    assert world.condition(ConditionType.RESIZING).reason == "WorkerFailed"
    assert world.workers["digits-w0"].alive
    created = world.status.next_worker_id
    assert 4 < created < 8, "each attempt is slept over, twice as long each time"
    live_through(world, 12, end)
    assert not world.workers and world.status.generation is None
    running = world.condition(ConditionType.RUNNING)
    assert running.reason == "WorkerFailed"
    assert running.message.endswith("next start in 60 s"), "the failed attempts to replace do not delay the start"
    live_through(world, 3600, end)
    assert world.status.is_true(ConditionType.FAILED) == (kind != "preemption"), "a start counts what fails"
    if kind == "preemption":
        live_through(world, 3600, lambda name: None)
        world.warm_up()
        assert (world.shape, world.generation.reason) == ((2, 1), ResizeReason.START)


def test_survivors_have_all_the_time_of_their_own_whatever_was_prepared_before() -> None:
    world = training(pipelines=1, most=4)
    world.builder.checkpoint().set("runPolicy.claimTimeoutSeconds", 1200).set("elasticPolicy.minWorkers", 2)
    world.commit(checkpoint=0)
    world.settle()
    assert world.status.resize is not None and len(world.workers) == 4
    world.wait(500)
    world.settle()
    world.end("digits-w1", exit_code=137)
    world.settle()
    world.wait(500)
    world.settle()
    assert world.workers["digits-w0"].alive
    world.wait(101)
    world.settle()
    assert not world.workers


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
        assert "too few replacements joined in time: digits-w" in world.told[-1].message
        assert world.condition(ConditionType.RUNNING).reason == "Recovering"
        assert world.condition(ConditionType.RESIZING).reason == "Unschedulable"
        world.wait(wait)
        world.settle()
        assert len(world.workers) == 2
    world.unschedulable = False
    world.change("digits-w4", scheduled=True, why_pending="", phase=WorkerPhase.RUNNING)
    world.warm_up()
    assert [member.name for member in world.generation.members] == ["digits-w0", "digits-w4"]
    assert world.status.failures == 1


@pytest.mark.parametrize("checkpoint", [None, 0])
def test_replacements_of_an_attempt_that_failed_hold_no_accelerators_until_the_next_one(checkpoint: int | None) -> None:
    world = World(make_job().stages(3).workers(3, least=3).checkpoint())
    world.start()
    world.commit(checkpoint=checkpoint)
    for name in ("digits-w1", "digits-w2"):
        world.end(name, exit_code=137)
    world.settle()
    world.end("digits-w3", exit_code=1)
    world.settle()
    assert set(world.workers) == {"digits-w0"}
    why = "too few workers are left to train, and the next attempt to replace the lost ones begins later"
    assert [event.message for event in world.told if "digits-w4" in event.message] == [f"Deleting digits-w4: {why}"]


def test_survivors_wait_for_the_smaller_layout_that_nodes_have_room_for_once_an_attempt_has_failed() -> None:
    world = World(make_job().stages(2).workers(4, least=2))
    world.start()
    world.unschedulable = True
    world.reach = 0
    for number in (1, 2, 3):
        world.end(f"digits-w{number}", exit_code=137)
    world.settle()
    assert len(world.workers) == 4, "an autoscaler may add nodes"
    world.wait(600)
    world.settle()
    world.wait(300)
    world.settle()
    assert sorted(world.workers) == ["digits-w0"], "no layout fits"
    world.reach = 1
    world.settle()
    assert len(world.workers) == 2
    world.settle()
    assert len(world.workers) == 2, "the target stays while its workers are awaited"
    resize = world.status.resize
    assert resize is not None and resize.to.layout == Layout(2, 1)
    world.change("digits-w7", scheduled=True, why_pending="", phase=WorkerPhase.RUNNING)
    world.warm_up()
    assert world.shape == (2, 1), "the job trains again"


def test_a_failure_outranks_a_published_resize_and_its_leavers_can_be_members_again() -> None:
    world = World(make_job().stages(4).workers(4).release())
    world.start()
    world.commit(boundary=8)
    world.kill("digits-w0")
    world.settle()
    assert world.generation.layout_generation == 3
    assert {member.name for member in world.generation.members} == {"digits-w1", "digits-w2"}


@pytest.mark.parametrize("confirmed", [False, True])
def test_what_a_release_left_over_counts_as_released_although_a_member_fails_before_it_is_gone(confirmed: bool) -> None:
    world = World(make_job().stages(4).workers(4).release())
    world.start()
    world.commit(boundary=8)
    leavers = {member.name for member in world.generation.leavers}
    if confirmed:
        world.commit()
        world.leave()
    world.end("digits-w0", exit_code=1)
    world.settle()
    assert world.generation.reason is ResizeReason.FAILURE
    for _ in range(3):
        world.commit(checkpoint=8)
        world.leave()
        world.warm_up()
    assert (world.shape, world.status.gpus.held) == ((2, 1), 2)
    released = [name for name in world.deleted if name in leavers]
    assert world.status.gpus.released == len(released) == (2 if confirmed else 1), "one took the place of the lost one"


@pytest.mark.parametrize("checkpoint", [None, 0])
def test_what_a_release_left_over_waits_for_its_checkpoint_while_a_recovery_is_slept_over(
    checkpoint: int | None,
) -> None:
    world = World(make_job().stages(4).workers(4, least=2).release().checkpoint())
    world.start()
    world.commit(checkpoint=checkpoint)
    world.commit(boundary=8)
    world.commit()
    world.leave()
    leaving = world.status.leaving_ids
    assert len(leaving) == 2
    member, *_ = world.generation.members
    world.end(member.name, exit_code=137)
    world.settle()
    world.end(max(world.workers, key=lambda name: world.workers[name].id), exit_code=1)
    world.settle()
    assert world.status.next_resize_time is not None
    assert (world.status.leaving_ids, world.status.surplus_ids) == (leaving, leaving)
    if checkpoint is None:
        for _ in range(3):
            world.wait(601)
            world.settle()
        assert world.status.leaving_ids == leaving
    world.wait(61)
    world.settle()
    world.warm_up()
    world.commit(checkpoint=8)
    assert (world.shape, world.status.gpus.held, world.status.gpus.released) == ((2, 1), 2, 2)


def test_a_job_without_survivors_starts_again_at_once_and_has_all_its_time_whatever_it_claimed_before() -> None:
    world = training(pipelines=1, most=4)
    world.wait(60)
    world.end("digits-w3", exit_code=1)
    world.settle()
    assert world.status.next_resize_time is not None
    for name in ("digits-w0", "digits-w1"):
        world.kill(name)
    world.settle()
    assert sorted(world.workers) == ["digits-w4", "digits-w5"]
    world.warm_up()
    world.commit()
    assert len(world.workers) == 4, "it claims again"
    world.wait(60)
    for member in world.generation.members:
        world.kill(member.name)
    world.settle()
    assert world.status.resize is not None
    assert (world.status.resize.reason, world.status.resize.start_time) == (ResizeReason.START, world.now)


def test_a_job_whose_last_survivor_was_a_claimed_one_that_was_taken_away_starts_again_at_once() -> None:
    world = training(pipelines=1, most=4)
    world.warm_up()
    world.commit()
    assert world.shape == (2, 2)
    for name in ("digits-w0", "digits-w1", "digits-w2"):
        world.kill(name)
    world.settle()
    assert world.status.claimed_ids == [3]
    world.kill("digits-w3")
    world.settle()
    assert (world.status.generation, world.status.next_resize_time, len(world.workers)) == (None, None, 2)


def test_replacements_are_awaited_although_a_claimed_survivor_was_taken_away_meanwhile() -> None:
    world = World(make_job().stages(3).workers(3, most=6))
    world.offered = [Offer(stages=3, bytes_per_worker=1)]
    world.start()
    world.warm_up()
    world.commit()
    assert world.shape == (3, 2)
    for name in ("digits-w0", "digits-w1", "digits-w2", "digits-w3"):
        world.kill(name)
    world.settle()
    joining = set(world.workers) - {"digits-w4", "digits-w5"}
    assert len(joining) == 4
    world.kill("digits-w5")
    world.settle()
    assert world.status.next_resize_time is None and joining < set(world.workers)


def test_a_job_without_survivors_starts_again_in_the_size_of_its_checkpoint() -> None:
    world = World(make_job().stages(4).workers(4).release())
    world.start()
    world.commit(boundary=8, checkpoint=8)
    for name in list(world.workers):
        world.kill(name)
    world.settle()
    world.warm_up()
    assert world.shape == (2, 1)
    assert world.generation.reason is ResizeReason.START
    assert world.generation.layout_generation == 3


def test_too_few_survivors_ask_for_no_replacement_of_a_leaver_that_can_train_again() -> None:
    world = World(make_job().stages(3).workers(6, least=3).checkpoint())
    world.start()
    world.end("digits-w5", exit_code=137)
    world.settle()
    world.part()
    world.commit()
    assert (world.shape, world.status.leaving_ids) == ((3, 1), [3, 4])
    before = set(world.workers)
    for name in ("digits-w0", "digits-w1", "digits-w3"):
        world.end(name, exit_code=137)
    world.settle()
    assert set(world.workers) - before == {"digits-w6"}
    world.warm_up()
    assert {member.name for member in world.generation.members} == {"digits-w2", "digits-w4", "digits-w6"}
