"""Scenarios of `plan()`: a ceiling that is moved while a job starts, trains or waits; and what counts as saved."""

import pytest

from pipetransformer_contract.api.status import ConditionType
from pipetransformer_contract.messages import Outcome, ResizeReason
from pipetransformer_operator.plan import WorkerPhase
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.queued import queued
from tests.testkit.operator.world import World

pytestmark = pytest.mark.timeout(60)


def test_a_lower_ceiling_makes_the_job_smaller() -> None:
    world = World(make_job().stages(2).workers(4))
    world.start()
    world.builder.workers(2, most=2)
    world.settle()
    assert world.shape == (2, 1)
    assert world.generation.reason is ResizeReason.SPEC


def test_a_ceiling_moved_while_a_generation_is_committed_waits_until_it_is_confirmed() -> None:
    world = World(make_job().stages(2).workers(2, most=4))
    world.start()
    world.warm_up()
    assert (world.shape, world.generation.confirmed) == ((2, 2), False)
    world.builder.workers(2, most=2)
    world.settle()
    assert world.generation.layout_generation == 2
    world.commit()
    assert (world.shape, world.generation.reason) == ((2, 1), ResizeReason.SPEC)


def scale(world: World, replicas: int) -> None:
    """As `kubectl scale`, and what follows from it."""
    world.builder.set("elasticPolicy.maxWorkers", replicas)
    world.metadata_generation += 1
    world.settle()
    for _ in range(3):
        world.warm_up()
        if world.status.generation is not None:
            world.commit(checkpoint=world.report.boundary if world.report else 0)
            world.leave()


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize(("most", "shape"), [(1, (1, 1)), (2, (2, 1)), (3, (2, 1)), (5, (2, 2)), (7, (2, 3))])
def test_a_scale_is_a_ceiling_below_which_the_largest_whole_layout_is_taken(
    most: int, shape: tuple[int, int], workers: int
) -> None:
    world = World(make_job().stages(2).workers(workers).set("elasticPolicy.maxPipelines", 4))
    world.start()
    scale(world, most)
    assert world.shape == shape
    assert len(world.workers) == shape[0] * shape[1]
    assert world.status.failures == 0


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_job_below_a_minimum_that_was_raised_replaces_a_lost_worker_and_grows_once_there_is_room(
    checkpoint: bool,
) -> None:
    builder = make_job().stages(2).workers(2, most=4)
    world = World(builder.checkpoint() if checkpoint else builder)
    world.free = world.room = world.reach = 0
    world.start()
    world.builder.workers(4, least=4, most=4)
    world.metadata_generation += 1
    world.settle()
    assert world.shape == (2, 1), "there is no room to grow"

    world.end("digits-w0", exit_code=1)
    world.settle()
    world.warm_up()

    assert world.shape == (2, 1)
    assert [member.name for member in world.generation.members] == ["digits-w1", "digits-w2"]
    world.commit()
    world.free = world.room = world.reach = 8
    for _ in range(10):
        world.wait(60)
        world.warm_up()
        world.commit()
    assert (world.shape, world.status.failures) == ((2, 2), 1)


def test_what_a_ceiling_takes_is_not_saved_by_packing() -> None:
    world = World(make_job().stages(4).workers(8, most=4).release())
    world.start()
    world.wait(100)
    assert (world.status.gpus.held, world.status.gpus.saved) == (4, 0)
    scale(world, 8)
    world.commit(boundary=8)
    world.commit(checkpoint=8)
    world.leave()
    assert (world.shape, world.status.gpus.held, world.status.gpus.saved) == ((2, 2), 4, 4)
    world.wait(100)
    scale(world, 4)
    assert (world.status.gpus.held, world.status.gpus.saved) == (4, 0), "one pipeline of four stages holds as many"
    world.wait(100)
    scale(world, 2)
    assert (world.status.gpus.held, world.status.gpus.saved) == (2, 0), "four stages would not be there"
    world.wait(100)
    world.finish(Outcome.SUCCEEDED)
    assert world.status.gpu_seconds_saved == pytest.approx(400)


@pytest.mark.parametrize("how", ["suspended", "resumed", "sent back"])
def test_a_job_whose_workers_all_end_saves_nothing_while_its_pods_are_kept(how: str) -> None:
    world, queue = queued(make_job().stages(4).workers(8).release())
    world.start()
    world.commit(boundary=8)
    world.commit(checkpoint=8)
    for name in sorted(world.workers)[4:]:
        world.change(name, phase=WorkerPhase.SUCCEEDED)
        del world.workers[name]
    world.settle()
    assert world.status.gpus.saved == 4
    world.wait(100)
    if how == "sent back":
        queue.size = 0
        queue.evicted.add("digits-q0")
    else:
        world.builder.suspended()
    world.settle()
    world.builder.suspended(how == "suspended")
    world.settle()
    world.wait(10_000)
    world.settle()
    assert len(world.workers) == 4
    assert world.status.gpu_seconds_saved_at(world.now) == pytest.approx(400)


