"""A job that ends before its last step tells its members first, waits for their checkpoint, and says what is lost."""

import pytest

from pipetransformer_contract.api.labels import QUEUE_LABEL
from pipetransformer_contract.api.status import ConditionType, State
from pipetransformer_contract.messages import Outcome
from pipetransformer_operator.plan import EventType
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.fake_queue import QUEUE, FakeQueue
from tests.testkit.operator.world import World

LOCATION = "spec.checkpoint.location: /checkpoints: [Errno 28] No space left on device"


def stopping(how: str, pipelines: int = 1) -> World:
    """A job that trained ten steps, and a checkpoint of the first is durable; its members do not end by themselves."""
    builder = make_job().stages(2).workers(2 * pipelines).checkpoint()
    if how == "evicted":
        builder.label(QUEUE_LABEL, QUEUE)
    if how == "late":
        builder.set("runPolicy.activeDeadlineSeconds", 600)
    world = World(builder)
    if how == "evicted":
        world.queue = FakeQueue()
    world.start()
    world.commit(checkpoint=0)
    world.commit(steps=10)
    world.stubborn = set(world.workers)
    stop(world, how)
    world.settle()
    return world


def stop(world: World, how: str) -> None:
    match how:
        case "suspended":
            world.builder.suspended()
        case "deleted":
            world.kept_by = ("example.com/parent",)
        case "evicted":
            assert world.queue is not None
            world.queue.evicted.add(world.status.quota_requests[0].name)
        case "late":
            world.wait(600)


def warnings(world: World) -> list[str]:
    return [event.message for event in world.told if event.type is EventType.WARNING and event.reason == "StepsLost"]


def training(world: World) -> set[str]:
    """Members of the first generation that still hold their accelerators."""
    return {name for name in ("digits-w0", "digits-w1") if name in world.workers and world.workers[name].holds}


EVERY_WAY = pytest.mark.parametrize("how", ["suspended", "deleted", "evicted", "late"])


@EVERY_WAY
def test_members_are_told_and_kept_until_they_have_left_a_checkpoint(how: str) -> None:
    world = stopping(how)
    assert world.status.stop is not None
    assert len(world.workers) == 2 and not world.deleted
    world.wait(60)
    world.stubborn = set()
    world.settle()
    assert not training(world) and not world.deleted_alive
    assert not warnings(world)


@EVERY_WAY
def test_members_that_do_not_end_are_deleted_after_the_time_of_the_spec_and_the_lost_steps_are_told(how: str) -> None:
    world = stopping(how)
    world.wait(299)
    world.settle()
    assert len(world.workers) == 2
    world.wait(1)
    world.settle()
    assert not training(world)
    report, checkpoint = world.report, world.status.checkpoint
    assert report is not None and checkpoint is not None
    assert warnings(world) == [
        f"10 steps are lost: step {report.step} was reached, and the newest durable checkpoint is of step"
        f" {checkpoint.step}"
    ]


def test_a_job_that_is_trained_while_it_is_being_suspended_is_not_suspended() -> None:
    world = stopping("suspended")
    assert world.condition(ConditionType.SUSPENDED).status == "True"
    world.finish(Outcome.SUCCEEDED)
    suspended = world.condition(ConditionType.SUSPENDED)
    assert world.state() is State.COMPLETE
    assert (suspended.status, suspended.reason, suspended.message) == ("False", "Finished", "")


def test_a_condition_says_that_the_storage_takes_no_checkpoint() -> None:
    world = stopping("suspended")
    world.unsaved = {"digits-w1": LOCATION}
    world.settle()
    message = world.condition(ConditionType.SUSPENDED).message
    assert f"digits-w1: {LOCATION}" in message and "is of step 11" in message
    assert len(world.workers) == 2


def test_the_queues_condition_says_it_as_well() -> None:
    world = stopping("evicted")
    world.unsaved = {"digits-w1": LOCATION}
    world.settle()
    running = world.condition(ConditionType.RUNNING)
    assert running.reason == "QuotaLost" and LOCATION in running.message
    assert "workers left: 2; until 2026-01-01T" in running.message


def test_a_job_without_a_checkpoint_says_what_is_lost_before_its_pods_go() -> None:
    world = World(make_job().stages(2).workers(2).set("runPolicy.activeDeadlineSeconds", 600))
    world.start()
    world.commit(steps=10)
    world.wait(600)
    decided = world.turn()
    assert warnings(world) == ["All 11 steps will be lost with the pods: the job has no spec.checkpoint"]
    assert not decided.delete
    world.settle()
    assert not world.workers and world.state() is State.FAILED


def test_a_job_past_its_deadline_is_not_deleted_before_its_members_have_left_their_checkpoint() -> None:
    world = World(make_job().stages(2).workers(2).checkpoint().set("runPolicy.ttlSecondsAfterFinished", 0))
    world.builder.set("runPolicy.activeDeadlineSeconds", 600)
    world.start()
    world.stubborn = set(world.workers)
    stop(world, "late")
    assert not world.turn().expired and world.state() is State.FAILED
    world.stubborn = set()
    world.settle()
    assert world.turn().expired


def test_the_time_of_a_stop_begins_anew_with_an_operator_that_may_have_to_tell_it_first() -> None:
    world = stopping("suspended")
    world.wait(400)
    world.since = world.now
    world.settle()
    assert len(world.workers) == 2


def test_a_member_that_is_lost_while_it_stops_is_left_out_and_the_others_save_the_state() -> None:
    world = stopping("suspended", pipelines=2)
    before = world.status.layout_generation
    world.kill("digits-w3")
    world.settle()
    assert (world.status.layout_generation, world.shape) == (before + 1, (2, 1))
    assert world.status.stop is not None and world.status.failures == 0
    world.stubborn = set()
    world.settle()
    assert not world.workers and not warnings(world)


