"""Who is lost and who is not, what counts against the budget, and what the user is told."""

from datetime import timedelta

import pytest

from pipetransformer_contract.api.status import ConditionType, State
from pipetransformer_contract.messages import Offer, ResizeReason
from pipetransformer_operator.plan import EventType, WorkerPhase, worker_name
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.world import JOB, World, training

pytestmark = pytest.mark.timeout(60)


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
    assert (world.shape, world.generation.reason) == ((2, 1), reason)
    assert world.status.failures == failures
    assert "digits-w3" not in {member.name for member in (*world.generation.members, *world.generation.leavers)}
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
    assert [member.name for member in world.generation.members] == ["digits-w0", "digits-w1"]
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


@pytest.mark.parametrize("moved", ["cordoned", "crashed"])
def test_a_preempted_claim_takes_claimed_workers_along_and_none_that_replaced_one_of_the_starting_size(
    moved: str,
) -> None:
    """Who joined last stands behind the claimed ones; the next preemption would leave too few for any layout."""
    world = World(make_job().stages(2).workers(2, least=2, most=4))
    world.offered = [Offer(stages=2, bytes_per_worker=1)]
    world.start()
    world.warm_up()
    world.commit()
    if moved == "cordoned":
        world.change("digits-w0", draining=True)
        world.settle()
    else:
        world.end("digits-w0", exit_code=1)
        world.settle()
        world.commit()
        world.part()
    world.warm_up()
    world.commit()
    world.part()
    world.commit()
    claimed = [worker_name(JOB, key) for key in world.status.claimed_ids]
    own = set(world.workers) - set(claimed)
    assert (world.shape, len(own), len(claimed)) == ((2, 2), 2, 2)
    world.change(claimed[1], disrupted=True)
    world.settle()
    assert (world.shape, [member.name for member in world.generation.leavers]) == ((2, 1), [claimed[0]])
    world.commit()
    world.part()
    assert set(world.workers) == own


def test_a_worker_whose_accelerator_failed_is_replaced_on_another_node_if_there_is_one() -> None:
    world = training()
    world.change("digits-w2", node="node-b")
    message = '{"outcome": "Failed", "reason": "DeviceFailed", "message": "loss failed: CUDA error: ECC"}'
    world.end("digits-w2", exit_code=1, message=message)
    decided = world.turn()
    assert set(decided.unfit) == {"node-b"}
    assert "Lost digits-w2 on node-b (exit code 1: DeviceFailed" in " ".join(event.message for event in decided.events)
    world.settle()
    assert (world.shape, world.status.failures, world.status.finished) == ((2, 1), 1, False)
    world.commit()
    world.leave()
    world.warm_up()
    assert world.shape == (2, 2)


def test_the_second_accelerator_that_fails_on_a_node_has_it_avoided_and_the_job_says_so() -> None:
    world = World(make_job().stages(1).workers(4))
    world.start()
    message = '{"outcome": "Failed", "reason": "DeviceFailed", "message": "CUDA error: ECC"}'
    for failures, name in ((0, "digits-w3"), (1, "digits-w2")):
        world.device_failures = {"node-b": failures} if failures else {}
        world.change(name, node="node-b")
        world.end(name, exit_code=1, message=message)
        uid, decided = world.workers[name].uid, world.turn()
        assert decided.failed_devices == {uid: "node-b"}
        told = [event.message for event in decided.events if event.reason == "NodeAvoided"]
        until = f"{world.now + timedelta(hours=1):%Y-%m-%dT%H:%M:%SZ}"
        words = f"Node node-b: 2 accelerators failed; no worker of any job is sent there before {until}"
        assert told == [words] * failures
        world.settle()
        world.commit()
        world.leave()
        world.warm_up()
        world.commit()


def test_two_accelerators_that_fail_at_once_on_a_node_have_it_avoided() -> None:
    world = World(make_job().stages(1).workers(4))
    world.start()
    for name, node in (("digits-w1", ""), ("digits-w2", "node-b"), ("digits-w3", "node-b")):
        world.change(name, node=node)
        world.end(name, exit_code=1, message='{"outcome": "Failed", "reason": "DeviceFailed", "message": "ECC"}')
    assert list(world.turn().failed_devices.values()) == ["node-b", "node-b"], "local workers have no node"
    assert [event.type for event in world.told if event.reason == "NodeAvoided"] == [EventType.WARNING]


def test_a_job_that_finds_no_node_names_those_that_are_avoided() -> None:
    world = World(make_job().stages(2).workers(2))
    world.unschedulable = True
    world.avoided = {"node-b": world.now + timedelta(minutes=5)}
    world.settle()
    message = world.condition(ConditionType.RUNNING).message
    assert message.endswith("; avoiding nodes whose accelerators failed: node-b")


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
    assert (world.shape, world.generation.reason, world.status.failures) == ((2, 1), ResizeReason.DRAIN, 0)


