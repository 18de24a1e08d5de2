"""GPUs that are held without training, by what they wait for, at each moment of a job in the plan's world."""

from collections.abc import Mapping

import pytest

from pipetransformer_contract.messages import Offer, Outcome, Upcoming
from pipetransformer_operator.metrics.idle import IdleReason, idle_gpus
from pipetransformer_operator.plan import WorkerPhase
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.world import World, training

pytestmark = pytest.mark.timeout(60)


def idle(world: World) -> Mapping[IdleReason, int]:
    """As the metrics see the world after its newest turn."""
    return idle_gpus(world.observed(), world.status)


def test_a_start_waits_for_its_workers_and_then_for_the_gang() -> None:
    world = World(make_job().stages(2).workers(4))
    world.settle()
    assert idle(world) == {IdleReason.STARTING: 4}
    world.warm_up(["digits-w0", "digits-w1"])
    assert idle(world) == {IdleReason.STARTING: 2, IdleReason.GANG: 2}
    world.warm_up()
    assert idle(world) == {IdleReason.STARTING: 4}, "the members read what they go on from"
    world.commit()
    assert idle(world) == {}


def test_a_pod_without_a_node_holds_nothing() -> None:
    world = World(make_job().stages(2).workers(4))
    world.unschedulable = True
    world.settle()
    assert idle(world) == {}
    world.change("digits-w0", scheduled=True, phase=WorkerPhase.RUNNING)
    world.warm_up(["digits-w0"])
    assert idle(world) == {IdleReason.GANG: 1}
    world.change("digits-w1", scheduled=True)
    assert idle(world) == {IdleReason.GANG: 1, IdleReason.STARTING: 1}, "one that loads its image holds its GPU"


def test_members_that_lost_each_other_regroup() -> None:
    world = training()
    world.break_group(["digits-w0", "digits-w1"])
    assert idle(world) == {IdleReason.REGROUPING: 2}
    world.break_group(world.workers)
    assert idle(world) == {IdleReason.REGROUPING: 4}
    world.commit()
    assert idle(world) == {}


def test_survivors_without_a_layout_wait_for_the_gang() -> None:
    world = training(pipelines=1)
    world.commit(offered=[Offer(stages=2, bytes_per_worker=1)])
    world.end("digits-w1", exit_code=1)
    world.settle()
    assert idle(world) == {IdleReason.GANG: 1, IdleReason.STARTING: 1}


def test_leavers_wait_for_the_storage_and_then_their_pods_end() -> None:
    world = World(make_job().stages(4).workers(4).release())
    world.start()
    world.lingering = True
    world.commit(boundary=8)
    assert idle(world)[IdleReason.REGROUPING] == 4, "the leavers, too"
    world.commit()
    world.part()
    left = 4 - world.generation.layout.workers
    assert idle(world) == {IdleReason.STORAGE: left}
    world.commit(checkpoint=8)
    assert idle(world) == {IdleReason.STOPPING: left}
    world.bury()
    assert idle(world) == {}


def test_what_on_pack_hold_leaves_over_is_spare() -> None:
    world = World(make_job().stages(4).workers(4).on_pack("Hold"))
    world.start()
    world.commit(boundary=8)
    world.commit()
    world.part()
    assert idle(world) == {IdleReason.SPARE: 4 - world.generation.layout.workers}


def test_a_job_that_waits_for_a_larger_model_says_so() -> None:
    world = training(pipelines=1)
    world.commit(offered=[Offer(stages=4, bytes_per_worker=1)], upcoming=Upcoming(step=30, level=0, waits=True))
    assert idle(world) == {IdleReason.LEVEL: 2}


def test_a_job_that_makes_no_step_is_stalled() -> None:
    world = training()
    world.wait(3600)
    world.settle()
    assert idle(world) == {IdleReason.STALLED: 4}


def test_workers_that_are_told_to_stop_are_stopping() -> None:
    world = World(make_job().stages(2).workers(4).checkpoint())
    world.start()
    world.stubborn = set(world.workers)
    world.builder.suspended()
    world.settle()
    assert idle(world) == {IdleReason.STOPPING: 4}


def test_a_pod_that_has_ended_and_is_kept_holds_nothing() -> None:
    world = training()
    for name in list(world.workers):
        world.end(name, exit_code=0, message='{"outcome": "Succeeded"}')
    world.finish(Outcome.SUCCEEDED)
    assert world.status.finished
    assert idle(world) == {}
