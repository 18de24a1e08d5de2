"""Starting: all workers or none, those that end before the job began, and what puts a start off."""

from dataclasses import replace
from datetime import timedelta

import pytest

from pipetransformer_contract.api import JobStatus
from pipetransformer_contract.api.status import ConditionType, State
from pipetransformer_operator.plan import WorkerPhase, plan
from pipetransformer_operator.plan.draft import DOUBT
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.world import World

pytestmark = pytest.mark.timeout(60)


REJECTED = {"disrupted": True, "rejected": True, "phase": WorkerPhase.FAILED, "message": "no healthy devices"}


def is_replaced_after(world: World, seconds: int) -> None:
    """The one of two workers that ended is created again then, and no sooner."""
    world.settle()
    world.wait(seconds - 1)
    world.settle()
    assert set(world.workers) == {"digits-w0"}
    world.wait(1)
    world.settle()
    assert len(world.workers) == 2


def test_a_start_has_its_whole_time_after_its_size_was_edited() -> None:
    world = World(make_job().stages(2).workers(4))
    world.unschedulable = True
    world.settle()
    world.wait(590)
    world.builder.workers(2)
    world.settle()
    world.wait(599)
    world.settle()
    assert list(world.workers) == ["digits-w4", "digits-w5"]
    world.wait(1)
    world.settle()
    assert not world.workers


def test_the_first_generation_waits_until_every_worker_is_ready() -> None:
    world = World(make_job().stages(4).workers(4))
    world.settle()
    assert len(world.workers) == 4
    assert world.state() == State.STARTING
    world.warm_up(["digits-w0", "digits-w1", "digits-w2"])
    assert world.status.generation is None
    world.warm_up()
    assert world.shape == (4, 1)
    assert world.generation.leader == "digits-w0"
    assert [member.name for member in world.generation.members] == [f"digits-w{i}" for i in range(4)]
    assert world.state() == State.STARTING, "they meet first"
    world.commit()
    assert world.state() == State.RUNNING


def test_a_pod_that_no_scheduler_has_looked_at_is_called_so() -> None:
    world = World(make_job().stages(2).workers(2))
    world.settle()
    world.change("digits-w0", scheduled=False, phase=WorkerPhase.PENDING)
    world.settle()
    running = world.condition(ConditionType.RUNNING)
    assert running.reason == "Unschedulable"
    assert "digits-w0: has no node: no scheduler has reported on it yet" in running.message


@pytest.mark.parametrize("what", ["refusal", "unprotected"])
def test_what_the_cluster_refuses_at_a_start_is_told_once_and_forgotten_when_it_passes(what: str) -> None:
    world = World(make_job().stages(4).workers(4))
    world.settle()
    setattr(world, what, "pods is forbidden: exceeded quota")
    refused = world.observed()
    setattr(world, what, "")
    decided = plan(world.spec, refused, world.now)
    assert [(event.reason, event.message) for event in decided.events] == [
        ("CreationRefused", "pods is forbidden: exceeded quota")
    ]
    world.status = decided.status
    assert world.condition(ConditionType.RUNNING).reason == "CreationRefused"
    assert plan(world.spec, replace(refused, status=world.status), world.now).events == ()
    world.settle()
    assert world.condition(ConditionType.RUNNING).reason == "WaitingForWorkers"


def test_a_start_whose_pods_are_not_set_up_is_put_off_and_one_whose_image_is_slow_is_not() -> None:
    for waiting, stays in (("PodNotSetUp: its volumes", False), ("ContainerCreating", True)):
        world = World(make_job().stages(2).workers(2))
        world.settle()
        world.warm_up(["digits-w0"])
        world.change("digits-w1", why_pending=waiting)
        world.settle()
        world.wait(600)
        world.settle()
        assert bool(world.workers) == stays


def test_a_start_whose_workers_are_placed_has_longer_and_not_for_ever() -> None:
    world = World(make_job().stages(2).workers(2))
    for seconds in (3600, 7200):
        world.settle()
        world.warm_up([min(world.workers)])
        hangs = max(world.workers)
        world.change(hangs, why_pending="PodInitializing: init container fetch is not done")
        world.wait(seconds - 1)
        world.settle()
        assert len(world.workers) == 2
        world.wait(1)
        world.settle()
        running = world.condition(ConditionType.RUNNING)
        assert (world.workers, running.reason) == ({}, "NotReady")
        assert f"{hangs}: PodInitializing: init container fetch is not done" in running.message
        world.wait(120)
    world.settle()
    world.warm_up()
    assert world.shape == (2, 1)


