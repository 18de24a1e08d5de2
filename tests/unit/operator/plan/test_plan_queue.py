"""A job that asks a queue for its workers: it never has more pods than quota, and returns what it does not need."""

import pytest

from pipetransformer_contract.api.labels import QUEUE_LABEL
from pipetransformer_contract.api.status import ConditionStatus, ConditionType, State
from pipetransformer_contract.messages import Offer, Outcome
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.queued import admitted, claimed, claiming, members, queued, releasing, requests

pytestmark = pytest.mark.timeout(60)


def test_no_worker_is_created_before_the_queue_admits_the_job() -> None:
    world, queue = releasing(size=3)
    world.settle()
    assert not world.workers
    assert (world.state(), admitted(world).reason) == (State.PENDING, "WaitingForQuota")
    assert admitted(world).message == "queue team-a was asked for 4 workers: no quota is left"
    assert world.status.start_time is None

    queue.size = 4
    world.settle()
    assert len(world.workers) == 4
    assert (world.state(), admitted(world).reason) == (State.STARTING, "QuotaReserved")
    assert requests(world) == [("digits-q0", 4, [0, 1, 2, 3])]


def test_a_job_asks_for_what_its_ceiling_allows_and_returns_the_rest() -> None:
    world, queue = queued(make_job().stages(2).workers(4, most=1), size=0)
    world.settle()
    assert (requests(world), world.condition(ConditionType.RUNNING).reason) == ([], "NoLegalStart")
    for ceiling, granted in ((3, 2), (4, 4)):
        world.builder.set("elasticPolicy.maxWorkers", ceiling)
        world.settle()
        assert [quota for _, quota, _ in requests(world)] == [granted]
        assert world.condition(ConditionType.RUNNING).reason == "WaitingForQuota"
    queue.size = 8
    world.start()
    assert (world.shape, queue.held) == ((2, 2), 4)
    world.builder.set("elasticPolicy.maxWorkers", 2)
    world.settle()
    world.commit(checkpoint=0)
    world.leave()
    world.bury()
    assert (world.shape, queue.held) == ((2, 1), 2)
    world.builder.set("elasticPolicy.maxWorkers", 4)
    world.settle()
    world.warm_up()
    assert (world.shape, queue.held) == ((2, 2), 4)


def test_a_request_that_waits_follows_the_spec_and_the_label() -> None:
    world, queue = releasing(size=0)
    world.settle()
    world.builder.workers(8)
    world.settle()
    assert requests(world) == [("digits-q1", 8, [])]
    world.builder.label(QUEUE_LABEL, "team-b")
    world.settle()
    assert [(request.name, request.queue) for request in world.status.quota_requests] == [("digits-q2", "team-b")]
    queue.size = 8
    world.settle()
    assert len(world.workers) == 8


def test_without_a_word_of_the_queue_a_job_is_neither_admitted_nor_not() -> None:
    world, queue = releasing()
    queue.problem = "Kueue does not answer"
    world.settle()
    assert (admitted(world).status, admitted(world).reason) == (ConditionStatus.UNKNOWN, "QueueUnavailable")
    assert not world.workers and not world.status.quota_requests


def test_a_job_that_trains_does_not_notice_that_its_queue_is_silent() -> None:
    world, queue = releasing()
    world.start()
    before = world.status
    queue.problem = "Kueue does not answer"
    queue.evicted.add("digits-q0")
    world.settle()
    assert world.status == before
    world.end("digits-w1", exit_code=1)
    world.settle()
    world.commit()
    world.bury()
    world.warm_up()
    assert "digits-w4" in members(world), "its own quota is still good for a replacement"


def test_what_a_release_gives_back_is_returned_once_the_pods_are_gone() -> None:
    world, queue = releasing()
    world.start()
    world.commit(boundary=8)
    world.commit()
    assert queue.held == 4, "leavers wait for a checkpoint"
    world.commit(checkpoint=8)
    assert sum(worker.terminating for worker in world.workers.values()) == 2
    assert queue.held == 4, "pods are not gone yet"
    world.bury()
    assert requests(world) == [("digits-q0", 2, [0, 1])]
    assert world.status.gpus.released == 2
    assert queue.held == 2