def test_the_failure_says_what_each_lost_worker_said() -> None:
    world = World(make_job().stages(2).workers(4).set("runPolicy.backoffLimit", 0))
    world.start()
    world.end("digits-w1", exit_code=137, message="OOMKilled: the worker needed more memory than its limit")
    world.settle()
    assert (
        "digits-w1 (exit code 137: OOMKilled: the worker needed more" in world.condition(ConditionType.FAILED).message
    )
    assert world.generation.layout_generation == 1, "a job that has failed gets no further generation"


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
    world.settle()
    for failures in (1, 2):
        world.end(min(world.workers), exit_code=0, message="Completed")
        world.settle()
        assert world.status.failures == failures
        world.wait(10)
        world.settle()
    assert world.state() is State.FAILED
    assert "must call train()" in world.condition(ConditionType.FAILED).message


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
    assert {member.name for member in world.generation.members} == {"digits-w0", "digits-w2"}
    assert world.status.failures == 0


def test_workers_that_a_start_lost_together_are_replaced_after_the_longest_wait_of_any() -> None:
    world = World(make_job().stages(2).workers(4))
    world.settle()
    world.end("digits-w2", exit_code=1)
    world.change("digits-w3", disrupted=True, phase=WorkerPhase.FAILED, message="Evicted: low on disk")
    world.settle()
    for seconds, workers in ((29, 2), (1, 4)):
        world.wait(seconds)
        world.settle()
        assert len(world.workers) == workers


@pytest.mark.parametrize(
    ("change", "seconds"),
    [
        ({"disrupted": True, "phase": WorkerPhase.FAILED, "message": "Evicted: low on disk"}, 30),
        ({"phase": WorkerPhase.FAILED, "exit_code": 1}, 10),
        ({"terminating": True}, 0),
        ({"node_lost": True, "node": "dead"}, 0),
    ],
    ids=["evicted", "crash", "deleted", "node-lost"],
)
def test_a_worker_lost_from_a_start_that_takes_long_is_replaced_and_the_others_stay_warm(
    change: dict[str, object], seconds: int
) -> None:
    world = World(make_job().stages(2).workers(4))
    world.settle()
    world.warm_up(["digits-w0", "digits-w1", "digits-w2"])
    world.wait(700)
    world.settle()
    if "node_lost" in change:
        world.silent.add("digits-w3")
    world.change("digits-w3", **change)
    world.settle()
    if seconds:
        running = world.condition(ConditionType.RUNNING)
        assert running.reason == "WorkerFailed" and running.message.startswith("lost digits-w3 (")
        assert running.message.endswith(f"before all workers were ready; replaced in {seconds} s")
    world.wait(seconds)
    world.settle()
    alive = {name for name, worker in world.workers.items() if worker.alive}
    assert alive == {"digits-w0", "digits-w1", "digits-w2", "digits-w4"}
    world.wait(599)
    world.settle()
    world.warm_up()
    assert (world.shape, world.deleted_alive) == ((2, 2), ["digits-w3"] if "node_lost" in change else [])


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


@pytest.mark.parametrize(
    "change",
    [
        {"terminating": True},
        {"node_lost": True, "node": "dead"},
        {"draining": True, "node": "old", "disrupted": True, "phase": WorkerPhase.FAILED},
    ],
    ids=["deleted", "node-lost", "drained"],
)
def test_a_joiner_that_is_replaced_late_in_a_claim_has_all_its_time_but_not_for_ever(change: dict[str, object]) -> None:
    world = World(make_job().stages(4).workers(4, most=8))
    world.start()
    warm = {"digits-w4", "digits-w5", "digits-w6"}
    world.warm_up(warm)
    world.unschedulable = True
    for _ in range(4):
        world.wait(119)
        world.settle()
        last = max(world.workers, key=lambda name: world.workers[name].id)
        world.silent.add(last)
        world.change(last, **change)
        world.settle()
        assert warm < set(world.workers), "they stay warm"
    world.wait(120)
    world.settle()
    assert not warm & set(world.workers)
    assert world.condition(ConditionType.RESIZING).reason == "Unschedulable"


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


def test_success_is_known_from_any_member_once_the_leader_is_gone() -> None:
    world = training()
    for name in ("digits-w1", "digits-w2", "digits-w3"):
        world.end(name, exit_code=0, message='{"outcome": "Succeeded"}')
    world.settle()
    assert world.state() is State.RUNNING
    world.kill("digits-w0")
    world.settle()
    assert world.state() is State.COMPLETE


def test_survivors_that_a_ceiling_keeps_from_any_layout_say_so_and_go_on_once_it_is_lifted() -> None:
    builder = make_job().stages(2).workers(2, most=2)
    world = World(builder)
    world.settle()
    world.warm_up()  # nobody has told of shorter pipelines
    builder.workers(2, most=1)
    world.metadata_generation += 1
    world.settle()
    world.kill("digits-w1")
    world.settle()
    running = world.condition(ConditionType.RUNNING)
    assert (running.reason, set(world.workers)) == ("Recovering", {"digits-w0"})
    assert "spec.elasticPolicy.maxWorkers allows no more than 1" in running.message

    builder.workers(2, most=2)
    world.metadata_generation += 1
    world.settle()
    world.warm_up()
    assert (world.shape, world.generation.layout_generation) == ((2, 1), 2)
