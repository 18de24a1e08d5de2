"""Scenarios of `plan()`: a job packs, gives back, claims, pauses and ends."""

from dataclasses import replace
from datetime import timedelta

import pytest

from pipetransformer_contract.api.labels import QUEUE_LABEL
from pipetransformer_contract.api.status import ConditionType, Reason, State
from pipetransformer_contract.messages import DurableCheckpoint, Offer, Outcome, ResizeReason, StepTime
from pipetransformer_operator.plan import WorkerPhase, plan
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.fake_queue import FakeQueue
from tests.testkit.operator.world import TOTAL_STEPS, World, offers, training

pytestmark = pytest.mark.timeout(60)


def widening() -> World:
    return World(make_job().stages(4).workers(4))


def releasing() -> World:
    return World(make_job().stages(4).workers(4).release())


def test_words_that_no_condition_holds_are_cut() -> None:
    world = World(make_job())
    world.refusal = "forbidden: " + "x" * 100_000
    world.turn()
    running = world.status.condition(ConditionType.RUNNING)
    assert running is not None and running.message.startswith("forbidden: x")


def test_a_freeze_packs_the_pipeline_and_the_same_pods_become_more_pipelines() -> None:
    world = widening()
    world.start()
    pods = set(world.workers)
    world.commit(boundary=8)
    assert world.shape == (2, 2)
    assert world.generation.reason is ResizeReason.PACK
    assert set(world.workers) == pods
    assert world.generation.leavers == []
    assert world.status.frozen == "8/12"
    assert world.condition(ConditionType.RESIZING).reason == "Committing"
    world.commit()
    assert world.condition(ConditionType.RESIZING).reason == "Settled"


def test_a_layout_that_trains_is_told_with_its_schedule_and_why_it_is_another() -> None:
    world = widening()
    world.start()
    world.commit(boundary=8)
    world.commit(schedule="OneForwardOneBackward", why_schedule="Interleaved needs at least 2 stages")
    assert [event.message for event in world.told if event.reason is Reason.GENERATION_CONFIRMED][-1] == (
        "Generation 2 trains: 2 pipelines of 2 stages, OneForwardOneBackward (Interleaved needs at least 2 stages)"
    )
    assert world.status.last_report is not None and world.status.last_report.schedule == "OneForwardOneBackward"
    assert world.condition(ConditionType.RUNNING).message == (
        "generation 2: 2 pipelines of 2 stages, OneForwardOneBackward (Interleaved needs at least 2 stages)"
    )


def test_a_resize_whose_leavers_wait_names_the_schedule_that_the_new_layout_runs() -> None:
    world = releasing()
    world.start()
    world.commit(boundary=8, schedule="ZeroBubble")
    assert "ZeroBubble" not in world.condition(ConditionType.RESIZING).message, "the next layout may run another one"
    world.commit(schedule="Interleaved")
    resizing = world.condition(ConditionType.RESIZING)
    assert resizing.reason == "Releasing"
    assert resizing.message.startswith("1 pipeline of 4 stages to 1 pipeline of 2 stages, Interleaved (Release)")


def test_layers_that_a_trial_thawed_are_told_with_the_reason() -> None:
    world = widening()
    world.start()
    world.commit(boundary=3)
    world.commit(boundary=0, why_thawed="layers 0-2 thawed: training loss 2.1 % above its trend")
    assert [event.message.partition(" at step")[0] for event in world.told if event.reason is Reason.LAYERS_FROZEN] == [
        "3 of 12 layers are frozen"
    ]
    (thawed,) = (event.message for event in world.told if event.reason is Reason.LAYERS_UNFROZEN)
    assert thawed.endswith("; layers 0-2 thawed: training loss 2.1 % above its trend")


def test_stages_are_cut_anew_in_the_same_layout_where_that_pays() -> None:
    world = World(make_job().stages(4).workers(4).set("pipeline.packing", "Measured"))
    world.start()
    members = world.generation.members
    offered = [Offer(stages=4, bytes_per_worker=1, step_seconds=[StepTime(pipelines=1, seconds=0.8)], pause_seconds=9)]
    world.commit(boundary=2, offered=offered, step_seconds=0.805)
    assert world.generation.layout_generation == 1
    world.commit(offered=offered, step_seconds=1.0)
    assert (world.generation.layout_generation, world.shape, world.generation.members) == (2, (4, 1), members)
    assert world.generation.reason is ResizeReason.BALANCE
    world.commit(offered=offered, step_seconds=0.8)
    assert world.generation.layout_generation == 2
    assert world.condition(ConditionType.RESIZING).reason == "Settled"


