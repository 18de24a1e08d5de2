"""Who is lost and who is not, what counts against the budget, and what the user is told."""

from dataclasses import replace
from datetime import timedelta

import pytest

from pipetransformer_contract.messages import ResizeReason
from pipetransformer_operator.api.status import ConditionType, State
from pipetransformer_operator.plan import WorkerPhase, plan
from tests.builders import make_job
from tests.unit.operator.world import World

pytestmark = pytest.mark.timeout(20)


def training(pipelines: int = 2, most: int | None = None) -> World:
    world = World(make_job().stages(2).workers(2 * pipelines, most=most))
    world.start()
    return world


def message(world: World, kind: ConditionType) -> str:
    condition = world.status.condition(kind)
    assert condition is not None
    return condition.message


@pytest.mark.parametrize(
    ("change", "failures", "reason"),
    [
        ({"phase": WorkerPhase.FAILED, "exit_code": 1, "message": "Segmentation fault"}, 1, ResizeReason.FAILURE),
        ({"phase": WorkerPhase.FAILED, "exit_code": 137}, 1, ResizeReason.FAILURE),
        ({"phase": WorkerPhase.FAILED, "exit_code": 137, "message": "OOMKilled: too much"}, 1, ResizeReason.FAILURE),
        ({"phase": WorkerPhase.FAILED, "message": "NodeLost: node is gone"}, 1, ResizeReason.FAILURE),
        ({"phase": WorkerPhase.SUCCEEDED, "exit_code": 0}, 1, ResizeReason.FAILURE),
        ({"phase": WorkerPhase.SUCCEEDED, "exit_code": 0, "message": '{"outcome": "Left"}'}, 0, ResizeReason.DRAIN),
        ({"terminating": True}, 0, ResizeReason.DRAIN),
        ({"terminating": True, "phase": WorkerPhase.FAILED, "exit_code": 143}, 0, ResizeReason.DRAIN),
        ({"disrupted": True}, 0, ResizeReason.DRAIN),
        ({"disrupted": True, "phase": WorkerPhase.FAILED, "message": "Evicted: low on memory"}, 0, ResizeReason.DRAIN),
    ],
    ids=["crash", "killed", "oom", "node-lost", "exit-0", "left", "deleted", "stopped", "preempted", "evicted"],
)
def test_what_ends_a_worker_decides_whether_it_counts(
    change: dict[str, object], failures: int, reason: ResizeReason
) -> None:
    world = training()
    world.change("digits-w3", **change)
    world.settle()
    assert (world.shape, world.plan.reason) == ((2, 1), reason)
    assert world.status.failures == failures
    assert "digits-w3" not in {member.name for member in (*world.plan.members, *world.plan.leavers)}
    world.commit()
    world.leave()
    world.warm_up()
    world.commit()
    assert world.shape == (2, 2), "the starting size is taken back"
    assert world.status.failures == failures


@pytest.mark.parametrize("worker", ["digits-w2", "digits-w3"])
def test_a_preempted_claim_takes_its_pipeline_along_and_is_not_claimed_again_at_once(worker: str) -> None:
    world = training(pipelines=1, most=4)
    world.warm_up()
    world.commit()
    assert world.shape == (2, 2)
    world.change(worker, disrupted=True)
    world.settle()
    assert [member.name for member in world.plan.members] == ["digits-w0", "digits-w1"]
    world.commit()
    world.leave()
    assert set(world.workers) == {"digits-w0", "digits-w1"}
    world.wait(59)
    world.settle()
    assert len(world.workers) == 2
    world.wait(2)
    world.settle()
    assert len(world.workers) == 4
    assert world.status.failures == 0


def test_drains_and_resizes_never_use_up_the_budget() -> None:
    world = World(make_job().stages(2).workers(4).set("runPolicy.backoffLimit", 0))
    world.start()
    for _ in range(5):
        world.change(max(world.workers), terminating=True)
        world.settle()
        world.kill(max(name for name, worker in world.workers.items() if worker.terminating))
        world.settle()
        world.commit()
        world.leave()
        world.warm_up()
        world.commit()
    assert world.state() is not State.FAILED
    assert world.shape == (2, 2)


def test_a_worker_that_was_deleted_while_the_operator_was_away_is_no_failure() -> None:
    world = training()
    world.kill("digits-w3")
    world.settle()
    assert (world.shape, world.plan.reason, world.status.failures) == ((2, 1), ResizeReason.DRAIN, 0)


def test_the_failure_says_what_each_lost_worker_said() -> None:
    world = World(make_job().stages(2).workers(4).set("runPolicy.backoffLimit", 0))
    world.start()
    world.end("digits-w1", exit_code=137, message="OOMKilled: the worker needed more memory than its limit")
    world.settle()
    assert "digits-w1 (exit code 137: OOMKilled: the worker needed more" in message(world, ConditionType.FAILED)


