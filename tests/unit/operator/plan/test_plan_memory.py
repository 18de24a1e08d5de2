"""A layout whose workers have too little memory: packed ones are left for longer ones, the spec's own is the user's."""

import json

import pytest

from pipetransformer_contract.api.status import ConditionType, State, TooShort
from pipetransformer_contract.messages import ResizeReason
from pipetransformer_operator.plan import EventType
from tests.testkit.operator.builders import JobBuilder, make_job
from tests.testkit.operator.world import World

pytestmark = pytest.mark.timeout(60)


def packed(builder: JobBuilder) -> World:
    """A job that was packed to half its stages when the eighth block froze."""
    world = World(builder)
    world.start()
    before = world.generation.stages
    world.commit(boundary=8, checkpoint=8)
    assert world.generation.stages == before // 2
    world.commit(checkpoint=8)
    world.leave()
    return world


def run_short(world: World, name: str, stages: int) -> None:
    """The worker's first round in pipelines of so many stages needs more memory than there is."""
    message = "forward of blocks.9 failed: OutOfMemoryError: CUDA out of memory"
    end = {"outcome": "Failed", "reason": "OutOfMemory", "message": message, "stages": stages}
    world.end(name, exit_code=1, message=json.dumps(end))


def test_a_packed_job_goes_back_to_longer_pipelines_until_more_is_frozen() -> None:
    world = packed(make_job().stages(4).workers(4))
    assert world.shape == (2, 2)
    run_short(world, "digits-w1", stages=2)
    world.settle()
    assert (world.shape, world.generation.reason) == ((3, 1), ResizeReason.UNDO), "what the three that are left carry"
    words = "OutOfMemory: forward of blocks.9 failed: OutOfMemoryError: CUDA out of memory"
    assert [(event.type, event.message) for event in world.told if event.reason == "OutOfMemory"] == [
        (
            EventType.WARNING,
            f"Pipelines of 2 stages need more memory than digits-w1 has ({words});"
            " the job uses longer ones until more than 8 layers are frozen",
        )
    ]
    run_short(world, "digits-w3", stages=2)  # it had ended at the same time, and is seen only now
    world.settle()
    for _ in range(2):
        world.warm_up()
        world.commit()
    assert (world.shape, world.status.failures) == ((4, 1), 0)
    assert world.status.too_short == TooShort(stages=2, boundary=8)
    world.commit()
    assert (world.shape, world.state()) == ((4, 1), State.RUNNING)

    world.commit(boundary=10, checkpoint=10)
    assert world.shape == (2, 2), "less needs memory now"


def test_a_job_that_gave_workers_back_waits_for_as_many_as_it_began_with() -> None:
    world = packed(make_job().stages(4).workers(4).release())
    assert (world.shape, len(world.workers)) == ((2, 1), 2)
    run_short(world, "digits-w1", stages=2)
    world.settle()
    assert len(world.workers) == 4 and world.workers["digits-w0"].alive, "it holds its state"
    world.warm_up()
    world.commit()
    assert (world.shape, world.status.failures) == ((4, 1), 0)


def test_a_job_whose_workers_all_ran_out_of_memory_starts_again_in_its_own_layout() -> None:
    world = packed(make_job().stages(4).workers(4).checkpoint())
    for name in sorted(world.workers):
        run_short(world, name, stages=2)
    world.settle()
    world.warm_up()
    assert (world.shape, world.generation.reason, world.status.failures) == ((4, 1), ResizeReason.START, 0)


def test_a_job_that_was_packed_into_one_stage_goes_back_too() -> None:
    world = packed(make_job().stages(2).workers(2))
    run_short(world, "digits-w1", stages=1)
    world.settle()
    world.warm_up()
    world.commit()
    assert (world.shape, world.status.failures) == ((2, 1), 0)
    assert world.status.too_short == TooShort(stages=1, boundary=8)


def test_a_leaver_of_the_longest_pipelines_that_ran_out_of_memory_rules_out_no_layout() -> None:
    world = World(make_job().stages(4).workers(4).release().checkpoint())
    world.start()
    world.commit(boundary=8, checkpoint=8)
    assert [member.name for member in world.generation.leavers] == ["digits-w2", "digits-w3"]
    run_short(world, "digits-w3", stages=4)
    world.settle()
    assert (world.status.too_short, world.status.failures, world.status.finished) == (None, 1, False)


def test_a_job_that_its_own_layout_leaves_too_little_memory_has_failed() -> None:
    world = World(make_job().stages(4).workers(4))
    world.start()
    run_short(world, "digits-w1", stages=4)
    world.settle()
    failed = world.condition(ConditionType.FAILED)
    assert (world.state(), failed.reason) == (State.FAILED, "OutOfMemory")
    assert "CUDA out of memory" in failed.message


def test_a_job_that_was_suspended_may_have_larger_accelerators_and_packs_again() -> None:
    builder = make_job().stages(4).workers(4).checkpoint()
    world = packed(builder)
    run_short(world, "digits-w1", stages=2)
    world.settle()
    world.warm_up()
    world.commit(checkpoint=8)
    assert bool(world.status.too_short) and world.generation.stages > 2
    builder.set("suspend", True)
    world.metadata_generation += 1
    world.settle()
    for name in list(world.workers):
        world.kill(name)
    builder.set("suspend", False)
    world.metadata_generation += 1
    world.settle()
    world.warm_up()
    assert (world.generation.stages, bool(world.status.too_short)) == (2, False)