def test_a_freeze_that_packs_nothing_cuts_the_stages_anew_where_that_pays_by_the_papers_packing() -> None:
    """A pause counts as ten steps, and a tenth is gained in each that remains."""
    world = widening()
    world.start()
    members = world.generation.members
    offered = [offer.model_copy(update={"step_seconds": [StepTime(pipelines=1, seconds=0.9)]}) for offer in offers(7)]
    world.commit(boundary=7, offered=offered, step_seconds=1.0)
    assert (world.generation.layout_generation, world.shape, world.generation.members) == (2, (4, 1), members)
    assert world.generation.reason is ResizeReason.BALANCE
    world.commit(offered=offered, step_seconds=0.9)
    assert world.generation.layout_generation == 2, "it is cut"

    world.commit(steps=900, offered=offered, step_seconds=1.0)
    assert world.generation.layout_generation == 2, "too few steps are left"


def test_no_generation_is_published_that_would_train_no_step() -> None:
    world = widening()
    world.start()
    world.commit(boundary=8, steps=TOTAL_STEPS - 2)
    assert (world.shape, world.generation.layout_generation) == ((4, 1), 1)

    other = widening()
    other.start()
    other.commit(boundary=8, steps=TOTAL_STEPS - 3)
    assert (other.shape, other.generation.layout_generation) == ((2, 2), 2)


def test_leavers_are_deleted_only_after_the_commit_and_a_durable_checkpoint_at_the_new_boundary() -> None:
    world = releasing()
    world.start()
    world.commit(boundary=8)
    assert world.shape == (2, 1)
    assert len(world.generation.leavers) == 2
    assert len(world.workers) == 4
    world.commit()
    world.leave()
    assert len(world.workers) == 4
    assert world.condition(ConditionType.RESIZING).reason == "Releasing"
    world.commit(checkpoint=7)
    assert len(world.workers) == 4
    world.commit(checkpoint=8)
    assert set(world.workers) == {"digits-w0", "digits-w1"}
    assert world.status.gpus.held == 2
    assert world.status.gpus.released == 2
    world.wait(100)
    world.finish(Outcome.SUCCEEDED)
    assert world.status.gpu_seconds_saved == pytest.approx(200)


def test_a_claim_trains_on_until_all_new_workers_are_ready() -> None:
    world = World(make_job().stages(2).workers(2, most=4))
    world.start()
    assert len(world.workers) == 4
    assert world.condition(ConditionType.RESIZING).reason == "Preparing"
    world.warm_up(["digits-w2"])
    assert world.shape == (2, 1)
    world.warm_up()
    assert world.shape == (2, 2)
    assert world.generation.reason is ResizeReason.CLAIM
    assert world.generation.leader == "digits-w0"


def test_a_claim_past_its_deadline_is_cancelled_and_slept_over() -> None:
    world = World(make_job().stages(2).workers(2, most=4).set("runPolicy.resizeTimeoutSeconds", 60))
    world.start()
    assert len(world.workers) == 4
    world.wait(61)
    world.settle()
    assert len(world.workers) == 2
    assert world.status.resize is None
    assert world.status.failures == 0
    world.wait(61)
    world.settle()
    assert len(world.workers) == 4


def test_more_failures_than_allowed_fail_the_job() -> None:
    world = World(make_job().stages(2).workers(4).set("runPolicy.backoffLimit", 0))
    world.start()
    world.end("digits-w3", exit_code=1, message="Segmentation fault")
    world.settle()
    assert world.state() == State.FAILED
    assert world.condition(ConditionType.FAILED).reason == "BackoffLimitExceeded"
    assert set(world.workers) == {"digits-w3"}


def test_a_user_error_fails_the_job_with_the_trainers_words() -> None:
    world = widening()
    world.settle()
    message = '{"outcome": "Failed", "reason": "DataUnreadable", "message": "spec.data.path: no such file"}'
    world.end("digits-w1", exit_code=2, message=message)
    world.settle()
    failed = world.status.condition(ConditionType.FAILED)
    assert failed is not None
    assert (failed.reason, failed.message) == ("DataUnreadable", "spec.data.path: no such file")
    assert set(world.workers) == {"digits-w1"}


