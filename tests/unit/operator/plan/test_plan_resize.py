"""Prepare, commit, clean: what a resize waits for, how it is cancelled, and what follows one that is not committed."""

from datetime import timedelta

import pytest

from pipetransformer_contract.api.status import Condition, ConditionType, LayoutSize, Reason, ResizePhase
from pipetransformer_contract.messages import ResizeReason
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.world import World

pytestmark = pytest.mark.timeout(60)


def claiming(most: int = 4, stages: int = 2) -> World:
    return World(make_job().stages(stages).workers(stages, most=most))


def releasing() -> World:
    return World(make_job().stages(4).workers(4).release())


def resizing(world: World) -> Condition:
    condition = world.status.condition(ConditionType.RESIZING)
    assert condition is not None
    return condition


def phase(world: World) -> ResizePhase | None:
    return world.status.resize.phase if world.status.resize else None


def names(*ids: int) -> list[str]:
    return [f"digits-w{number}" for number in ids]


def test_the_status_says_from_what_to_what_why_and_until_when() -> None:
    world = claiming()
    world.start()
    resize = world.status.resize
    assert resize is not None
    assert (resize.from_, resize.to) == (LayoutSize(stages=2, pipelines=1), LayoutSize(stages=2, pipelines=2))
    assert (resize.phase, resize.reason) == (ResizePhase.PREPARE, ResizeReason.CLAIM)
    assert resize.deadline == world.now + timedelta(seconds=600)
    assert resize.to_wire()["from"] == {"stages": 2, "pipelines": 1}
    assert "digits-w2: runs and is not ready" in resizing(world).message


def test_a_release_goes_through_commit_and_clean() -> None:
    world = releasing()
    world.start()
    world.commit(boundary=8)
    assert phase(world) is ResizePhase.COMMIT
    world.commit()
    assert phase(world) is ResizePhase.CLEAN
    waits = "the release waits for a durable checkpoint (workers: 2; its frozen layers: 8)"
    assert waits in resizing(world).message
    world.commit(checkpoint=8)
    assert phase(world) is None
    assert resizing(world).reason == "Settled"


def test_a_claim_grows_by_one_pipeline_at_a_time() -> None:
    world = claiming(most=6)
    world.start()
    for pipelines in (2, 3):
        assert len(world.workers) == 2 * pipelines
        world.warm_up()
        assert world.shape == (2, pipelines)
        world.commit()
    assert len(world.workers) == 6
    assert world.status.claimed_ids == [2, 3, 4, 5]


def test_a_claim_that_gets_no_node_is_withdrawn_and_tried_again_twice_as_late() -> None:
    world = claiming()
    world.start()
    world.change("digits-w3", scheduled=False, why_pending="Unschedulable: 0/3 nodes are available")
    for snooze in (60, 120, 240):
        world.unschedulable = True
        world.wait(119)
        world.settle()
        assert len(world.workers) == 4
        assert world.status.resize is not None
        assert world.status.resize.deadline == world.now + timedelta(seconds=1)
        world.wait(2)
        world.settle()
        assert len(world.workers) == 2
        assert resizing(world).reason == "Unschedulable"
        assert f"next attempt in {snooze} s" in resizing(world).message
        world.wait(snooze - 1)
        world.settle()
        assert len(world.workers) == 2
        world.wait(1)
        world.settle()
        assert len(world.workers) == 4
    assert world.status.failures == 0


def test_a_cancelled_claim_that_is_not_tried_again_no_longer_says_when_it_is() -> None:
    """The user lowers `maxWorkers`, as the alert PipeTransformerResizesFail tells them."""
    world = claiming()
    world.start()
    world.change("digits-w3", scheduled=False, why_pending="Unschedulable: 0/3 nodes are available")
    world.wait(121)
    world.settle()
    assert resizing(world).reason == "Unschedulable"
    world.builder.workers(2)
    world.metadata_generation += 1
    world.settle()
    assert (resizing(world).reason, resizing(world).message) == ("Settled", "")