def test_widening_needs_no_word_of_the_queue() -> None:
    world, _ = queued(make_job().stages(4).workers(4))
    world.start()
    before = requests(world)
    world.commit(boundary=8)
    world.commit()
    assert world.shape == (2, 2)
    assert requests(world) == before


def test_a_claim_creates_nothing_before_it_is_admitted() -> None:
    world, queue = claiming(size=2)
    world.start()
    assert requests(world) == [("digits-q0", 2, [0, 1]), ("digits-q1", 2, [])]
    assert len(world.workers) == 2
    resizing = world.status.condition(ConditionType.RESIZING)
    assert resizing is not None and "queue team-a was asked for 2 workers: no quota is left" in resizing.message

    queue.size = 4
    world.settle()
    assert requests(world)[1] == ("digits-q1", 2, [2, 3])
    assert world.status.claimed_ids == [2, 3]
    world.warm_up()
    world.commit()
    assert world.shape == (2, 2)


def test_a_claim_that_is_not_admitted_in_time_is_withdrawn_and_tried_later() -> None:
    world, _ = claiming(size=2)
    world.start()
    world.wait(121)
    world.settle()
    assert requests(world) == [("digits-q0", 2, [0, 1])]
    condition = world.status.condition(ConditionType.RESIZING)
    assert condition is not None and condition.reason == "WaitingForQuota"
    world.wait(61)
    world.settle()
    assert requests(world)[1] == ("digits-q2", 2, [])


def test_a_claimed_pipeline_leaves_when_the_queue_reclaims_its_quota() -> None:
    world, queue = claimed()
    queue.evicted.add("digits-q1")
    world.settle()
    assert members(world) == {"digits-w0", "digits-w1"}
    assert {leaver.name for leaver in world.generation.leavers} == {"digits-w2", "digits-w3"}
    assert queue.held == 4, "the drain takes as long as it needs"
    world.commit(checkpoint=0)
    assert queue.held == 4, "pods are not gone yet"
    world.bury()
    assert queue.held == 2
    assert world.state() is State.RUNNING
    assert world.status.failures == 0
    assert admitted(world).status is ConditionStatus.TRUE


def test_a_partly_preempted_claim_gives_way_to_the_starting_size() -> None:
    """The replacement stands behind the claimed ones, and is no claim: it stays, and so the job never stops."""
    world, queue = claimed()
    world.offered = [Offer(stages=2, bytes_per_worker=1)]
    world.commit(checkpoint=0)
    world.change("digits-w0", draining=True)
    world.settle()
    world.warm_up()
    world.commit(checkpoint=0)
    world.part()
    world.bury()
    assert requests(world) == [("digits-q0", 1, [1]), ("digits-q1", 2, [2, 3]), ("digits-q2", 1, [4])]
    world.change("digits-w3", disrupted=True)
    world.settle()
    queue.evicted.add("digits-q1")
    world.settle()
    world.commit(checkpoint=0)
    world.part()
    world.bury()
    assert (world.shape, members(world), world.generation.layout_generation) == ((2, 1), {"digits-w1", "digits-w4"}, 4)
    assert requests(world) == [("digits-q0", 1, [1]), ("digits-q2", 1, [4])]


def test_workers_on_their_way_whose_quota_is_wanted_back_never_join() -> None:
    world, queue = claiming()
    world.start()
    assert requests(world)[1] == ("digits-q1", 2, [2, 3])
    queue.evicted.add("digits-q1")
    world.settle()
    world.bury()
    assert set(world.workers) == members(world) == {"digits-w0", "digits-w1"}
    assert requests(world) == [("digits-q0", 2, [0, 1])]


def test_of_two_claims_the_one_whose_quota_is_wanted_back_leaves() -> None:
    world, queue = queued(make_job().stages(2).workers(2, most=6))
    world.start()
    for _ in range(2):
        world.warm_up()
        world.commit(checkpoint=0)
    assert world.shape == (2, 3)
    queue.evicted.add("digits-q1")
    world.settle()
    assert members(world) == {f"digits-w{key}" for key in (0, 1, 4, 5)}