def test_a_program_that_is_not_there_fails_the_job_with_pythons_words() -> None:
    world = widening()
    world.settle()
    world.end("digits-w1", exit_code=2, message="python: can't open file '/app/train.py': [Errno 2] No such file")
    world.settle()
    failed = world.condition(ConditionType.FAILED)
    assert failed.reason == "UserError"
    assert failed.message.startswith("digits-w1 exited with code 2: python: can't open file '/app/train.py'")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('{"outcome": "Failed", "reason": "%s", "message": "no"}' % ("R" * 2000), "R" * 1024),
        ('{"outcome": "Failed", "reason": "\\ud800", "message": "\\udfff"}', "?"),
        ('{"outcome": "Failed", "reason": 1, "message": ["no"]}', "1"),
        ("[" * 4000, "UserError"),
    ],
    ids=["long", "surrogate", "numbers", "deep"],
)
def test_whatever_a_worker_leaves_behind_ends_the_job_in_words_that_a_status_can_hold(
    message: str, reason: str
) -> None:
    world = widening()
    world.settle()
    world.end("digits-w0", exit_code=0, message=message)
    world.end("digits-w1", exit_code=2, message=message)
    world.settle()
    failed = world.status.condition(ConditionType.FAILED)
    assert failed is not None and failed.message
    assert failed.reason == reason


def test_members_that_exit_after_success_are_not_failures_while_the_leader_still_writes() -> None:
    world = widening()
    world.start()
    for worker_id in (1, 2, 3):
        world.end(f"digits-w{worker_id}", exit_code=0, message='{"outcome": "Succeeded"}')
    world.settle()
    assert world.generation.layout_generation == 1
    assert world.status.failures == 0
    world.end("digits-w0", exit_code=0, message='{"outcome": "Succeeded"}')
    world.settle()
    assert world.state() == State.COMPLETE


def test_an_exit_0_that_nobody_asked_for_is_a_failure() -> None:
    world = World(make_job().stages(2).workers(4))
    world.start()
    world.end("digits-w3", exit_code=0)
    world.settle()
    assert world.status.failures == 1


@pytest.mark.parametrize(("outcome", "state"), [(Outcome.SUCCEEDED, State.COMPLETE), (Outcome.FAILED, State.FAILED)])
def test_workers_have_time_to_end_by_themselves_once_their_leader_told_the_end(outcome: Outcome, state: State) -> None:
    world = widening()
    world.start()
    world.finish(outcome)
    assert world.state() == state
    assert len(world.workers) == 4
    world.end("digits-w0", exit_code=0 if outcome is Outcome.SUCCEEDED else 2)
    world.wait(31)
    world.settle()
    assert set(world.workers) == {"digits-w0"}, "its log can still be read"


def test_suspend_gives_all_back_and_resume_takes_the_checkpoints_size() -> None:
    world = releasing()
    world.start()
    world.commit(boundary=8, checkpoint=8)
    world.builder.suspended()
    world.settle()
    assert not world.workers
    assert world.state() == State.SUSPENDED
    world.builder.suspended(False)
    world.settle()
    world.warm_up()
    assert world.shape == (2, 1)
    assert world.generation.layout_generation == 3
    assert "digits-w0" not in world.workers


def test_a_checkpoint_that_members_leave_when_they_are_suspended_is_still_heard() -> None:
    world = releasing()
    world.start()
    world.commit(boundary=8)
    before = world.status.generation
    world.stubborn = set(world.workers)
    world.builder.suspended()
    world.settle()
    world.wait(300)
    decided = plan(world.spec, world.observed(), world.now)
    assert {deletion.name for deletion in decided.delete} == set(world.workers)
    assert decided.status.generation == before, "the channel still knows the members"
    assert world.report is not None
    left = DurableCheckpoint(step=11, boundary=8, min_stages=2, layout_generation=1)
    world.report = world.report.model_copy(update={"checkpoint": left})
    world.settle()
    assert (world.status.generation, world.workers) == (None, {})
    world.builder.suspended(False)
    world.settle()
    assert len(world.workers) == 2