def test_a_joiner_that_crashes_cancels_the_claim_and_counts_nothing() -> None:
    world = training(pipelines=1, most=4)
    world.end("digits-w2", exit_code=1, message="no such module")
    world.settle()
    resizing = world.status.condition(ConditionType.RESIZING)
    assert resizing is not None and resizing.reason == "WorkerFailed"
    assert "digits-w2 (exit code 1: no such module)" in resizing.message
    assert world.status.failures == 0
    assert set(world.workers) == {"digits-w0", "digits-w1"}


def test_a_command_that_ends_well_without_training_uses_up_the_budget_and_is_told_what_to_do() -> None:
    world = World(make_job().stages(2).workers(2).set("runPolicy.backoffLimit", 1))
    for failures in (1, 2):
        world.settle()
        assert len(world.workers) == 2, "it is tried again at once"
        world.end(min(world.workers), exit_code=0, message="Completed")
        world.settle()
        assert world.status.failures == failures
    assert world.state() is State.FAILED
    assert "has to call train()" in message(world, ConditionType.FAILED)


def test_a_worker_that_is_taken_from_a_start_is_replaced_in_half_a_minute_and_no_failure() -> None:
    world = World(make_job().stages(2).workers(2))
    world.settle()
    world.warm_up(["digits-w0"])
    world.change("digits-w1", disrupted=True, phase=WorkerPhase.FAILED, message="Evicted: low on disk")
    world.settle()
    world.wait(29)
    world.settle()
    assert set(world.workers) == {"digits-w0"}
    world.wait(1)
    world.settle()
    world.warm_up()
    assert {member.name for member in world.plan.members} == {"digits-w0", "digits-w2"}
    assert world.status.failures == 0


@pytest.mark.parametrize(
    "change",
    [{"disrupted": True}, {"phase": WorkerPhase.SUCCEEDED, "exit_code": 0}],
    ids=["preempted", "exit-0"],
)
def test_a_joiner_that_is_gone_before_it_was_ready_is_claimed_again_later(change: dict[str, object]) -> None:
    world = training(pipelines=1, most=4)
    world.change("digits-w2", **change)
    world.settle()
    resizing = world.status.condition(ConditionType.RESIZING)
    assert resizing is not None and resizing.reason == "WorkerFailed"
    assert (set(world.workers), world.status.failures) == ({"digits-w0", "digits-w1"}, 0)
    world.wait(61)
    world.settle()
    assert len(world.workers) == 4


def test_a_joiner_that_refuses_the_spec_cancels_the_claim_as_its_node_may_lack_what_others_have() -> None:
    world = training(pipelines=1, most=4)
    refusal = '{"outcome": "Failed", "reason": "DataUnreadable", "message": "spec.data.path: no such file"}'
    world.end("digits-w2", exit_code=2, message=refusal)
    world.settle()
    assert (world.state(), world.status.failures) == (State.RUNNING, 0)
    resizing = world.status.condition(ConditionType.RESIZING)
    assert resizing is not None and resizing.reason == "WorkerFailed"
    assert "digits-w2 (exit code 2: DataUnreadable: spec.data.path: no such file)" in resizing.message
    world.wait(61)
    world.settle()
    world.warm_up()
    assert world.shape == (2, 2), "it is tried again"
    world.end("digits-w0", exit_code=2, message=refusal)
    world.settle()
    assert world.state() is State.FAILED, "a member knows"


def test_a_member_that_peers_lost_and_that_is_silent_is_replaced_at_once() -> None:
    world = training()
    world.wait(100)
    world.lost_peers = {"digits-w3"}
    world.silent = {"digits-w3"}
    decided = world.turn()
    assert world.plan.reason is ResizeReason.FAILURE
    assert "not heard for 10 s" in " ".join(event.message for event in decided.events)
    assert "digits-w3" not in world.workers


def test_a_member_that_peers_lost_and_that_still_beats_is_kept() -> None:
    world = training()
    world.lost_peers = {"digits-w3"}
    world.wait(3600)
    world.settle()
    assert world.plan.layout_generation == 1


def test_a_member_that_was_asked_to_beat_rarely_may_be_silent_for_longer() -> None:
    world = training()
    world.wait(100)
    world.lost_peers = {"digits-w3"}
    observed = world.observed()
    uid = world.workers["digits-w3"].uid
    for silence, lost in ((39, False), (40, True)):
        time = world.now - timedelta(seconds=silence)
        beat = replace(observed.beats[uid], time=time, pace=timedelta(seconds=32))
        heard = {**observed.heard, uid: time}
        decided = plan(world.spec, replace(observed, beats={**observed.beats, uid: beat}, heard=heard), world.now)
        assert (decided.status.layout_generation > 1) == lost, silence