def test_a_job_whose_own_quota_is_reclaimed_waits_with_its_checkpoint() -> None:
    world, queue = releasing()
    world.start()
    world.commit(boundary=8)
    world.commit(checkpoint=8)
    world.bury()
    generation = world.generation.layout_generation
    queue.size = 0
    queue.evicted.add("digits-q0")
    world.settle()
    assert all(worker.terminating for worker in world.workers.values())
    assert (admitted(world).status, admitted(world).reason) == (ConditionStatus.FALSE, "QuotaLost")
    assert admitted(world).message == "preempted by another job"
    assert queue.held == 2
    world.bury()
    assert queue.held == 0
    assert requests(world) == [("digits-q0", 2, [])], "the same request keeps its place in the queue"
    assert world.state() is State.PENDING
    assert world.status.failures == 0

    queue.size = 2
    world.settle()
    world.warm_up()
    assert world.shape == (2, 1)
    assert world.generation.layout_generation > generation


def test_the_time_that_a_job_waits_in_its_queue_is_none_of_its_deadlines() -> None:
    world, queue = queued(make_job().stages(2).workers(2).set("runPolicy.activeDeadlineSeconds", 100))
    world.start()
    world.wait(60)
    queue.size = 0
    queue.evicted.add("digits-q0")
    world.settle()
    world.bury()
    assert not world.workers
    world.wait(3600)
    world.settle()
    assert (world.state(), admitted(world).reason) == (State.PENDING, "WaitingForQuota")
    queue.size = 2
    world.start()
    world.wait(99)
    world.settle()
    assert world.state() is State.RUNNING
    world.wait(1)
    world.settle()
    assert world.state() is State.FAILED


def test_claims_go_when_the_job_itself_has_to_wait() -> None:
    world, queue = claimed()
    queue.size = 0
    queue.evicted.add("digits-q0")
    world.settle()
    world.bury()
    assert requests(world) == [("digits-q0", 2, [])]


def test_a_request_that_somebody_deletes_is_made_anew_once_the_workers_are_gone() -> None:
    world, queue = releasing()
    world.start()
    queue.withdrawn.add("digits-q0")
    world.settle()
    assert queue.held == 4
    world.bury()
    assert requests(world) == [("digits-q1", 4, [4, 5, 6, 7])]


def test_a_replacement_waits_for_the_end_of_the_one_it_replaces() -> None:
    world, _ = releasing()
    world.start()
    world.end("digits-w3", exit_code=1)
    world.settle()
    assert len(world.workers) == 4
    world.commit()
    assert requests(world) == [("digits-q0", 4, [0, 1, 2, 3])], "no more quota is asked for"
    world.bury()
    assert requests(world) == [("digits-q0", 4, [0, 1, 2, 4])]


def test_a_claim_that_lost_a_worker_has_its_quota_for_another_at_once() -> None:
    world, _ = claimed()
    world.end("digits-w3", exit_code=1)
    world.settle()
    world.part()
    world.commit(checkpoint=0)
    world.bury()
    assert requests(world)[1][:2] == ("digits-q1", 2)
    world.warm_up()
    world.commit(checkpoint=0)
    assert world.shape == (2, 2)


def test_a_start_that_finds_no_nodes_returns_its_quota_while_it_sleeps() -> None:
    world, queue = releasing()
    world.unschedulable = True
    world.settle()
    assert queue.held == 4
    world.wait(601)
    world.settle()
    world.bury()
    assert queue.held == 0
    world.unschedulable = False
    world.wait(61)
    world.settle()
    assert queue.held == 4


def test_a_suspended_job_gives_all_quota_back_once_its_pods_are_gone() -> None:
    world, queue = releasing()
    world.start()
    world.builder.suspended()
    world.settle()
    assert queue.held == 4
    world.bury()
    assert queue.held == 0
    assert (admitted(world).status, admitted(world).reason) == (ConditionStatus.FALSE, "SuspendedByUser")
    world.builder.suspended(False)
    world.settle()
    assert queue.held == 4