@pytest.mark.parametrize("lingers", [False, True])
def test_a_pod_that_has_ended_and_that_a_finalizer_keeps_holds_up_no_resume(lingers: bool) -> None:
    world = releasing()
    world.lingering = True
    world.start()
    before = set(world.workers)
    world.builder.suspended()
    world.settle()
    for name in before:
        ended = WorkerPhase.SUCCEEDED if name == "digits-w0" else WorkerPhase.FAILED
        world.change(name, phase=ended, end_time=world.now + timedelta(seconds=30), lingers=lingers)
    world.builder.suspended(False)
    world.settle()
    assert bool(set(world.workers) - before) != lingers
    if lingers:
        message = world.condition(ConditionType.SUSPENDED).message
        assert message == "the job resumes once these pods of it have ended: digits-w0, digits-w1, digits-w2, digits-w3"
    else:
        world.warm_up()
        assert {member.name for member in world.generation.members}.isdisjoint(before)


def suspend_members_that_do_not_end(world: World) -> None:
    """Their pods are deleted once the time for a checkpoint is over, and linger."""
    world.stubborn = set(world.workers)
    world.builder.suspended()
    world.settle()
    world.wait(300)
    world.settle()


def test_a_job_resumed_while_its_pods_still_end_goes_on_once_they_are_gone() -> None:
    world = releasing()
    world.lingering = True
    world.start()
    before = set(world.workers)
    suspend_members_that_do_not_end(world)
    world.builder.suspended(False)
    world.settle()
    assert set(world.workers) == before, "nobody holds twice the accelerators"
    assert (world.state(), world.condition(ConditionType.RUNNING).reason) == (State.SUSPENDED, "SuspendedByUser")
    assert world.generation.layout_generation == 1, "its members may report the checkpoint that they leave"
    assert world.report is not None
    left = DurableCheckpoint(step=11, boundary=0, min_stages=4, layout_generation=1)
    world.report = world.report.model_copy(update={"checkpoint": left})
    world.settle()
    world.bury()
    assert not before & set(world.workers)
    assert (world.status.checkpoint, world.status.failures) == (left, 0)
    world.warm_up()
    world.commit()
    assert world.state() is State.RUNNING


def test_a_job_resumed_while_a_pod_is_stuck_on_a_dead_node_goes_on_without_waiting_for_it() -> None:
    world = World(make_job().stages(2).workers(4).checkpoint())
    world.lingering = True
    world.start()
    world.change("digits-w3", node="dead", node_lost=True)
    suspend_members_that_do_not_end(world)
    for name in ("digits-w0", "digits-w1"):
        world.kill(name)
    world.builder.suspended(False)
    world.settle()
    assert world.state() is State.SUSPENDED, "w2 still ends, on a node that lives"
    world.kill("digits-w2")
    world.settle()
    world.warm_up([f"digits-w{number}" for number in range(4, 8)])
    world.commit()
    assert (world.state(), world.shape, world.status.failures) == (State.RUNNING, (2, 2), 0)
    assert world.workers["digits-w3"].terminating


def test_where_nodes_are_not_seen_a_resumed_job_waits_for_a_stuck_pod_until_it_should_long_be_gone() -> None:
    world = World(make_job().stages(2).workers(2).checkpoint())
    world.lingering = True
    world.start()
    suspend_members_that_do_not_end(world)
    world.kill("digits-w0")
    world.change("digits-w1", end_time=world.now + timedelta(seconds=30))
    world.builder.suspended(False)
    world.settle()
    assert world.turn().requeue_after == 330
    world.wait(329)
    world.settle()
    assert world.state() is State.SUSPENDED
    world.wait(1)
    world.settle()
    assert set(world.workers) == {"digits-w1", "digits-w2", "digits-w3"}


def test_a_job_whose_pods_are_all_taken_away_starts_anew_without_a_failure() -> None:
    world = widening()
    world.start()
    for name in world.workers:
        world.change(name, terminating=True)
    world.settle()
    assert world.status.failures == 0
    assert world.status.generation is None
    world.warm_up()
    assert [member.name for member in world.generation.members] == [f"digits-w{number}" for number in range(4, 8)]