def test_a_silent_member_is_left_alone_while_the_job_trains() -> None:
    world = training()
    world.silent = {"digits-w3"}
    world.wait(3600)
    world.settle()
    assert world.plan.layout_generation == 1


def test_a_silent_member_whose_peers_all_wait_is_replaced() -> None:
    world = training()
    world.wait(100)
    world.silent = {"digits-w3"}
    world.break_group(["digits-w0", "digits-w1", "digits-w2"])
    assert (world.shape, world.plan.reason) == ((2, 1), ResizeReason.FAILURE)
    assert world.status.failures == 1


def replacing() -> World:
    """A job that goes on narrower while two workers are prepared, the first of them on a node."""
    world = training()
    world.end("digits-w3", exit_code=1)
    world.settle()
    world.commit()
    world.leave()
    assert {"digits-w4", "digits-w5"} <= set(world.workers)
    world.silent = {"digits-w4"}
    world.change("digits-w4", node="node-1", phase=WorkerPhase.PENDING)
    return world


def test_a_replacement_on_a_lost_node_is_replaced_at_once() -> None:
    world = replacing()
    world.change("digits-w4", node_lost=True)
    decided = world.turn()
    assert "digits-w4 (its node node-1 is lost)" in " ".join(event.message for event in decided.events)
    world.settle()
    assert set(world.workers) == {"digits-w0", "digits-w1", "digits-w5", "digits-w6"}
    assert world.status.failures == 1, "the lost node is none of the job's failures"


def test_a_replacement_that_its_node_says_nothing_of_is_replaced_in_half_a_minute() -> None:
    world = replacing()
    world.change("digits-w4", unattended_since=world.now)
    assert world.turn().requeue_after == 30
    world.wait(29)
    world.settle()
    assert "digits-w4" in world.workers
    world.wait(1)
    world.settle()
    assert "digits-w4" not in world.workers and "digits-w6" in world.workers


def test_a_replacement_that_is_heard_or_whose_image_is_pulled_is_waited_for() -> None:
    world = replacing()
    world.wait(100)
    world.settle()
    assert "digits-w4" in world.workers, "its image is pulled"
    world.change("digits-w4", node_lost=True)
    world.silent.clear()
    world.settle()
    assert "digits-w4" in world.workers, "it is heard"


def test_a_job_that_starts_gives_up_on_no_node_because_the_cluster_is_slow() -> None:
    world = World(make_job().stages(2).workers(2))
    world.settle()
    world.silent = set(world.workers)
    world.change("digits-w0", node="node-1", phase=WorkerPhase.PENDING, unattended_since=world.now)
    world.wait(100)
    world.settle()
    assert set(world.workers) == {"digits-w0", "digits-w1"}
    world.change("digits-w0", node_lost=True)
    world.settle()
    assert set(world.workers) == {"digits-w1", "digits-w2"}


def test_a_node_whose_member_fell_silent_is_in_doubt_and_no_word_of_it_is_waited_for() -> None:
    world = training()
    world.change("digits-w3", node="node-1")
    world.wait(100)
    world.silent, world.lost_peers = {"digits-w3"}, {"digits-w3"}
    assert world.turn().doubted == {"node-1"}

    other = World(make_job().stages(2).workers(2))
    other.settle()
    other.silent = set(other.workers)
    since = other.now
    other.change("digits-w0", node="node-1", phase=WorkerPhase.PENDING, unattended_since=since, node_doubted=True)
    assert other.turn().requeue_after == 5
    other.wait(5)
    other.settle()
    assert set(other.workers) == {"digits-w1", "digits-w2"}, "it is replaced, although the job only starts"


def test_a_silent_member_on_a_lost_node_is_replaced_and_one_that_beats_is_not() -> None:
    world = training()
    world.wait(100)
    world.change("digits-w3", node_lost=True)
    world.settle()
    assert world.plan.layout_generation == 1
    world.silent = {"digits-w3"}
    world.settle()
    assert (world.shape, world.plan.reason, world.status.failures) == ((2, 1), ResizeReason.FAILURE, 1)


def test_silence_before_the_operators_start_says_nothing() -> None:
    world = training()
    world.since = world.now
    world.silent = {"digits-w3"}
    world.lost_peers = {"digits-w3"}
    decided = world.turn()
    assert world.plan.layout_generation == 1
    assert decided.requeue_after == 10
    world.wait(10)
    world.settle()
    assert world.plan.layout_generation == 2


def stalling() -> World:
    world = World(make_job().stages(2).workers(4).set("runPolicy.stallTimeoutSeconds", 60))
    world.start()
    return world