def test_a_job_that_waits_for_room_starts_in_the_size_that_its_spec_is_given_meanwhile() -> None:
    world = World(make_job().stages(2).workers(4, most=8))
    world.unschedulable = True
    world.settle()
    world.warm_up()
    assert len(world.workers) == 4
    world.builder.workers(2, most=2)
    world.metadata_generation += 1
    world.unschedulable = False
    world.settle()
    assert sorted(world.workers) == ["digits-w4", "digits-w5"], "those that wait were told of other sizes"
    assert (world.status.initial_workers, world.status.num_shards) == (2, 2)
    world.warm_up()
    world.commit()
    assert world.shape == (2, 1)
    world.builder.workers(4, most=8)
    world.settle()
    assert (world.status.initial_workers, world.status.num_shards) == (2, 2), "what is in progress goes on as it is"


def test_a_start_that_never_meets_is_tried_again_ever_later() -> None:
    world = World(make_job().stages(2).workers(2))
    world.settle()
    world.warm_up()
    generations = []
    for _ in range(60):
        world.break_group(["digits-w0", "digits-w1"])
        generations.append(world.generation.layout_generation)
        world.wait(1)
    assert generations[-1] == 5, "after 2, 4, 8 and 16 seconds"


def test_a_start_that_cannot_be_placed_whole_holds_nothing_past_its_time() -> None:
    world = World(make_job().stages(2).workers(2))
    world.unschedulable = True
    world.settle()
    world.change("digits-w0", scheduled=True, why_pending="")
    running = world.status.condition(ConditionType.RUNNING)
    assert running is not None and running.reason == "Unschedulable"
    world.wait(600)
    world.settle()
    assert not world.workers
    world.wait(59)
    world.settle()
    assert not world.workers
    world.wait(1)
    world.unschedulable = False
    world.settle()
    world.warm_up()
    assert world.shape == (2, 1)


def test_a_slow_image_does_not_put_a_placed_start_off() -> None:
    world = World(make_job().stages(2).workers(2))
    world.settle()
    world.wait(3599)
    world.settle()
    assert len(world.workers) == 2


@pytest.mark.parametrize(
    ("waiting", "reason"),
    [
        ("ImagePullBackOff: no such image", "ImagePull"),
        ('CreateContainerConfigError: secret "x" not found', "NotReady"),
    ],
)
def test_a_start_whose_containers_cannot_start_holds_no_node_past_its_time(waiting: str, reason: str) -> None:
    world = World(make_job().stages(2).workers(2))
    world.settle()
    world.change("digits-w1", why_pending=waiting)
    world.settle()
    world.wait(600)
    world.settle()
    assert not world.workers
    running = world.status.condition(ConditionType.RUNNING)
    assert running is not None and (running.status, running.reason) == ("False", reason)
    assert waiting in running.message
    world.wait(60)
    world.settle()
    world.warm_up()
    assert world.shape == (2, 1)


def test_a_worker_that_fails_in_a_start_is_replaced_ever_later() -> None:
    world = World(make_job().stages(2).workers(2))
    world.settle()
    for seconds in (10, 20, 40):
        world.end(max(world.workers), exit_code=1)
        is_replaced_after(world, seconds)
    world.warm_up()
    assert (world.status.failures, world.status.resize_failures) == (3, 0)


def test_a_start_that_loses_one_worker_after_the_other_gives_all_back_and_says_why() -> None:
    world = World(make_job().stages(2).workers(2))
    world.settle()
    world.warm_up(["digits-w0"])
    for seconds in (30, 60, 120, 240):
        world.change(max(world.workers), node="bad", **REJECTED)
        until = world.now + timedelta(seconds=seconds) + DOUBT
        assert world.turn().unfit == {"bad": until}, "its next workers keep off that node"
        is_replaced_after(world, seconds)
    world.change(max(world.workers), **REJECTED)
    world.settle()
    running = world.condition(ConditionType.RUNNING)
    assert (world.workers, running.reason) == ({}, "WorkerFailed")
    assert (
        "workers ended before the start 5 times in a row. The last: digits-w5 (taken away: no healthy devices)"
        in running.message
    )
    assert running.message.endswith("next attempt in 60 s"), "that is the first start that was put off"
    world.wait(60)
    world.settle()
    world.change(max(world.workers), **REJECTED)
    world.settle()
    world.wait(30)
    world.settle()
    world.warm_up()
    assert (world.shape, world.status.failures) == ((2, 1), 0)


def test_workers_that_one_node_rejects_one_after_the_other_are_one_incident_and_the_others_stay_warm() -> None:
    world = World(make_job().stages(2).workers(16))
    world.settle()
    world.warm_up([f"digits-w{number}" for number in range(8)])
    for number in range(8, 16):
        world.change(f"digits-w{number}", node="bad", **REJECTED)
        world.settle()
        assert world.status.resize is not None and world.status.resize.replacements == 1
        assert len(world.workers) == 8 + 15 - number
        world.wait(0.2)
    world.wait(29)
    world.settle()
    assert len(world.workers) == 8, "half a minute after the last one"
    world.wait(1)
    world.settle()
    world.warm_up()
    assert (world.shape, world.status.failures) == ((2, 8), 0)