def test_what_a_failure_takes_is_not_saved_by_packing() -> None:
    world = World(make_job().stages(4).workers(8).release())
    world.start()
    world.commit(boundary=8)
    world.commit(checkpoint=8)
    world.leave()
    assert (world.shape, world.status.gpus.saved) == ((2, 2), 4)
    world.unschedulable = True
    world.kill("digits-w0")
    world.settle()
    assert (world.shape, world.status.gpus.saved) == ((2, 1), 4)


@pytest.mark.parametrize("on_pack", ["Widen", "Release", "Hold", "Auto"])
def test_below_a_ceiling_that_was_lifted_a_job_has_its_starting_size_again_and_that_is_no_claim(on_pack: str) -> None:
    world = World(make_job().stages(2).workers(6).checkpoint().on_pack(on_pack))
    world.start()
    scale(world, 2)
    assert (world.shape, len(world.workers)) == ((2, 1), 2)
    scale(world, 6)
    assert (world.shape, len(world.workers)) == ((2, 3), 6)
    assert (world.status.claimed_ids, world.status.failures) == ([], 0)


def test_a_job_that_starts_below_a_ceiling_may_grow_as_if_there_had_been_none() -> None:
    world = World(make_job().stages(2).workers(8, most=5))
    world.start()
    assert (world.shape, world.status.initial_workers, world.status.num_shards) == ((2, 2), 8, 8)
    scale(world, 10)
    assert (world.shape, world.status.claimed_ids) == ((2, 5), [8, 9])


def test_a_start_follows_the_ceiling_and_waits_with_words_below_one_pipeline() -> None:
    world = World(make_job().stages(4).workers(8, most=4).set("elasticPolicy.maxPipelines", 2))
    world.settle()
    assert len(world.workers) == 4
    for _ in range(2):
        scale(world, 3)
        running = world.condition(ConditionType.RUNNING)
        assert (world.workers, world.status.resize, world.status.start_time) == ({}, None, None)
        assert (running.status, running.reason) == ("False", "NoLegalStart")
        assert "pipelines of 4 stages; 1 to 2 pipelines," in running.message
        assert running.message.endswith("; 1 to 3 workers, by spec.elasticPolicy")
        world.wait(7200)
    scale(world, 8)
    assert world.shape == (4, 2)


def test_a_start_that_the_checkpoints_data_order_does_not_allow_says_that_it_is_a_limit() -> None:
    world = World(make_job().stages(2).workers(8).checkpoint())
    world.start()
    world.commit(checkpoint=0, num_shards=2)
    world.builder.suspended().set("elasticPolicy.minPipelines", 3)
    world.settle()
    world.builder.suspended(False)
    world.settle()
    running = world.condition(ConditionType.RUNNING)
    assert running.reason == "NoLegalStart"
    assert "; 3 to 2 pipelines, by spec.elasticPolicy and the data order of the checkpoint;" in running.message


def test_a_job_that_starts_again_obeys_the_ceiling_whatever_its_checkpoint_needs() -> None:
    world = World(make_job().stages(4).workers(8).checkpoint())
    world.start()
    scale(world, 3)
    assert world.shape == (3, 1), "as narrow and as tightly packed as after a loss"
    world.builder.suspended()
    world.settle()
    world.builder.suspended(False)
    world.settle()
    world.warm_up()
    assert world.shape == (2, 1), "what its checkpoint needs"


def test_a_job_that_no_ceiling_can_make_smaller_says_so() -> None:
    world = World(make_job().stages(2).workers(4).set("elasticPolicy.minPipelines", 2))
    world.start()
    scale(world, 1)
    assert world.shape == (2, 2)
    assert "maxWorkers allows 1, but no valid layout has as few" in world.condition(ConditionType.RESIZING).message
    scale(world, 3)
    assert (world.shape, world.condition(ConditionType.RESIZING).message) == ((1, 3), "")


def test_no_job_has_more_workers_than_its_status_can_name(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(make_job().stages(2).workers(8, most=16))
    world.start()
    assert world.shape == (2, 4)
    monkeypatch.setattr("pipetransformer_contract.api.job.MAX_WORKERS", 6)  # as for a job of an operator before
    scale(world, 15)
    assert world.shape == (2, 3), "as below any other ceiling"
    world.kill("digits-w0")
    for _ in range(3):
        world.settle()
        world.warm_up()
        world.commit()
        assert len(world.workers) <= 6
    fresh = World(make_job().stages(2).workers(8, most=16))
    fresh.start()
    assert (fresh.shape, len(fresh.workers)) == ((2, 3), 6)
    never = World(make_job().stages(2).workers(8, least=8, most=16))
    never.settle()
    assert "; 8 to 6 workers, by spec.elasticPolicy" in never.condition(ConditionType.RUNNING).message