def test_a_stalled_job_whose_members_are_all_heard_says_so_and_waits() -> None:
    world = stalling()
    world.wait(61)
    world.settle()
    assert world.state() is State.STALLED
    assert world.plan.layout_generation == 1
    world.commit()
    assert world.state() is State.RUNNING


def test_one_job_of_thousands_reports_too_rarely_to_be_stalled_so_soon() -> None:
    world = stalling()
    world.report_pace = timedelta(seconds=50)
    world.wait(149)
    world.settle()
    assert world.state() is State.RUNNING
    world.wait(1)
    world.settle()
    assert world.state() is State.STALLED


def test_the_suspect_of_a_stall_is_named_and_replaced() -> None:
    world = stalling()
    world.silent = {"digits-w2"}
    world.wait(59)
    world.settle()
    assert world.plan.layout_generation == 1
    world.wait(1)
    decided = world.turn()
    assert "digits-w2" in next(event.message for event in decided.events if event.reason == "WorkerLost")
    assert "digits-w2" in message(world, ConditionType.STALLED)
    assert (world.shape, world.status.failures) == ((2, 1), 1)
    world.commit()
    assert world.state() is not State.STALLED


def test_a_job_that_nobody_is_heard_of_is_left_alone_until_the_cluster_takes_its_pods() -> None:
    world = stalling()
    world.silent = set(world.workers)
    world.wait(600)
    world.settle()
    assert (world.state(), world.plan.layout_generation) == (State.STALLED, 1)
    assert "no member is heard" in message(world, ConditionType.STALLED)
    for name in world.workers:
        world.change(name, disrupted=True)
    world.settle()
    assert world.status.plan is None and world.status.failures == 0
    assert {worker.id for worker in world.workers.values() if worker.alive} == {4, 5, 6, 7}


def test_nodes_that_are_cut_off_with_all_members_may_still_train_and_it_is_said() -> None:
    world = training()
    for name in world.workers:
        world.change(name, node_lost=True)
    world.silent = set(world.workers)
    world.wait(50)
    decided = world.turn()
    assert [event.reason for event in decided.events] == ["NotHeard"]
    world.settle()
    stalled = world.status.condition(ConditionType.STALLED)
    assert stalled is not None and (stalled.status, stalled.reason) == ("Unknown", "NotHeard")
    assert (world.state(), world.plan.layout_generation) == (State.RUNNING, 1)
    world.silent.clear()
    world.settle()
    stalled = world.status.condition(ConditionType.STALLED)
    assert stalled is not None and (stalled.status, stalled.reason) == ("False", "Progressing")


def test_members_whose_nodes_were_deleted_are_lost_although_nobody_is_heard() -> None:
    world = training()
    for name in world.workers:
        world.change(name, node_lost=True, node_gone=True)
    world.silent = set(world.workers)
    world.wait(50)
    world.settle()
    assert world.status.plan is None and world.status.failures == 1
    assert {worker.id for worker in world.workers.values() if worker.alive} == {4, 5, 6, 7}


@pytest.mark.parametrize("named", [False, True])
def test_the_last_words_before_all_fell_silent_make_nobody_lost(named: bool) -> None:
    world = stalling()
    world.wait(600)
    observed = replace(world.observed(), lost_peers=frozenset(world.workers) if named else frozenset())
    for second in range(60):
        heard = {uid: world.now - timedelta(seconds=second + ago) for ago, uid in enumerate(sorted(observed.heard))}
        decided = plan(world.spec, replace(observed, heard=heard), world.now)
        assert decided.status.layout_generation == 1, second
    heard = dict.fromkeys(observed.heard, world.now - timedelta(seconds=30)) | {sorted(observed.heard)[0]: world.now}
    decided = plan(world.spec, replace(observed, heard=heard), world.now)
    assert decided.status.worker_ids[0] == 0 and not {1, 2, 3} & set(decided.status.worker_ids)


def test_a_member_that_does_not_come_when_all_others_wait_is_replaced_in_the_end() -> None:
    world = stalling()
    world.lost_peers = {f"digits-w{number}" for number in range(4)}
    world.break_group(["digits-w0", "digits-w1", "digits-w3"])
    world.wait(59)
    world.settle()
    assert world.plan.layout_generation == 1
    world.wait(1)
    world.settle()
    assert (world.shape, world.plan.reason) == ((2, 1), ResizeReason.FAILURE)
    assert "digits-w2" not in world.workers


def test_success_is_known_from_any_member_once_the_leader_is_gone() -> None:
    world = training()
    for name in ("digits-w1", "digits-w2", "digits-w3"):
        world.end(name, exit_code=0, message='{"outcome": "Succeeded"}')
    world.settle()
    assert world.state() is State.RUNNING
    world.kill("digits-w0")
    world.settle()
    assert world.state() is State.COMPLETE