def test_a_job_of_another_manager_is_left_alone() -> None:
    world = World(make_job().set("managedBy", "someone/else"))
    decided = world.turn()
    assert not decided.create
    assert world.status.conditions == []


@pytest.mark.parametrize("lost", [False, True])
def test_a_queue_label_that_comes_without_a_checkpoint_holds_no_worker_of_a_start(lost: bool) -> None:
    world = World(make_job().stages(2).workers(4))
    world.settle()
    if lost:
        world.warm_up()
        world.commit()
    world.builder.label(QUEUE_LABEL, "team")
    world.settle()
    if lost:
        assert world.state() is State.RUNNING, "the label counts from the next start on"
        for name in list(world.workers):
            world.kill(name)
        world.settle()
        assert world.status.next_worker_id == 4
    assert not world.workers and not world.status.worker_ids
    assert world.condition(ConditionType.ADMITTED).reason == "InvalidSpec"
    assert world.condition(ConditionType.RUNNING).reason == "InvalidSpec"
    assert world.turn().requeue_after is None
    world.builder.checkpoint()
    world.queue = FakeQueue(0)
    world.settle()
    assert world.condition(ConditionType.RUNNING).reason == "WaitingForQuota"
    world.queue.size = 4
    world.settle()
    world.warm_up()
    assert world.shape == (2, 2)


def test_a_spec_that_contradicts_itself_is_told_once() -> None:
    world = widening()
    world.start()
    world.builder.label(QUEUE_LABEL, "team")
    world.settle()
    world.turn()
    told = [event for event in world.told if event.reason == "InvalidSpec"]
    assert len(told) == 1 and "the job needs spec.checkpoint" in told[0].message


def test_a_queue_label_without_checkpoint_starts_nothing() -> None:
    world = widening()
    decided = plan(world.spec, replace(world.observed(), labels={"kueue.x-k8s.io/queue-name": "team"}), world.now)
    assert not decided.create
    assert decided.status.state is State.PENDING


def test_a_job_past_its_deadline_fails() -> None:
    world = World(make_job().set("runPolicy.activeDeadlineSeconds", 100))
    world.start()
    world.wait(101)
    world.settle()
    assert world.condition(ConditionType.FAILED).reason == "DeadlineExceeded"


def test_every_condition_is_of_the_spec_that_was_looked_at_last() -> None:
    world = World(make_job())
    world.start()
    world.finish(Outcome.SUCCEEDED)
    world.metadata_generation = 7
    world.settle()
    assert {condition.observed_generation for condition in world.status.conditions} == {7}


def test_the_deadlines_time_begins_anew_when_a_job_is_resumed() -> None:
    world = World(make_job().checkpoint().set("runPolicy.activeDeadlineSeconds", 100))
    world.start()
    world.wait(60)
    world.builder.suspended()
    world.settle()
    world.wait(3600)
    world.builder.suspended(False)
    world.settle()
    world.warm_up()
    assert world.state() == State.STARTING
    world.wait(101)
    world.settle()
    assert world.condition(ConditionType.FAILED).reason == "DeadlineExceeded"


@pytest.mark.parametrize("end", [Outcome.SUCCEEDED, Outcome.FAILED])
def test_a_pod_whose_trainer_has_ended_holds_its_accelerator_as_long_as_its_other_containers_run(end: Outcome) -> None:
    world = World(make_job().workers(2))
    world.start()
    for name in list(world.workers):
        world.end(name, exit_code=0, message='{"outcome": "Succeeded"}')
    world.change("digits-w1", lingers=True)
    world.finish(end)
    assert len(world.workers) == 2, "it may be about to end"
    assert world.status.gpus.held == 1
    world.wait(31)
    world.settle()
    assert set(world.workers) == {"digits-w0"}
    assert world.status.gpus.held == 0


def test_progress_alone_is_written_every_30_seconds() -> None:
    world = widening()
    world.start()
    world.wait(10)
    before = world.status
    world.commit()
    assert world.status == before
    world.wait(20)
    world.settle()
    assert world.status.last_report != before.last_report


