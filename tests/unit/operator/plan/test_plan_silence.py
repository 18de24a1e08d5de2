"""Workers and nodes of which nothing is heard: who is lost, who is waited for, and what is only said."""

from dataclasses import replace
from datetime import timedelta

import pytest

from pipetransformer_contract.api.status import ConditionType, State
from pipetransformer_contract.messages import ResizeReason
from pipetransformer_operator.kube.node_health.health import NodeHealth
from pipetransformer_operator.plan import WorkerPhase, plan
from pipetransformer_operator.plan.draft import DOUBT
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.world import World, training

pytestmark = pytest.mark.timeout(60)


def test_a_member_that_peers_lost_and_that_is_silent_is_replaced_at_once() -> None:
    world = training()
    world.wait(100)
    world.lost_peers = {"digits-w3"}
    world.silent = {"digits-w3"}
    decided = world.turn()
    assert world.generation.reason is ResizeReason.FAILURE
    assert "not heard for 10 s" in " ".join(event.message for event in decided.events)
    assert "digits-w3" not in world.workers


def test_a_member_that_peers_lost_and_that_still_beats_is_kept() -> None:
    world = training()
    world.lost_peers = {"digits-w3"}
    world.wait(3600)
    world.settle()
    assert world.generation.layout_generation == 1


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


@pytest.mark.parametrize(
    ("node_lost", "since_break", "operator_was_away", "lost"),
    [(True, 19, False, False), (True, 20, False, True), (False, 60, False, False), (True, 60, True, False)],
)
def test_a_member_on_a_lost_node_that_its_peers_name_is_not_waited_for_as_long_as_its_pace(
    node_lost: bool, since_break: float, operator_was_away: bool, lost: bool
) -> None:
    world = training()
    world.wait(1000)
    world.lost_peers = {"digits-w3"}
    world.change("digits-w3", node="node-1", node_lost=node_lost)
    world.wait(since_break)
    broken = world.now - timedelta(seconds=since_break)
    observed = world.observed()
    beats = {uid: replace(beat, pace=timedelta(seconds=160)) for uid, beat in observed.beats.items()}
    for name in ("digits-w0", "digits-w1", "digits-w2"):
        uid = world.workers[name].uid
        beats[uid] = replace(beats[uid], waiting_after=1, waiting_since=broken)
    since = broken - timedelta(seconds=1 if operator_was_away else 500)
    heard = {**observed.heard, world.workers["digits-w3"].uid: broken - timedelta(seconds=20)}
    decided = plan(world.spec, replace(observed, beats=beats, heard=heard, listening_since=since), world.now)
    assert (decided.status.layout_generation > 1) == lost


def test_a_silent_member_is_left_alone_while_the_job_trains() -> None:
    world = training()
    world.silent = {"digits-w3"}
    for _ in range(4):
        world.wait(900)
        world.commit()
    assert world.generation.layout_generation == 1


def test_a_silent_member_whose_peers_all_wait_is_replaced() -> None:
    world = training()
    world.wait(100)
    world.silent = {"digits-w3"}
    world.break_group(["digits-w0", "digits-w1", "digits-w2"])
    assert (world.shape, world.generation.reason) == ((2, 1), ResizeReason.FAILURE)
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
    assert "digits-w4 on node-1 (its node is lost)" in " ".join(event.message for event in decided.events)
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
    assert world.turn().doubted == {"node-1": world.now + DOUBT}

    other = World(make_job().stages(2).workers(2))
    other.settle()
    other.silent = set(other.workers)
    since = other.now
    other.change("digits-w0", node="node-1", phase=WorkerPhase.PENDING, unattended_since=since, node_doubted=True)
    assert other.turn().requeue_after == 5
    other.wait(5)
    other.settle()
    assert set(other.workers) == {"digits-w1", "digits-w2"}, "it is replaced, although the job only starts"


def test_a_silent_member_whose_node_is_not_known_yet_puts_no_node_in_doubt() -> None:
    world = training()
    world.change("digits-w3", node="")
    world.wait(100)
    world.silent, world.lost_peers = {"digits-w3"}, {"digits-w3"}
    decided = world.turn()
    assert decided.delete
    assert decided.doubted == {}, "the API server refuses each pod that avoids a node without a name"


def test_workers_on_a_node_that_rejected_one_have_as_long_as_others() -> None:
    world = World(make_job().stages(2).workers(4))
    nodes = NodeHealth(lambda: world.now)
    world.settle()
    for name in world.workers:
        world.change(name, node="slow", phase=WorkerPhase.PENDING, unattended_since=world.now)
        world.silent.add(name)
    world.wait(6)
    world.change("digits-w0", disrupted=True, rejected=True, phase=WorkerPhase.FAILED, unattended_since=None)
    decided = world.turn()
    nodes.doubt("uid", decided.doubted, decided.unfit)
    assert nodes.unfit("uid") == ["slow"]
    for name in world.workers:
        world.change(name, node_doubted=nodes.doubts("slow"))
    world.settle()
    assert set(world.workers) == {"digits-w1", "digits-w2", "digits-w3"}


def test_a_silent_member_on_a_lost_node_is_replaced_and_one_that_beats_is_not() -> None:
    world = training()
    world.wait(100)
    world.change("digits-w3", node_lost=True)
    world.settle()
    assert world.generation.layout_generation == 1
    world.silent = {"digits-w3"}
    world.settle()
    assert (world.shape, world.generation.reason, world.status.failures) == ((2, 1), ResizeReason.FAILURE, 1)