def test_a_claim_whose_workers_all_have_nodes_has_until_the_resize_timeout() -> None:
    world = claiming()
    world.start()
    world.wait(599)
    world.settle()
    assert len(world.workers) == 4
    world.change("digits-w2", why_pending="ErrImagePull: not found")
    world.wait(1)
    world.settle()
    assert len(world.workers) == 2
    assert resizing(world).reason == "ImagePull"
    assert "digits-w2: ErrImagePull: not found" in resizing(world).message


def test_a_refused_claim_says_so_when_it_is_cancelled() -> None:
    world = claiming()
    world.start()
    for name in names(2, 3):
        world.kill(name)
    world.refusal = "exceeded quota: team"
    world.wait(121)
    world.turn()
    assert (resizing(world).reason, world.status.resize) == ("CreationRefused", None)
    assert "exceeded quota: team" in resizing(world).message
    told = [event.reason for event in world.told].count(Reason.CREATION_REFUSED)
    assert (world.condition(ConditionType.RUNNING).reason, told) == ("Training", 1), "the job has all that protects it"


def test_before_its_first_checkpoint_a_job_is_not_told_to_begin_anew() -> None:
    world = World(make_job().checkpoint().stages(2).workers(2, most=2))
    world.start()
    world.commit()
    world.builder.workers(2, most=8)
    world.metadata_generation = 2
    world.settle()
    world.warm_up()
    for durable in (None, 0):
        world.commit(checkpoint=durable, num_shards=64)
        assert "it can have more once it restarts from its checkpoint" in resizing(world).message


def test_a_ceiling_above_what_workers_were_told_of_is_said_to_be_of_no_use() -> None:
    world = claiming(most=2, stages=1)
    world.start()
    world.warm_up()
    world.commit()
    assert (world.shape, resizing(world).message) == ((1, 2), "")
    world.builder.workers(1, most=8)
    world.metadata_generation = 2
    world.settle()
    assert len(world.workers) == 2
    assert "allows 8 pipelines, but the order of the data allows only 2" in resizing(world).message
    world.builder.workers(1, most=2)
    world.metadata_generation = 3
    world.settle()
    assert resizing(world).message == ""


def test_a_job_that_starts_again_has_no_more_pipelines_than_shards() -> None:
    world = World(make_job().stages(1).workers(2))
    world.start()
    world.builder.workers(8)
    world.metadata_generation = 2
    for name in names(0, 1):
        world.kill(name)
    world.settle()
    world.warm_up()
    assert (world.shape, world.status.num_shards, world.status.initial_workers) == ((1, 2), 2, 2)


def test_a_job_that_goes_on_from_an_older_ones_checkpoint_grows_as_far_as_the_order_of_that_ones_data() -> None:
    world = claiming(most=16, stages=2)
    world.settle()
    world.warm_up()
    world.commit(checkpoint=0, num_shards=2)
    for _ in range(2):
        world.warm_up()
        world.commit()
    assert (world.shape, len(world.workers), world.status.num_shards) == ((2, 2), 4, 2)
    assert "but the order of the data allows only 2" in resizing(world).message
    for name in list(world.workers):
        world.kill(name)
    world.builder.workers(8)
    world.metadata_generation = 2
    world.settle()
    assert (len(world.workers), world.status.num_shards) == (4, 2), "it starts again from that checkpoint"


def test_a_job_whose_data_have_more_shards_grows_to_a_new_ceiling_when_it_starts_again() -> None:
    world = World(make_job().checkpoint().stages(2).workers(2, most=2))
    world.start()
    world.commit(checkpoint=0, num_shards=64)
    assert world.status.num_shards == 2, "of which its workers were told"
    world.builder.workers(2, most=8)
    world.metadata_generation = 2
    world.settle()
    world.warm_up()
    world.commit()
    assert (world.shape, world.status.num_shards) == ((2, 2), 2)
    assert "it can have more once it restarts from its checkpoint" in resizing(world).message
    for most, shape in ((8, (2, 4)), (2, (2, 1))):
        world.builder.workers(2, most=most)
        world.metadata_generation += 1
        for suspended in (True, False):
            world.builder.suspended(suspended)
            world.settle()
        for _ in range(4):
            world.warm_up()
            world.commit()
        assert (world.shape, world.status.num_shards) == (shape, 8), "a ceiling may be lowered for a while"