def test_a_job_that_is_being_deleted_and_kept_by_others_gives_all_back_and_hears_the_checkpoint_it_leaves() -> None:
    world = World(make_job().stages(2).workers(4).checkpoint())
    world.lingering = True
    world.start()
    before = set(world.workers)
    world.kept_by = ("example.com/parent",)
    world.settle()
    assert set(world.deleted) == before
    assert [world.condition(kind).reason for kind in (ConditionType.SUSPENDED, ConditionType.RUNNING)] == [
        "BeingDeleted",
        "BeingDeleted",
    ]
    assert "example.com/parent" in world.condition(ConditionType.SUSPENDED).message
    assert world.report is not None
    left = DurableCheckpoint(step=11, boundary=0, min_stages=2, layout_generation=1)
    world.report = world.report.model_copy(update={"checkpoint": left})
    world.bury()
    world.settle()
    assert (world.state(), world.status.checkpoint, world.status.gpus.held) == (State.SUSPENDED, left, 0)
    assert world.workers == {}, "nothing is replaced"
    world.now += timedelta(days=1)
    assert world.turn().events == (), "it is told once"


def test_a_job_trained_to_the_end_while_it_is_being_deleted_is_complete_and_is_not_deleted_again() -> None:
    world = World(make_job().stages(2).workers(4).set("runPolicy.ttlSecondsAfterFinished", 60))
    world.lingering = True
    world.start()
    world.kept_by = ("foregroundDeletion",)
    world.settle()
    assert world.report is not None
    world.report = world.report.model_copy(update={"outcome": Outcome.SUCCEEDED})
    world.settle()
    assert world.state() is State.COMPLETE
    world.now += timedelta(hours=1)
    assert not world.turn().expired, "by another policy than the one it was deleted by"


@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
def test_a_job_that_has_ended_expires_so_many_seconds_after_its_end_and_not_before(outcome: Outcome) -> None:
    world = World(make_job().stages(2).workers(2).set("runPolicy.ttlSecondsAfterFinished", 60))
    world.start()
    world.wait(3600)
    assert not world.turn().expired, "it trains"
    world.finish(outcome)
    world.wait(59)
    decided = world.turn()
    assert (decided.expired, decided.requeue_after) == (False, 1)
    world.wait(1)
    assert world.turn().expired


def test_a_job_that_ended_and_keeps_its_pods_keeps_none_that_still_waits_for_a_node() -> None:
    """It would take an accelerator once one is free, or have an autoscaler add a node."""
    job = make_job().stages(2).workers(2, most=4).checkpoint().set("elasticPolicy.claimFrom", "Autoscaler")
    world = World(job.set("runPolicy.cleanPodPolicy", "None"))
    world.settle()
    world.unschedulable = True
    world.warm_up()
    world.commit()
    assert [worker.scheduled for worker in world.workers.values()] == [True, True, False, False]
    world.finish(Outcome.SUCCEEDED)
    assert list(world.workers) == ["digits-w0", "digits-w1"]


def test_a_job_that_ended_and_keeps_its_pods_lets_those_go_that_hold_something_once_it_is_being_deleted() -> None:
    world = World(make_job().stages(2).workers(2).set("runPolicy.cleanPodPolicy", "None"))
    world.start()
    assert world.report is not None
    world.report = world.report.model_copy(update={"outcome": Outcome.SUCCEEDED})
    world.settle()
    world.now += timedelta(hours=1)
    world.settle()
    assert len(world.workers) == 2
    world.kept_by = ("example.com/parent",)
    world.settle()
    assert world.workers == {}


def test_a_report_of_a_deleted_job_of_the_same_name_changes_nothing() -> None:
    world = widening()
    world.start()
    world.commit()
    assert world.report is not None
    world.report = world.report.model_copy(update={"job_uid": "deleted", "step": 900, "boundary": 8})
    world.settle()
    report = world.status.last_report
    assert report is not None and (report.step, report.boundary) == (1, 0)
    assert world.status.frozen == "0/12" and world.shape == (4, 1)


def test_the_status_keeps_the_checkpoint_of_the_higher_generation() -> None:
    world = widening()
    world.start()
    world.commit(boundary=8)
    world.commit(checkpoint=8)
    newest = world.status.checkpoint
    assert newest is not None and newest.layout_generation == 2 and world.report is not None
    older = newest.model_copy(update={"layout_generation": 1, "step": newest.step + 5})
    world.report = world.report.model_copy(update={"checkpoint": older, "step": world.report.step + 10})
    world.settle()
    assert world.status.last_report is not None and world.status.last_report.step == world.report.step
    assert world.status.checkpoint == newest


