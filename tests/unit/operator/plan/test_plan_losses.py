"""What counts against the failure budget and for how long, and that the loss of a node is one loss and no failure."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from pipetransformer_contract.api.status import ConditionType, State
from pipetransformer_contract.messages import Outcome, ResizeReason
from pipetransformer_operator.plan import FailureCause, Worker, WorkerPhase, plan
from pipetransformer_operator.plan.losses import describe
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.world import World, training

pytestmark = pytest.mark.timeout(60)


def on_nodes(pipelines: int = 4, *, per_node: int = 2, limit: int = 0) -> World:
    """A job that trains in pipelines of one stage, with so many workers on each of node-0, node-1 and so on."""
    world = World(make_job().stages(1).workers(pipelines).set("runPolicy.backoffLimit", limit))
    world.start()
    for worker in list(world.workers.values()):
        world.change(worker.name, node=f"node-{worker.id // per_node}")
    world.wait(100)
    return world


def falls_silent(world: World, name: str, others: Iterable[str]) -> None:
    """Its peers lose the connection and wait, and it is not heard; the rest trains on."""
    world.silent.add(name)
    world.break_group([other for other in others if other in world.workers])
    assert name not in {member.name for member in world.generation.members}
    world.commit()
    world.leave()


@pytest.mark.parametrize("apart", [1, 30, 200])
@pytest.mark.parametrize("seen_after", [0, 35, 70])
def test_the_loss_of_a_node_counts_once_and_is_no_failure_however_far_apart_its_workers_fall_silent(
    apart: int, seen_after: int
) -> None:
    """The budget is 3 where the cluster takes longer than expected: until it speaks the silence counts."""
    world = on_nodes(limit=3 if seen_after > 60 else 0)
    falls_silent(world, "digits-w3", ["digits-w0", "digits-w1", "digits-w2"])
    for second in range(max(apart, seen_after) + 1):
        if second == seen_after:
            world.lost_nodes.add("node-1")
        if second == apart:
            falls_silent(world, "digits-w2", ["digits-w0", "digits-w1"])
        world.wait(1)
        world.settle()
    world.wait(120)
    world.settle()
    assert (world.status.node_losses, world.status.failure_steps, world.status.finished) == (1, [], False)
    assert [str(event.reason) for event in world.told].count("NodeLost") == 1
    assert [(one.lost, one.failure_step, one.words) for one in world.status.silences] == [(True, None, "")]


def test_the_loss_of_a_node_counts_once_although_its_workers_fall_silent_ten_minutes_apart() -> None:
    world = on_nodes()
    world.lost_nodes.add("node-1")
    falls_silent(world, "digits-w3", ["digits-w0", "digits-w1", "digits-w2"])
    world.wait(600)
    world.settle()
    falls_silent(world, "digits-w2", ["digits-w0", "digits-w1"])
    assert (world.status.node_losses, world.status.failures) == (1, 0)


def test_workers_of_one_node_that_hang_minutes_apart_are_one_failure() -> None:
    world = on_nodes(5, per_node=3, limit=3)
    for number in (2, 1, 0):
        falls_silent(world, f"digits-w{number}", [f"digits-w{other}" for other in (*range(number), 3, 4)])
        for _ in range(2):
            world.wait(100)
            world.settle()
    assert (world.status.failures, world.status.node_losses) == (1, 0)


@pytest.mark.parametrize(("pace", "notes"), [(5, 0), (160, 1)])
def test_a_silence_is_noted_for_longer_where_heartbeats_are_rare(pace: int, notes: int) -> None:
    world = on_nodes(limit=3)
    falls_silent(world, "digits-w3", ["digits-w0", "digits-w1", "digits-w2"])
    world.wait(400)
    observed = replace(world.observed(), pace=timedelta(seconds=pace))
    assert len(plan(world.spec, observed, world.now).status.silences) == notes


def test_a_node_that_is_lost_again_after_it_came_back_is_another_loss() -> None:
    world = on_nodes()
    for losses, name in ((1, "digits-w3"), (2, "digits-w2")):
        world.lost_nodes.add("node-1")
        falls_silent(world, name, sorted({"digits-w0", "digits-w1", "digits-w2"} - {name}))
        assert world.status.node_losses == losses
        world.lost_nodes.clear()
        world.wait(400)
        world.settle()
    assert world.status.failures == 0


def test_a_worker_that_hangs_on_a_node_that_lives_is_a_failure_once_the_cluster_had_time_to_see_the_node_lost() -> None:
    world = on_nodes(limit=3)
    falls_silent(world, "digits-w3", ["digits-w0", "digits-w1", "digits-w2"])
    world.wait(59)
    world.settle()
    assert world.status.failures == 0
    world.wait(1)
    world.settle()
    assert (world.status.failures, world.status.node_losses) == (1, 0)


def test_the_silence_of_a_member_that_peers_name_is_judged_by_its_node_as_soon_as_it_counts() -> None:
    world = on_nodes(limit=0)
    world.lost_peers = {"digits-w3"}
    world.break_group(["digits-w0", "digits-w1", "digits-w2"])
    observed, uid = world.observed(), world.workers["digits-w3"].uid
    last = world.now - timedelta(seconds=10)
    heard, beats = {**observed.heard, uid: last}, {**observed.beats, uid: replace(observed.beats[uid], time=last)}

    status = plan(world.spec, replace(observed, heard=heard, beats=beats), world.now).status

    assert status.generation is not None
    assert "digits-w3" not in {member.name for member in status.generation.members}
    assert (status.failures, [silence.node for silence in status.silences]) == (0, ["node-1"])


def test_nothing_is_written_about_a_silence_after_the_end_of_the_job() -> None:
    world = on_nodes(limit=3)
    world.lost_nodes.add("node-1")
    falls_silent(world, "digits-w3", ["digits-w0", "digits-w1", "digits-w2"])
    world.finish(Outcome.SUCCEEDED)
    world.wait(120)  # its pods are gone by then
    world.settle()
    ended = world.status
    world.wait(7200)
    world.settle()
    assert world.status == ended


def test_a_silence_that_is_judged_because_the_job_ends_is_a_failure_that_does_not_fail_it() -> None:
    world = on_nodes(limit=0)
    falls_silent(world, "digits-w3", ["digits-w0", "digits-w1", "digits-w2"])
    assert world.status.failures == 0
    world.finish(Outcome.SUCCEEDED)
    assert (world.state(), world.status.failures) == (State.COMPLETE, 1)
    assert world.status.condition(ConditionType.FAILED) is None


def test_a_silent_member_whose_node_is_not_known_is_a_failure_at_once() -> None:
    world = on_nodes(limit=3)
    world.change("digits-w3", node="")
    falls_silent(world, "digits-w3", ["digits-w0", "digits-w1", "digits-w2"])
    assert (world.status.failures, world.status.silences) == (1, [])


def test_where_nodes_are_not_seen_the_silence_of_one_is_one_failure() -> None:
    world = on_nodes(limit=3)
    world.sees_drains = False
    falls_silent(world, "digits-w3", ["digits-w0", "digits-w1", "digits-w2"])
    world.wait(15)
    falls_silent(world, "digits-w2", ["digits-w0", "digits-w1"])
    assert (world.status.failures, world.status.node_losses) == (1, 0)


@pytest.mark.parametrize(("lost", "seen", "reason"), [(True, True, "NodeLost"), (False, False, "BackoffLimitExceeded")])
def test_a_silence_whose_cause_is_known_counts_in_the_turn_that_finds_it(lost: bool, seen: bool, reason: str) -> None:
    world = on_nodes(limit=0)
    world.sees_drains = seen
    world.lost_nodes = {"node-1"} if lost else set()
    world.silent, world.lost_peers = {"digits-w3"}, {"digits-w3"}
    assert reason in [event.reason for event in world.turn().events]


def test_a_crash_beside_the_loss_of_a_node_is_a_failure() -> None:
    world = on_nodes(limit=3)
    world.lost_nodes.add("node-1")
    world.silent.add("digits-w3")
    world.end("digits-w0", exit_code=1)
    world.break_group(["digits-w1", "digits-w2"])
    assert (world.status.failures, world.status.node_losses) == (1, 1)


def test_a_layout_without_a_lost_node_says_that_workers_were_lost() -> None:
    world = on_nodes()
    world.lost_nodes.add("node-1")
    world.silent.add("digits-w3")
    world.break_group(["digits-w0", "digits-w1", "digits-w2"])
    assert world.generation.reason is ResizeReason.FAILURE
    assert "Lost digits-w3 on node-1 (not heard for" in " ".join(event.message for event in world.told)


def test_failures_are_forgotten_after_so_many_committed_steps() -> None:
    job = make_job().stages(1).workers(4).set("runPolicy.backoffLimit", 1)
    world = World(job.set("runPolicy.forgetFailuresAfterSteps", 100))
    world.start()
    for failures in (1, 2, 3):
        world.end(max(world.workers, key=lambda name: world.workers[name].id), exit_code=1)
        world.settle()
        assert (world.status.failures, len(world.status.failure_steps)) == (failures, 1)
        world.commit(steps=99)
        assert len(world.status.failure_steps) == 1
        world.commit(steps=1)
        world.wait(30)
        world.settle()
        assert world.status.failure_steps == []
        world.leave()
        world.warm_up()
        world.commit()
    for _ in range(2):
        world.end(max(world.workers, key=lambda name: world.workers[name].id), exit_code=1)
        world.settle()
    assert world.state() is State.FAILED
    message = world.condition(ConditionType.FAILED).message
    assert message.startswith("spec.runPolicy.backoffLimit: 2 failures within 100 steps (forgetFailuresAfterSteps)")


def test_steps_that_are_made_again_after_a_restart_forget_no_failure() -> None:
    world = World(make_job().stages(1).workers(2).set("runPolicy.forgetFailuresAfterSteps", 100))
    world.start()
    world.commit(steps=500)
    world.end("digits-w1", exit_code=1)
    world.settle()
    world.commit()
    assert world.report is not None
    report = world.report.model_copy(update={"step": 10, "layout_generation": world.generation.layout_generation})
    status = world.status
    assert status.last_report is not None
    status = status.model_copy(update={"last_report": status.last_report.model_copy(update={"layout_generation": 1})})
    decided = plan(world.spec, replace(world.observed(), status=status, report=report), world.now + timedelta(hours=1))
    assert decided.status.last_report is not None and decided.status.last_report.step == 10
    assert decided.status.failure_steps == [501]
    world.status, world.report = decided.status, report
    world.end("digits-w0", exit_code=1)
    world.settle()
    assert world.status.failure_steps == [501, 501]


SILENT_END = "it did not report the end of training; the command of the pod template must call train()"


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ({"exit_code": 0}, f"exit code 0: {SILENT_END}"),
        ({"exit_code": 0, "message": '{"outcome": "Left", "message": "as told"}'}, "exit code 0: as told"),
        ({"exit_code": 0, "terminating": True}, "taken away"),
        ({"exit_code": 143, "terminating": True, "message": "no time"}, "taken away: no time"),
        ({"exit_code": 1, "message": '{"outcome": "Failed", "reason": "Bug", "message": "m"}'}, "exit code 1: Bug: m"),
        ({"message": "Evicted: low on memory"}, "Evicted: low on memory"),
        ({}, "Failed"),
    ],
)
def test_how_a_worker_was_lost_is_told_in_its_own_words(end: dict[str, Any], told: str) -> None:
    assert describe(Worker(0, "digits-w0", "uid", **{"phase": WorkerPhase.FAILED, **end})) == told


def seen_failures(world: World) -> list[tuple[str, FailureCause]]:
    """Failures for the metrics, by node and cause, until nothing is left to do."""
    seen: list[tuple[str, FailureCause]] = []
    for _ in range(5):
        seen += [(one.node, one.cause) for one in world.turn().failures]
    world.settle()
    return seen


@pytest.mark.parametrize(
    ("code", "message", "cause"),
    [
        (1, "Traceback", FailureCause.EXITED),
        (137, "OOMKilled", FailureCause.KILLED),
        (None, "UnexpectedAdmissionError", FailureCause.POD),
        (1, '{"outcome": "Failed", "reason": "DeviceFailed"}', FailureCause.ACCELERATOR),
    ],
)
def test_a_failure_is_told_once_with_its_node_and_cause(code: int | None, message: str, cause: FailureCause) -> None:
    world = on_nodes(limit=3)
    world.change("digits-w3", phase=WorkerPhase.FAILED, exit_code=code, message=message)
    assert seen_failures(world) == [("node-1", cause)]


@pytest.mark.parametrize("lost", [False, True])
def test_a_silence_is_told_once_it_is_known_whether_the_node_is_lost(lost: bool) -> None:
    world = on_nodes(limit=3)
    world.silent.add("digits-w3")
    for name in ("digits-w0", "digits-w1", "digits-w2"):
        world._waiting[world.workers[name].uid] = world.generation.layout_generation, world.now
    assert seen_failures(world) == []
    if lost:
        world.lost_nodes.add("node-1")
    world.wait(60)
    assert seen_failures(world) == [("node-1", FailureCause.LOST if lost else FailureCause.SILENT)]


def test_a_member_that_beats_and_holds_up_its_peers_is_told_as_silent() -> None:
    world = on_nodes(limit=3)
    world.break_group(["digits-w0", "digits-w1", "digits-w2"])
    world.wait(600)
    assert seen_failures(world) == [("node-1", FailureCause.SILENT)]


def test_a_joiner_that_fails_is_a_failure_of_its_node() -> None:
    world = training(1, most=4)
    world.change("digits-w2", node="node-b", phase=WorkerPhase.FAILED, exit_code=1)
    assert seen_failures(world) == [("node-b", FailureCause.EXITED)]


def test_workers_that_are_lost_together_are_told_in_order() -> None:
    world = on_nodes(10, limit=3)
    for name in ("digits-w8", "digits-w7"):
        world.end(name, exit_code=1)
    world.settle()
    lost = "Lost digits-w7 on node-3 (exit code 1), digits-w8 on node-4 (exit code 1)"
    assert lost in [event.message for event in world.told]


def test_a_worker_that_is_taken_away_is_no_failure_of_its_node() -> None:
    world = on_nodes(limit=3)
    world.change("digits-w3", disrupted=True)
    assert seen_failures(world) == []