def test_a_job_that_holds_what_packing_frees_holds_no_more_than_its_ceiling() -> None:
    world = World(make_job().stages(2).workers(4).on_pack("Hold"))
    world.start()
    world.builder.workers(2, most=2)
    world.metadata_generation = 2
    for _ in range(2):
        world.settle()
        world.commit()
        world.leave()
    assert world.shape == (2, 1)
    assert len(world.workers) == 2


def test_an_edit_of_the_spec_is_tried_at_once() -> None:
    world = claiming()
    world.start()
    world.unschedulable = True
    world.wait(601)
    world.settle()
    assert len(world.workers) == 2
    world.builder.workers(2, most=6)
    world.metadata_generation = 2
    world.settle()
    assert len(world.workers) == 4


def test_lost_pipelines_of_the_starting_size_come_back_together_and_are_no_claim() -> None:
    world = World(make_job().stages(1).workers(4))
    world.start()
    for name in names(1, 2, 3):
        world.kill(name)
    world.settle()
    assert world.shape == (1, 1)
    world.commit()
    assert len(world.workers) == 4
    assert world.status.claimed_ids == []
    world.warm_up(names(4, 5))
    assert world.shape == (1, 1)
    world.wait(601)
    world.settle()
    assert world.shape == (1, 3), "past the deadline what is ready is taken"


def test_a_freeze_during_a_claim_packs_at_once_and_the_claim_goes_on() -> None:
    world = World(make_job().stages(4).workers(4, most=8))
    world.start()
    assert len(world.workers) == 8
    world.commit(boundary=8)
    assert world.shape == (2, 2)
    world.commit()
    assert phase(world) is ResizePhase.PREPARE
    assert world.status.resize is not None
    assert world.status.resize.to == LayoutSize(stages=2, pipelines=3)


def test_a_ceiling_lowered_during_a_claim_ends_it() -> None:
    world = claiming()
    world.start()
    world.builder.workers(2, most=2)
    world.settle()
    assert len(world.workers) == 2
    assert world.status.resize is None


def test_claimed_workers_leave_first() -> None:
    world = World(make_job().stages(1).workers(2, most=3))
    world.start()
    world.warm_up()
    world.commit()
    assert world.status.claimed_ids == [2]
    world.kill("digits-w0")
    world.settle()
    world.commit()
    world.warm_up()
    world.commit()
    assert world.status.claimed_ids == [2]
    world.builder.workers(2, most=2)
    world.settle()
    assert [member.name for member in world.generation.leavers] == ["digits-w2"]


def test_a_failure_during_a_release_keeps_the_leavers_until_the_checkpoint_is_durable() -> None:
    world = releasing()
    world.start()
    world.commit(boundary=8)
    world.commit()
    world.leave()
    world.end("digits-w1", exit_code=1)
    world.settle()
    assert world.generation.reason is ResizeReason.FAILURE
    assert {"digits-w2", "digits-w3"} <= set(world.workers)
    world.commit()
    assert {"digits-w2", "digits-w3"} <= set(world.workers)
    world.commit(checkpoint=8)
    assert not {"digits-w2", "digits-w3"} & set(world.workers)


def test_a_published_resize_is_not_taken_back_while_its_members_are_silent() -> None:
    world = claiming()
    world.start()
    world.warm_up()
    world.wait(3600)
    world.silent = set(world.workers)
    world.settle()
    assert world.generation.layout_generation == 2


def test_members_that_commit_nothing_by_the_deadline_get_the_old_layout_again() -> None:
    world = claiming()
    world.start()
    world.warm_up()
    assert world.shape == (2, 2)
    world.wait(599)
    world.settle()
    assert world.generation.layout_generation == 2
    world.wait(1)
    world.settle()
    assert (world.generation.layout_generation, world.shape) == (3, (2, 1))
    assert world.generation.reason is ResizeReason.UNDO
    assert [member.name for member in world.generation.members] == names(0, 1)
    assert [member.name for member in world.generation.leavers] == names(2, 3)
    world.commit()
    assert set(world.workers) == set(names(0, 1))
    assert world.status.next_resize_time is not None
    assert world.status.failures == 0