def test_the_age_of_a_checkpoint_counts_from_the_report_that_first_told_of_it() -> None:
    world = World(make_job().stages(2).workers(2).checkpoint())
    world.start()
    assert world.status.checkpoint_time is None
    world.wait(60)
    world.commit(checkpoint=0)
    told = world.now
    assert world.status.checkpoint_time == told
    world.wait(60)
    world.commit()
    assert world.status.checkpoint_time == told
    assert world.report is not None and world.report.checkpoint is not None
    costs = {"pause_seconds": None, "write_seconds": None}
    same = world.report.checkpoint.model_copy(update=costs)
    world.report = world.report.model_copy(update={"step": world.report.step + 1, "checkpoint": same})
    world.settle()
    assert world.status.checkpoint_time == told, "a new leader knows no costs"
    world.commit(checkpoint=0)
    assert world.status.checkpoint_time == world.now


def test_steps_that_a_generation_trains_again_count_once() -> None:
    world = training()

    def report(step: int, redone: int) -> int:
        assert world.report is not None
        number = world.generation.layout_generation
        said = {"layout_generation": number, "step": step, "redone_steps": redone, "offers": offers(0)}
        world.report = world.report.model_copy(update=said)
        world.wait(60)
        world.settle()
        return world.status.redone_steps

    assert report(100, 0) == 0
    world.break_group(world.workers)
    assert report(95, 5) == 5
    assert report(120, 5) == 5
    world.break_group(world.workers)
    assert report(121, 0) == 5
    world.break_group(world.workers)
    assert report(114, 7) == 12


def test_clean_pod_policy_all_deletes_pods_that_have_ended() -> None:
    world = World(make_job().stages(2).workers(2).set("runPolicy.cleanPodPolicy", "All"))
    world.start()
    for name in world.workers:
        world.end(name, exit_code=0, message='{"outcome": "Succeeded"}')
    world.finish(Outcome.SUCCEEDED)
    assert world.workers == {}


@pytest.mark.parametrize(
    ("outcome", "reason", "told"),
    [
        (Outcome.SUCCEEDED, Reason.TRAINING_SUCCEEDED, "The model is trained and written"),
        (Outcome.FAILED, Reason.TRAINING_FAILED, "the loss is NaN"),
    ],
)
def test_the_end_of_a_job_has_a_reason_and_an_event(outcome: Outcome, reason: Reason, told: str) -> None:
    world = widening()
    world.start()
    world.finish(outcome, message="" if outcome is Outcome.SUCCEEDED else told)
    kind = ConditionType.COMPLETE if outcome is Outcome.SUCCEEDED else ConditionType.FAILED
    assert world.condition(kind).reason == reason
    assert [event.message for event in world.told if event.reason is reason] == [told]


@pytest.mark.parametrize(
    ("frozen_forward", "why", "told"),
    [
        ("Ahead", "", ", frozen layers compute ahead"),
        ("InPlace", "the cache is full", ", frozen layers compute in place (the cache is full)"),
    ],
)
def test_the_event_of_a_layout_says_when_frozen_layers_compute(frozen_forward: str, why: str, told: str) -> None:
    world = widening()
    world.start()
    world.commit(boundary=8)
    assert world.report is not None
    number = world.generation.layout_generation
    said = {"layout_generation": number, "frozen_forward": frozen_forward, "why_frozen_forward": why}
    world.report = world.report.model_copy(update=said)
    world.settle()
    confirmed = [event.message for event in world.told if event.reason is Reason.GENERATION_CONFIRMED]
    assert confirmed[-1] == f"Generation {number} trains: 2 pipelines of 2 stages{told}"


@pytest.mark.parametrize(
    ("stages", "told"), [(4, "2 workers are gone, 2 are held"), (2, "1 worker is gone, 1 is held")]
)
def test_an_event_says_how_many_workers_are_gone_and_how_many_are_held(stages: int, told: str) -> None:
    world = World(make_job().stages(stages).workers(stages).release())
    world.start()
    world.commit(boundary=8, checkpoint=8)
    world.commit()
    assert [event.message for event in world.told if event.reason is Reason.GPUS_RELEASED] == [told]