def test_workers_that_fail_one_after_the_other_are_one_failure_until_they_are_replaced() -> None:
    world = World(make_job().stages(2).workers(8))
    world.settle()
    for failures in (1, 2):
        for name in sorted(world.workers):
            world.end(name, exit_code=1)
            assert [event.reason for event in world.turn().events] == ["WorkerLost"]
            world.wait(0.1)
        assert (world.workers, world.status.failures) == ({}, failures)
        world.wait(10 * failures)
        world.settle()
        assert len(world.workers) == 8


def test_workers_that_a_long_start_loses_now_and_then_are_not_in_a_row_and_yet_not_replaced_for_ever() -> None:
    world = World(make_job().stages(2).workers(4))
    world.settle()
    world.warm_up(["digits-w0", "digits-w1", "digits-w2"])
    for number in range(3, 20):
        assert set(world.workers) == {"digits-w0", "digits-w1", "digits-w2", f"digits-w{number}"}
        world.wait(1800)
        world.settle()
        world.change(f"digits-w{number}", disrupted=True, message="preempted")
        world.settle()
        world.wait(30)
        world.settle()
    assert world.workers == {}
    assert "ended before the start 17 times. The last: digits-w19" in world.condition(ConditionType.RUNNING).message


def test_a_pod_that_vanishes_from_a_long_start_is_created_again_while_the_others_stay() -> None:
    world = World(make_job().stages(2).workers(8))
    world.settle()
    world.warm_up([f"digits-w{number}" for number in range(7)])
    world.wait(1800)
    world.settle()
    world.kill("digits-w7")
    world.settle()
    assert {f"digits-w{number}" for number in range(7)} < set(world.workers)
    world.warm_up()
    assert world.shape == (2, 4)


def test_a_start_whose_workers_nodes_are_lost_ever_again_gives_all_back() -> None:
    world = World(make_job().stages(2).workers(4))
    world.settle()
    world.warm_up(["digits-w0", "digits-w1", "digits-w2"])
    for number in range(3, 20):
        name = f"digits-w{number}"
        assert set(world.workers) == {"digits-w0", "digits-w1", "digits-w2", name}
        world.wait(1800)
        world.settle()
        world.silent |= {name, world.workers[name].uid}
        world.change(name, node_lost=True, node="spot")
        world.settle()
        world.wait(30)
        world.settle()
    assert not world.workers
    assert "workers ended before the start 17 times" in world.condition(ConditionType.RUNNING).message


def test_an_image_that_a_registry_refuses_once_is_tried_again_although_the_init_containers_took_long() -> None:
    world = World(make_job().stages(2).workers(2))
    world.settle()
    world.warm_up(["digits-w0"])
    for wait in (900, 599):
        world.wait(wait)
        world.settle()
        world.change("digits-w1", why_pending="ErrImagePull: 429")
        world.settle()
        assert set(world.workers) == {"digits-w0", "digits-w1"}
    world.change("digits-w1", why_pending="")
    world.settle()
    world.wait(2099)
    world.settle()
    assert set(world.workers) == {"digits-w0", "digits-w1"}, "an hour in all"
    world.change("digits-w1", why_pending="ErrImagePull: 429")
    world.settle()
    world.wait(599)
    world.settle()
    assert world.workers
    world.wait(1)
    world.settle()
    assert (world.workers, world.condition(ConditionType.RUNNING).reason) == ({}, "ImagePull")


def test_a_start_that_waited_long_for_nodes_has_no_more_time_for_what_is_slow_on_them() -> None:
    world = World(make_job().stages(2).workers(2))
    world.unschedulable = True
    while world.status.resize_failures < 5:
        world.wait(60)
        world.settle()
    world.unschedulable = False
    while not world.workers:
        world.wait(60)
        world.settle()
    assert world.status.resize is not None and world.status.resize.deadline == world.now + timedelta(hours=1)


def test_a_job_whose_status_another_client_emptied_starts_again_from_its_checkpoint_with_new_workers() -> None:
    world = World(make_job().stages(4).workers(4).checkpoint())
    world.start()
    world.commit(boundary=6, checkpoint=6)
    before = world.generation.layout_generation
    world.status = JobStatus()
    world.settle()
    assert set(world.workers) == {f"digits-w{number}" for number in range(4, 8)}
    world.warm_up()
    assert world.generation.layout_generation > before, "workers and storage would take an old number for an old layout"
    world.commit()
    assert world.generation.confirmed_generation > before
    assert world.status.checkpoint is not None and world.status.checkpoint.boundary == 6