def test_a_resumed_job_in_its_queue_no_longer_says_that_a_user_suspended_it() -> None:
    world, queue = queued(make_job().stages(2).workers(2))
    world.start()
    world.builder.suspended()
    world.settle()
    world.bury()
    queue.size = 0
    world.builder.suspended(False)
    world.settle()
    running = world.condition(ConditionType.RUNNING)
    assert (running.reason, running.message) == ("WaitingForQuota", admitted(world).message)


def test_a_start_beside_a_stuck_pod_asks_for_more_quota_and_holds_nothing() -> None:
    world, queue = queued(make_job().stages(2).workers(4), size=4)
    world.start()
    world.change("digits-w3", node="dead", node_lost=True)
    world.builder.suspended()
    world.settle()
    for name in ("digits-w0", "digits-w1", "digits-w2"):
        world.kill(name)
    world.settle()
    world.builder.suspended(False)
    world.settle()
    assert (set(world.workers), queue.held) == ({"digits-w3"}, 4)
    assert world.condition(ConditionType.RUNNING).message.endswith("team-a was asked for 1 worker: no quota is left")
    queue.size = 5
    world.settle()
    world.warm_up([name for name in world.workers if name != "digits-w3"])
    assert world.shape == (2, 2)
    world.commit(checkpoint=0)
    world.kill("digits-w3")
    world.settle()
    assert requests(world) == [("digits-q0", 3, [4, 5, 6]), ("digits-q1", 1, [7])]
    assert queue.held == 4
    assert (world.status.own_requests, world.status.claimed_ids) == (world.status.quota_requests, [])


def test_a_start_gives_back_the_quota_of_claims() -> None:
    world, queue = claimed()
    for member in world.generation.members:
        world.end(member.name, exit_code=137)
    world.settle()
    for name in [name for name, worker in world.workers.items() if not worker.alive]:
        world.kill(name)
    world.settle()
    assert (requests(world), queue.held) == ([("digits-q0", 2, [4, 5])], 2)


def test_a_start_that_lacks_quota_is_put_off_like_one_without_nodes() -> None:
    world, _ = queued(make_job().stages(2).workers(4), size=4)
    world.settle()
    world.end("digits-w3", exit_code=1)
    world.settle()
    world.wait(10)
    world.settle()
    world.warm_up(["digits-w0", "digits-w1", "digits-w2"])
    running = world.condition(ConditionType.RUNNING)
    assert running.message.endswith("quota becomes free once the pods of earlier workers are gone")
    world.wait(600)
    world.settle()
    assert all(worker.terminating for worker in world.workers.values())


def test_a_job_that_ends_gives_its_quota_back_once_its_workers_have_ended() -> None:
    world, queue = releasing()
    world.start()
    world.finish(Outcome.SUCCEEDED)
    assert queue.held == 4
    for name in world.workers:
        world.end(name, exit_code=0)
    world.settle()
    assert queue.held == 0
    assert world.state() is State.COMPLETE


def test_a_job_that_holds_its_workers_asks_for_no_quota_that_it_lost() -> None:
    world, queue = queued(make_job().stages(2).workers(4).on_pack("Hold"))
    world.start()
    world.commit(checkpoint=0)
    world.change("digits-w1", draining=True)
    world.settle()
    world.warm_up()
    world.commit(checkpoint=0)
    world.bury()
    queue.size = 3
    queue.evicted.add("digits-q1")
    world.settle()
    world.commit(checkpoint=0)
    world.settle()
    assert world.shape == (2, 1)


def test_a_job_that_holds_its_workers_holds_no_more_than_its_quota() -> None:
    world, queue = queued(make_job().stages(4).workers(4).on_pack("Hold"))
    world.start()
    world.commit(boundary=8, checkpoint=8)
    queue.evicted.add("digits-q0")
    world.settle()
    world.bury()
    assert requests(world)[0][1] == 2
    world.warm_up()
    world.commit(checkpoint=8)
    assert len(world.workers) == queue.held == 2


def test_a_request_that_is_deleted_before_its_admission_is_made_again() -> None:
    world, queue = releasing(size=3)
    world.settle()
    queue.withdrawn.add("digits-q0")
    world.settle()
    assert requests(world) == [("digits-q1", 4, [])]