def test_survivors_that_are_too_few_to_save_anything_are_given_back_at_once() -> None:
    world = stopping("suspended")
    world.kill("digits-w1")
    world.settle()
    assert not world.workers
    assert [words.partition(":")[0] for words in warnings(world)] == ["10 steps are lost"]


def test_the_checkpoint_of_a_worker_that_left_earlier_ends_no_stop() -> None:
    world = World(make_job().stages(1).workers(2).checkpoint())
    world.lingering = True
    world.start()
    world.commit(steps=10)
    world.end("digits-w1", 143, '{"outcome": "Failed", "reason": "Stopped", "savedStep": 11}')
    world.change("digits-w1", terminating=True)
    world.settle()
    world.commit(steps=10)
    world.stubborn = set(world.workers)
    world.builder.suspended()
    world.settle()
    assert not world.workers["digits-w0"].terminating


def test_a_member_that_has_left_the_checkpoint_of_all_ends_the_stop() -> None:
    world = stopping("suspended", pipelines=2)
    world.end("digits-w3", 143, '{"outcome": "Failed", "reason": "Stopped", "savedStep": 21}')
    world.settle()
    assert not any(worker.holds for worker in world.workers.values()), "the others have nothing left to save"
    assert not warnings(world)


def test_workers_that_are_to_join_are_not_waited_for() -> None:
    builder = make_job().stages(2).workers(2, most=4).checkpoint()
    world = World(builder)
    world.start()
    world.commit(checkpoint=0)
    assert len(world.workers) == 4
    world.stubborn = set(world.workers)
    builder.suspended()
    world.settle()
    assert sorted(world.workers) == ["digits-w0", "digits-w1"]


def test_a_job_that_is_resumed_while_it_stops_starts_once_its_members_have_ended() -> None:
    world = stopping("suspended")
    world.builder.suspended(False)
    world.settle()
    assert world.state() is State.SUSPENDED and world.status.stop is not None
    world.stubborn = set()
    world.settle()
    assert world.status.stop is None and sorted(world.workers) == ["digits-w2", "digits-w3"]


def test_quota_that_is_granted_again_meanwhile_does_not_take_the_stop_back() -> None:
    world = stopping("evicted")
    assert world.queue is not None
    world.queue.evicted.clear()
    world.settle()
    assert world.status.stop is not None and world.status.failures == 0
    world.stubborn = set()
    world.settle()
    assert world.status.stop is None and world.status.failures == 0
    assert "digits-w0" not in world.workers


def test_preemption_of_a_whole_job_tells_how_many_steps_its_checkpoint_lacks() -> None:
    world = World(make_job().stages(2).workers(2).checkpoint())
    world.start()
    world.commit(checkpoint=0)
    world.commit(steps=10)
    for name in list(world.workers):
        world.kill(name)
    world.settle()
    assert [words.partition(":")[0] for words in warnings(world)] == ["10 steps are lost"]


@pytest.mark.parametrize("with_checkpoints", [True, False])
def test_a_job_that_loses_all_workers_before_its_first_checkpoint_says_that_all_steps_are_lost(
    with_checkpoints: bool,
) -> None:
    job = make_job().stages(2).workers(2)
    world = World(job.checkpoint() if with_checkpoints else job)
    world.start()
    world.commit(steps=10)
    for name in list(world.workers):
        world.kill(name)
    world.settle()
    assert warnings(world) == ["11 steps are lost: step 11 was reached, and no checkpoint is durable"]


@pytest.mark.parametrize("how", ["killed while they are deleted", "on nodes that are gone"])
def test_steps_of_members_that_can_no_longer_write_a_checkpoint_are_told_at_once(how: str) -> None:
    world = World(make_job().stages(2).workers(2).checkpoint())
    world.start()
    world.commit(checkpoint=0)
    world.commit(steps=10)
    for name in list(world.workers):
        if how == "on nodes that are gone":
            world.silent.add(name)
            world.change(name, node_lost=True, node_gone=True)
        else:
            world.end(name, exit_code=137)
            world.change(name, terminating=True)
    world.wait(50)
    world.settle()
    assert [words.partition(":")[0] for words in warnings(world)] == ["10 steps are lost"]


@pytest.mark.parametrize(("redone", "told"), [(4, ["4 steps are lost"]), (1, ["1 step is lost"]), (0, [])])
def test_after_a_preemption_the_next_start_shows_whether_the_evicted_workers_left_a_checkpoint(
    redone: int, told: list[str]
) -> None:
    world = World(make_job().stages(2).workers(2).checkpoint())
    world.start()
    world.commit(checkpoint=0)
    world.commit(steps=10)
    for name in list(world.workers):
        world.change(name, terminating=True, disrupted=True)
    world.settle()
    assert not warnings(world), "they have their grace period for a checkpoint"
    world.bury()
    world.warm_up()
    world.commit(steps=-redone)
    assert [words.partition(":")[0] for words in warnings(world)] == told
    world.commit()
    assert world.status.unsettled_step is None and len(warnings(world)) == len(told)


def test_steps_are_not_lost_twice() -> None:
    world = stopping("suspended")
    world.wait(300)
    world.settle()
    world.builder.suspended(False)
    world.settle()
    world.warm_up()
    world.stubborn = set(world.workers)
    world.builder.suspended()
    world.settle()
    world.wait(300)
    world.settle()
    assert len(warnings(world)) == 1
