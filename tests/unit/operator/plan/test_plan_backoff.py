"""What waits after attempts that failed, and what does not: a claim's wait holds up nothing that the job needs."""

from datetime import timedelta

import pytest

from pipetransformer_contract.api.status import ConditionStatus, ConditionType
from pipetransformer_contract.messages import Offer
from pipetransformer_operator.kube.node_health.health import NodeHealth
from pipetransformer_operator.plan import WorkerPhase
from tests.testkit.operator.builders import JobBuilder, make_job
from tests.testkit.operator.world import World

pytestmark = pytest.mark.timeout(60)


def asleep(job: JobBuilder) -> World:
    """A job that trains in its starting size and whose claims found no node until it waits an hour for the next."""
    world = World(job)
    world.settle()
    world.warm_up()
    world.unschedulable = True
    world.commit()
    for minutes in (1, 2, 4, 8, 16, 32, 60):
        world.wait(120)
        world.settle()
        assert world.status.next_resize_time == world.now + timedelta(minutes=minutes)
        if minutes < 60:
            world.wait(60 * minutes)
            world.settle()
    world.unschedulable = False
    return world


def test_claims_keep_off_a_node_that_rejected_one_however_late_the_next_is() -> None:
    world = World(make_job().stages(1).workers(2, most=8))
    nodes = NodeHealth(lambda: world.now)
    world.start()
    for minutes in (1, 2, 4, 8, 16, 32, 60):
        world.change(max(world.workers), node="bad", disrupted=True, rejected=True, phase=WorkerPhase.FAILED)
        nodes.doubt("uid", {}, world.turn().unfit)
        world.settle()
        assert len(world.workers) == 2
        world.wait(60 * minutes)
        assert nodes.unfit("uid") == ["bad"]
        world.settle()
        assert len(world.workers) == 3, "this is when a pod is made, and told whom to keep off"
    world.wait(60)
    assert nodes.unfit("uid") == []


def test_what_a_job_lost_of_its_own_comes_back_at_once_although_it_sleeps_over_a_claim() -> None:
    world = asleep(make_job().stages(1).workers(2, most=8))
    world.end("digits-w1", exit_code=1)
    world.settle()
    world.commit()
    world.warm_up()
    assert world.shape == (1, 2)


def test_survivors_that_are_too_few_get_replacements_at_once_although_the_job_sleeps_over_a_claim() -> None:
    world = asleep(make_job().stages(2).workers(2, least=2, most=8))
    world.end("digits-w1", exit_code=1)
    world.settle()
    world.warm_up()
    assert (world.shape, world.generation.layout_generation) == ((2, 1), 2)


@pytest.mark.parametrize("end", [{"disrupted": True}, {"phase": WorkerPhase.FAILED, "exit_code": 1}])
@pytest.mark.parametrize("checkpoint", [None, 0])
def test_a_claimed_worker_without_which_nobody_trains_is_replaced_at_once_although_the_job_sleeps_over_a_claim(
    end: dict[str, object], checkpoint: int | None
) -> None:
    """It took the place of one of the starting size, for whom there was no node."""
    job = make_job().stages(2).workers(2, least=2, most=4)
    world = World(job if checkpoint is None else job.checkpoint())
    world.offered = [Offer(stages=2, bytes_per_worker=1)]
    world.start()
    world.warm_up()
    world.commit(checkpoint=checkpoint)
    world.end("digits-w0", exit_code=1)
    world.unschedulable = True
    world.settle()
    world.commit(checkpoint=checkpoint)
    world.part()
    for minutes in (1, 2, 4, 8):
        world.wait(120)
        world.settle()
        world.commit(checkpoint=checkpoint)
        assert world.status.next_resize_time == world.now + timedelta(minutes=minutes)
        if minutes < 8:
            world.wait(60 * minutes)
            world.settle()
    assert sorted(world.workers) == ["digits-w1", "digits-w2"] and world.status.claimed_ids == [2]
    world.unschedulable = False
    world.change("digits-w2", **end)
    world.settle()
    assert len(world.workers) == 2 and world.status.claimed_ids == [], "of the starting size"
    world.warm_up()
    world.commit()
    assert (world.shape, world.generation.confirmed, world.status.failures) == ((2, 1), True, 1 + ("exit_code" in end))


def test_survivors_that_are_too_few_say_when_the_next_attempt_begins() -> None:
    world = World(make_job().stages(2).workers(2, least=2))
    world.start()
    world.unschedulable = True
    world.end("digits-w1", exit_code=1)
    world.settle()
    world.wait(600)
    world.settle()
    assert world.status.next_resize_time == world.now + timedelta(seconds=60)
    running = world.condition(ConditionType.RUNNING)
    assert running.reason == "Recovering"
    assert running.message.endswith("wait for replacements: the next attempt begins at 2026-01-01T00:11:00Z")


def test_a_job_whose_claim_was_taken_away_says_when_it_tries_the_next() -> None:
    world = World(make_job().stages(1).workers(1, most=2))
    world.start()
    world.warm_up()
    world.commit()
    world.change("digits-w1", disrupted=True)
    world.settle()
    world.commit()
    resizing = world.condition(ConditionType.RESIZING)
    assert (resizing.status, resizing.reason) == (ConditionStatus.FALSE, "Settled")
    assert resizing.message.endswith("the next attempt begins at 2026-01-01T00:01:00Z")
    assert world.turn().requeue_after == 60
    world.wait(60)
    world.settle()
    world.warm_up()
    world.commit()
    assert (world.shape, world.condition(ConditionType.RESIZING).message) == ((1, 2), "")


def test_workers_on_a_node_that_is_cordoned_are_replaced_at_once_although_the_job_sleeps_over_a_claim() -> None:
    world = asleep(make_job().stages(2).workers(2, most=8))
    world.change("digits-w1", draining=True)
    assert world.turn().requeue_after == 0.1
    world.settle()
    world.warm_up()
    assert "digits-w1" not in {member.name for member in world.generation.members}
    assert world.shape == (2, 1)


def test_a_preempted_claim_beside_a_lost_worker_of_the_starting_size_holds_up_its_replacement_no_longer() -> None:
    world = World(make_job().stages(1).workers(2, most=3))
    world.start()
    world.warm_up()
    world.commit()
    assert world.shape == (1, 3)
    for name in ("digits-w1", "digits-w2"):
        world.change(name, disrupted=True)
    world.settle()
    world.commit()
    world.warm_up()
    assert world.shape == (1, 2)