def test_a_layout_that_its_members_never_commit_is_tried_ever_later_until_one_is_confirmed() -> None:
    world = claiming()
    world.start()
    for failures in range(1, 5):
        world.warm_up()
        assert world.shape == (2, 2)
        world.break_group([member.name for member in world.generation.members])
        world.wait(2)
        world.settle()
        assert (world.generation.reason, world.status.resize_failures) == (ResizeReason.UNDO, failures)
        assert world.status.next_resize_time == world.now + timedelta(seconds=30 * 2**failures)
        world.commit()
        world.leave()
        assert len(world.workers) == 2
        world.wait(30 * 2**failures)
        world.settle()
    world.warm_up()
    world.commit()
    status = world.status
    assert (world.shape, status.resize_failures, status.not_committed) == ((2, 2), 0, None)


def test_a_joiner_that_falls_silent_before_the_generation_is_confirmed_is_lost_and_the_others_go_back() -> None:
    world = claiming()
    world.start()
    world.warm_up()
    world.silent = {"digits-w3"}
    world.wait(19)
    world.settle()
    assert world.turn().requeue_after == 1
    world.wait(1)
    world.settle()
    assert (world.generation.reason, world.shape) == (ResizeReason.FAILURE, (2, 1))
    assert [member.name for member in world.generation.members] == names(0, 1)
    assert [member.name for member in world.generation.leavers] == names(2)
    assert "digits-w3" in world.deleted


def test_a_joiner_that_fell_silent_after_it_was_ready_is_not_published() -> None:
    world = claiming()
    world.start()
    world.warm_up(["digits-w2"])
    world.silent = {"digits-w2"}
    world.wait(5)
    world.warm_up(["digits-w3"])
    assert world.generation.layout_generation == 1
    world.wait(600)
    world.settle()
    resizing = world.status.condition(ConditionType.RESIZING)
    assert resizing is not None and resizing.reason == "NotReady"
    assert set(world.workers) == set(names(0, 1))


def test_a_pack_that_could_not_be_committed_is_slept_over() -> None:
    world = World(make_job().stages(4).workers(4))
    world.start()
    world.commit(boundary=8)
    world.break_group(names(0, 1, 2, 3))
    world.wait(2)
    world.settle()
    assert (world.shape, world.generation.reason) == ((4, 1), ResizeReason.UNDO)
    world.commit()
    assert world.shape == (4, 1)
    world.wait(61)
    world.settle()
    assert world.shape == (2, 2)


def test_a_joiner_that_says_that_the_generation_did_not_come_about_ends_the_attempt_early() -> None:
    world = claiming()
    world.start()
    world.warm_up()
    world.break_group(names(2, 3))
    assert world.shape == (2, 2)
    world.wait(2)
    world.settle()
    assert (world.shape, world.generation.reason) == ((2, 1), ResizeReason.UNDO)


def test_a_generation_that_some_have_committed_is_published_again_as_it_was() -> None:
    world = claiming()
    world.start()
    world.warm_up()
    report = world.report
    world.commit()
    world.report = report  # the leader's word did not come through, but heartbeats did
    world.status = world.status.model_copy(
        update={
            "generation": world.generation.model_copy(update={"confirmed_generation": 1}),
            "last_report": world.status.last_report,
        }
    )
    world.break_group(names(0, 1, 2, 3))
    world.wait(2)
    world.settle()
    assert (world.shape, world.generation.reason) == ((2, 2), ResizeReason.FAILURE)


def test_a_group_that_broke_although_all_live_is_made_again() -> None:
    world = World(make_job().stages(2).workers(4))
    world.start()
    world.break_group(names(0, 1, 2))
    assert world.generation.layout_generation == 1
    world.break_group(names(3))
    assert (world.generation.layout_generation, world.shape) == (2, (2, 2))
    assert set(world.workers) == set(names(0, 1, 2, 3))
    assert world.status.failures == 0
    world.commit()
    assert world.generation.confirmed