def test_silence_before_the_operators_start_says_nothing() -> None:
    world = training()
    world.since = world.now
    world.silent = {"digits-w3"}
    world.lost_peers = {"digits-w3"}
    decided = world.turn()
    assert world.generation.layout_generation == 1
    assert decided.requeue_after == 10
    world.wait(10)
    world.settle()
    assert world.generation.layout_generation == 2


def stalling() -> World:
    world = World(make_job().stages(2).workers(4).set("runPolicy.stallTimeoutSeconds", 60))
    world.start()
    return world


def test_a_stalled_job_whose_members_are_all_heard_says_so_and_waits() -> None:
    world = stalling()
    world.wait(61)
    world.settle()
    assert world.state() is State.STALLED
    assert world.generation.layout_generation == 1
    world.commit()
    assert world.state() is State.RUNNING


@pytest.mark.parametrize(
    ("step_seconds", "a_round", "seconds"),
    [(None, 1, 1800), (1, 1, 1800), (300, 1, 6000), (1e9, 1, 7 * 86400), (300, 64, 38400), (300, 4, 6000)],
    ids=str,
)
def test_a_job_whose_spec_has_no_timeout_is_stalled_after_half_an_hour_twenty_median_steps_or_two_rounds(
    step_seconds: float | None, a_round: int, seconds: int
) -> None:
    job = make_job().stages(2).workers(4).set("training.globalBatchSize", 128)
    if a_round > 1:
        job = job.set("pipeline.schedule", "PipeOptim").set("pipeline.stepsPerRound", a_round)
    world = World(job)
    world.start()
    assert world.report is not None
    speed = None if step_seconds is None else 128 / step_seconds
    world.wait(60)
    world.report = world.report.model_copy(update={"step": world.report.step + 1, "samples_per_second": speed})
    world.settle()
    world.wait(seconds - 1)
    world.settle()
    assert world.state() is State.RUNNING
    world.wait(1)
    world.settle()
    assert world.state() is State.STALLED
    words = f"spec.runPolicy.stallTimeoutSeconds ({seconds} s, the default); every worker still sends heartbeats"
    assert world.condition(ConditionType.STALLED).message.endswith(words)


def test_a_silent_member_of_a_job_that_stands_still_is_replaced_although_its_spec_has_no_timeout() -> None:
    world = training()
    world.silent = {"digits-w2"}
    world.wait(1800)
    world.settle()
    assert "digits-w2" not in {member.name for member in world.generation.members}


@pytest.mark.parametrize("begun", [False, True])
def test_a_job_of_which_nobody_is_heard_is_unheard_whether_it_has_begun_or_not(begun: bool) -> None:
    world = World(make_job().stages(2).workers(4))
    world.settle()
    world.warm_up()
    if begun:
        world.commit()
    world.silent = set(world.workers)
    world.wait(50)
    world.settle()
    assert world.state() is State.UNHEARD
    world.silent.clear()
    world.settle()
    assert world.state() is (State.RUNNING if begun else State.STARTING)


def test_a_job_that_never_makes_its_first_step_is_stalled_from_the_publication_of_its_generation_on() -> None:
    world = World(make_job().stages(2).workers(4).set("runPolicy.stallTimeoutSeconds", 60))
    world.settle()
    world.wait(600)
    world.warm_up()
    world.wait(59)
    world.settle()
    assert world.status.condition(ConditionType.STALLED) is None or world.state() is State.STARTING
    world.wait(1)
    world.settle()
    assert world.state() is State.STALLED
    words = "no step yet for spec.runPolicy.stallTimeoutSeconds (60 s); every worker still sends heartbeats"
    assert world.condition(ConditionType.STALLED).message == words
    world.commit()
    assert world.state() is State.RUNNING


def test_a_suspect_that_is_replaced_before_the_timeout_is_not_blamed_on_it() -> None:
    world = World(make_job().stages(1).workers(2, least=1).set("runPolicy.stallTimeoutSeconds", 600))
    world.start()
    world.wait(100)
    world.lost_peers = world.silent = {"digits-w1"}
    world.turn()
    message = world.condition(ConditionType.STALLED).message
    assert message == "no step after step 1; digits-w1 is replaced: not heard for 10 s"


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
    assert world.generation.layout_generation == 1
    world.wait(1)
    decided = world.turn()
    assert "digits-w2" in next(event.message for event in decided.events if event.reason == "WorkerLost")
    assert "digits-w2" in world.condition(ConditionType.STALLED).message
    assert (world.shape, world.status.failures) == ((2, 1), 1)
    world.commit()
    assert world.state() is not State.STALLED


def test_a_job_that_nobody_is_heard_of_is_left_alone_until_the_cluster_takes_its_pods() -> None:
    world = stalling()
    world.silent = set(world.workers)
    world.wait(600)
    world.settle()
    assert (world.state(), world.generation.layout_generation) == (State.STALLED, 1)
    assert "the operator hears from no worker" in world.condition(ConditionType.STALLED).message
    for name in world.workers:
        world.change(name, disrupted=True)
    world.settle()
    assert world.status.generation is None and world.status.failures == 0
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
    assert (world.state(), world.generation.layout_generation) == (State.UNHEARD, 1)
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
    assert world.status.generation is None and world.status.failures == 1
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
    assert world.generation.layout_generation == 1
    world.wait(1)
    world.settle()
    assert (world.shape, world.generation.reason) == ((2, 1), ResizeReason.FAILURE)
    assert "digits-w2" not in world.workers
