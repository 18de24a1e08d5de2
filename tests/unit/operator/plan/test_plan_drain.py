"""Workers that others want to take away: how many may go, and who takes their place."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from pipetransformer_contract.api.status import ConditionType, Reason, State
from pipetransformer_contract.messages import Offer, Outcome, ResizeReason
from pipetransformer_operator.plan import DisruptionBudget, WorkerPhase
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.world import World

pytestmark = pytest.mark.timeout(60)


def stay(world: World) -> int | None:
    budget = world.turn().disruption_budget
    return None if budget is None else budget.min_available


def budget(world: World) -> DisruptionBudget:
    budget = world.turn().disruption_budget
    assert budget is not None
    return budget


@pytest.mark.parametrize(("stages", "workers"), [(4, 4), (2, 4), (1, 4), (1, 1)])
def test_no_worker_may_go_before_it_is_replaced_however_many_copies_of_its_stage_there_are(
    stages: int, workers: int
) -> None:
    world = World(make_job().stages(stages).workers(workers))
    world.start()
    assert stay(world) == workers


def test_claimed_workers_may_go_at_any_time() -> None:
    """They give way to others. A budget that counted them would also protect them from preemption."""
    world = World(make_job().stages(2).workers(2, most=4))
    world.start()
    world.warm_up()
    world.commit()
    assert (world.shape, world.status.claimed_ids) == ((2, 2), [2, 3])
    assert budget(world) == DisruptionBudget(2, claimed=False, unready=True)


def test_claimed_workers_stay_while_they_may_hold_the_only_copies_of_a_stage() -> None:
    world = World(make_job().stages(2).workers(2, most=4))
    world.start()
    world.warm_up()
    world.commit()
    world.end("digits-w0", exit_code=1)
    assert budget(world) == DisruptionBudget(3, claimed=True, unready=True)
    world.settle()
    world.commit()
    assert (world.shape, members(world)) == ((2, 1), ["digits-w1", "digits-w2"])
    assert budget(world) == DisruptionBudget(4, claimed=True, unready=True), "digits-w2 has the only copy of a stage"
    world.part()
    world.warm_up()
    assert not world.generation.confirmed and budget(world).claimed
    world.commit()
    assert (world.shape, world.status.claimed_ids) == ((2, 2), [2, 3])
    assert budget(world) == DisruptionBudget(4, claimed=True, unready=True), "digits-w4 may have the stage of digits-w1"
    replace_claim(world, "digits-w2")
    assert (world.status.claimed_ids, budget(world).claimed) == ([3, 5], True)
    replace_claim(world, "digits-w3")
    assert (world.shape, world.status.claimed_ids) == ((2, 2), [5, 6])
    assert budget(world) == DisruptionBudget(2, claimed=False, unready=True), "new claims copied all stages from them"


def replace_claim(world: World, name: str) -> None:
    world.end(name, exit_code=1)
    world.settle()
    world.commit()
    world.part()
    world.warm_up()
    world.commit()


def test_before_anything_is_trained_workers_may_go() -> None:
    world = World(make_job().stages(4).workers(4))
    world.settle()
    assert stay(world) is None


def test_nobody_may_go_while_state_moves() -> None:
    world = World(make_job().stages(2).workers(4))
    world.settle()
    world.warm_up()
    assert stay(world) == 4
    world.commit()
    assert stay(world) == 4


@pytest.mark.parametrize(("least", "lost"), [(4, ["digits-w3"]), (2, ["digits-w1", "digits-w2", "digits-w3"])])
def test_nobody_may_go_while_survivors_too_few_for_any_layout_wait_for_others(least: int, lost: list[str]) -> None:
    """Two pipelines are published, and a stage may have one copy; that others start beside it makes no more of them."""
    world = World(make_job().stages(2).workers(4, least=least))
    world.offered = [Offer(stages=2, bytes_per_worker=1)]
    world.start()
    assert stay(world) == 4
    for name in lost:
        world.end(name, exit_code=1)
    world.settle()
    assert world.condition(ConditionType.RUNNING).reason == "Recovering"
    assert stay(world) == len(world.workers) == 4
    world.warm_up()
    world.commit()
    assert (world.shape, stay(world)) == ((2, 2), 4)


def test_a_job_that_trains_says_that_the_cluster_refuses_what_protects_it() -> None:
    """Its budget is written only once it trains, so no start says it."""
    world = World(make_job().stages(2).workers(2))
    world.start()
    world.unprotected = "poddisruptionbudgets is forbidden: exceeded quota: team"
    world.settle()
    running = world.condition(ConditionType.RUNNING)
    assert (running.status, running.reason, world.state()) == ("True", "CreationRefused", State.RUNNING)
    assert running.message == f"generation 1: 1 pipeline of 2 stages; {world.unprotected}"
    world.commit(steps=5)
    assert [event.reason for event in world.told].count(Reason.CREATION_REFUSED) == 1
    world.unprotected = ""
    world.settle()
    assert world.condition(ConditionType.RUNNING).reason == "Training"


def test_workers_that_a_job_leaves_running_at_its_end_may_all_go() -> None:
    world = World(make_job().stages(4).workers(4).set("runPolicy.cleanPodPolicy", "None"))
    world.start()
    assert stay(world) == 4
    world.finish(Outcome.SUCCEEDED)
    assert stay(world) == 0
    for name in world.workers:
        world.end(name, exit_code=0)
    world.wait(30)
    world.settle()
    assert stay(world) is None, "nothing is written for a job of which nothing runs"


def test_a_job_whose_workers_all_ended_unseen_asks_for_none_of_them_any_longer() -> None:
    """Otherwise the cluster counts too few healthy pods until the job is deleted, and alerts say so."""
    world = World(make_job().stages(2).workers(4))
    world.start()
    assert stay(world) == 4
    for name in world.workers:
        world.end(name, exit_code=0, message='{"outcome": "Succeeded"}')
    assert stay(world) == 0 and world.status.finished
    world.wait(29)
    assert stay(world) == 0, "the first write may have failed"
    world.wait(1)
    assert stay(world) is None


def test_workers_that_wait_for_a_start_have_nothing_and_are_let_go() -> None:
    world = World(make_job().stages(2).workers(2).checkpoint())
    world.start()
    world.commit(checkpoint=1)
    world.builder.suspended()
    world.settle()
    world.builder.suspended(False)
    world.settle()
    assert world.workers and (budget(world).min_available, budget(world).unready) == (0, False)
    world.warm_up()
    assert budget(world).unready


def test_a_worker_whose_pod_is_not_ready_is_kept_as_others_are_until_its_node_has_waited_long_enough() -> None:
    """It may train, and a helper beside it has ended: the cluster counts it as none that is well."""
    world = World(make_job().stages(2).workers(2))
    world.start()
    assert budget(world).unready
    world.unschedulable = True
    cordon(world, "digits-w1")
    assert budget(world).unready
    world.wait(world.spec.run_policy.drain_timeout_seconds + 1)
    assert not budget(world).unready, "the budget alone would keep it for ever, with a helper that has ended in each"
    world.finish(Outcome.SUCCEEDED)
    assert not budget(world).unready


@pytest.mark.parametrize("workers", [4, 1])
def test_where_drains_are_not_seen_one_worker_may_always_go(workers: int) -> None:
    world = World(make_job().stages(workers).workers(workers))
    world.sees_drains = False
    world.start()
    assert stay(world) == workers - 1
    assert not budget(world).unready


def cordon(world: World, *names: str) -> None:
    for name in names:
        world.workers[name] = replace(world.workers[name], draining=True)
    world.settle()


def members(world: World) -> list[str]:
    return sorted(member.name for member in world.generation.members)


def test_a_worker_on_a_cordoned_node_is_replaced_before_it_may_go() -> None:
    world = World(make_job().stages(4).workers(4))
    world.start()
    cordon(world, "digits-w1")
    said = [event.message for event in world.told if event.reason is Reason.WORKERS_DRAINING]
    assert said == ["Workers on nodes that are drained or unhealthy (1): digits-w1 (cordoned)"]
    assert stay(world) == 5, "nobody may be evicted while a new worker warms up"
    assert world.status.resize is not None and world.status.resize.reason is ResizeReason.DRAIN
    world.warm_up()
    assert (world.shape, world.generation.reason) == ((4, 1), ResizeReason.DRAIN)
    assert members(world) == ["digits-w0", "digits-w2", "digits-w3", "digits-w4"]
    assert [member.name for member in world.generation.leavers] == ["digits-w1"]
    assert "digits-w1" not in world.deleted
    world.commit()
    world.leave()
    assert "digits-w1" in world.deleted
    status = world.status
    assert (status.failures, status.resize, status.drain_deadline, status.gpus.released) == (0, None, None, 0)


def test_leavers_of_a_cordoned_node_go_at_once_and_others_once_the_checkpoint_is_durable() -> None:
    world = World(make_job().stages(4).workers(4).release().checkpoint())
    world.start()
    world.commit(boundary=8)
    world.part()
    world.commit()
    cordon(world, "digits-w3")
    assert (sorted(world.workers), world.status.leaving_ids) == (["digits-w0", "digits-w1", "digits-w2"], [2])
    assert world.status.gpus.released == 1
    world.commit(checkpoint=8)
    assert sorted(world.workers) == ["digits-w0", "digits-w1"]
    assert world.status.gpus.released == 2


def test_a_spare_of_a_cordoned_node_goes_and_is_not_replaced() -> None:
    world = World(make_job().stages(4).workers(4).on_pack("Hold"))
    world.start()
    world.commit(boundary=8)
    world.part()
    world.commit()
    cordon(world, "digits-w3")
    assert sorted(world.workers) == ["digits-w0", "digits-w1", "digits-w2"]
    assert (world.status.drain_deadline, world.status.failures) == (None, 0)


def test_a_whole_job_moves_when_all_its_nodes_are_cordoned() -> None:
    world = World(make_job().stages(2).workers(2))
    world.start()
    cordon(world, "digits-w0", "digits-w1")
    world.warm_up()
    assert members(world) == ["digits-w2", "digits-w3"]
    assert {member.name for member in world.generation.leavers} == {"digits-w0", "digits-w1"}


def test_a_node_that_takes_pods_again_ends_the_move() -> None:
    world = World(make_job().stages(4).workers(4))
    world.start()
    cordon(world, "digits-w1")
    assert len(world.workers) == 5
    world.workers["digits-w1"] = replace(world.workers["digits-w1"], draining=False)
    world.settle()
    assert sorted(world.workers) == ["digits-w0", "digits-w1", "digits-w2", "digits-w3"]
    assert world.status.drain_deadline is None
    assert world.generation.layout_generation == 1


def test_a_new_worker_on_a_cordoned_node_is_no_replacement() -> None:
    world = World(make_job().stages(4).workers(4))
    world.start()
    cordon(world, "digits-w1")
    cordon(world, "digits-w4")
    world.warm_up()
    assert members(world) == ["digits-w0", "digits-w2", "digits-w3", "digits-w5"]


def test_past_the_drain_timeout_the_job_lets_a_worker_go_and_still_takes_a_replacement() -> None:
    world = World(make_job().stages(4).workers(4).set("runPolicy.drainTimeoutSeconds", 60))
    world.start()
    cordon(world, "digits-w1")
    assert world.turn().requeue_after == 60
    assert stay(world) == 5
    world.wait(60)
    assert stay(world) == 4
    world.warm_up()
    assert members(world) == ["digits-w0", "digits-w2", "digits-w3", "digits-w4"]


def test_a_node_that_is_cordoned_after_the_drain_timeout_of_another_has_all_its_time_and_ends_the_wait() -> None:
    """Nodes of a pool are upgraded one after the other, and the first stays cordoned."""
    world = World(make_job().stages(2).workers(2, least=2))
    world.start()
    world.unschedulable = True
    cordon(world, "digits-w0")
    world.wait(600)
    world.settle()
    assert stay(world) == 1 and world.status.next_resize_time is not None
    cordon(world, "digits-w1")
    assert world.status.next_resize_time is None
    assert len(world.workers) == 4, "replacements are tried at once"
    assert stay(world) == 4
    world.wait(599)
    assert stay(world) == 4
    world.wait(1)
    world.settle()
    assert stay(world) == 1


def test_nodes_that_are_cordoned_one_after_the_other_do_not_keep_the_first_for_longer_than_twice_its_time() -> None:
    world = World(make_job().stages(4).workers(4))
    world.start()
    world.unschedulable = True
    for name in ("digits-w0", "digits-w1"):
        cordon(world, name)
        world.wait(540)
        assert stay(world) == len(world.status.worker_ids)
    cordon(world, "digits-w2")
    world.wait(119)
    assert stay(world) == len(world.status.worker_ids) == 7, "replacements are tried at once"
    world.wait(1)
    assert stay(world) == 3
    cordon(world, "digits-w3")
    assert stay(world) == 3
    for name in ("digits-w0", "digits-w1", "digits-w2", "digits-w3"):
        world.workers[name] = replace(world.workers[name], draining=False)
    world.settle()
    cordon(world, "digits-w0")
    world.wait(599)
    assert stay(world) == len(world.status.worker_ids), "another drain"


def test_each_node_of_an_upgrade_that_goes_on_and_on_has_its_time_from_its_cordon_on() -> None:
    """The next is cordoned before the one before it is empty: some worker is on a cordoned node all the time."""
    world = World(make_job().stages(4).workers(4))
    world.start()
    cordon(world, "digits-w0")
    for _ in range(8):
        world.wait(200)
        world.warm_up()
        first = next(name for name in members(world) if not world.workers[name].draining)
        world.workers[first] = replace(world.workers[first], draining=True)
        world.commit()
        world.leave()
        deadline = world.status.drain_deadline
        assert deadline is not None and deadline - world.now == timedelta(seconds=600)
        assert stay(world) == len(world.status.worker_ids) == 5, "nobody may be evicted while a new worker warms up"


def test_once_the_worker_that_was_cordoned_last_is_gone_the_one_before_it_has_the_time_of_its_own_cordon() -> None:
    world = World(make_job().stages(4).workers(4))
    world.start()
    world.unschedulable = True
    cordon(world, "digits-w0")
    world.wait(500)
    cordon(world, "digits-w1")
    world.wait(50)
    world.workers["digits-w1"] = replace(world.workers["digits-w1"], draining=False)
    world.settle()
    world.wait(49)
    assert stay(world) == len(world.status.worker_ids)
    world.wait(1)
    assert stay(world) == 3


def test_replacements_that_tolerate_cordons_do_not_renew_the_time_of_the_drain_nor_are_they_made_for_ever() -> None:
    world = World(make_job().stages(2).workers(2))
    world.start()
    cordon(world, "digits-w1")
    deadline = world.status.drain_deadline
    for number in range(2, 7):
        cordon(world, f"digits-w{number}")
    world.warm_up()
    assert sorted(world.workers) == ["digits-w0", "digits-w1", "digits-w6"], "four others were tried"
    assert (world.status.drain_deadline, world.generation.layout_generation) == (deadline, 1)
    world.wait(600)
    world.settle()
    assert world.condition(ConditionType.RESIZING).message.startswith("cancelled: digits-w6: is on a cordoned node")


def test_a_worker_of_a_claim_on_a_cordoned_node_is_made_elsewhere_and_holds_up_nobody() -> None:
    world = World(make_job().stages(2).workers(2, most=4))
    world.start()
    cordon(world, "digits-w2")
    assert sorted(world.workers) == ["digits-w0", "digits-w1", "digits-w3", "digits-w4"]
    assert world.status.drain_deadline is None
    world.warm_up()
    assert (world.shape, members(world)) == ((2, 2), ["digits-w0", "digits-w1", "digits-w3", "digits-w4"])


def test_who_is_to_join_has_no_part_in_the_time_of_a_drain() -> None:
    world = World(make_job().stages(4).workers(4).on_pack("Hold"))
    world.start()
    world.commit(boundary=8)
    world.commit()
    world.part()
    world.commit()
    world.warm_up()
    (spare, *_) = sorted(set(world.workers) - set(members(world)))
    world.change(spare, draining=True)
    world.turn()
    assert world.status.drain_deadline is None


def test_replacements_that_fail_are_tried_ever_later_and_are_no_failures_of_the_job() -> None:
    world = World(make_job().stages(4).workers(4))
    world.start()
    cordon(world, "digits-w1")
    world.end("digits-w4", exit_code=1)
    world.settle()
    assert world.status.next_resize_time is not None
    assert world.status.failures == 0
    assert len([worker for worker in world.workers.values() if worker.alive]) == 4
    world.wait(61)
    world.settle()
    world.warm_up()
    assert members(world) == ["digits-w0", "digits-w2", "digits-w3", "digits-w5"]


def test_replacements_without_a_node_are_given_back_in_time_and_tried_again() -> None:
    world = World(make_job().stages(4).workers(4))
    world.start()
    world.unschedulable = True
    cordon(world, "digits-w1")
    world.wait(600)
    world.settle()
    assert sorted(world.workers) == ["digits-w0", "digits-w1", "digits-w2", "digits-w3"]
    resizing = world.status.condition(ConditionType.RESIZING)
    assert resizing is not None and (resizing.status, resizing.reason) == ("False", "Unschedulable")
    assert stay(world) == 3, "past the drain's deadline as well, so it lets go"
    world.unschedulable = False
    world.wait(60)
    world.settle()
    world.warm_up()
    assert members(world) == ["digits-w0", "digits-w2", "digits-w3", "digits-w5"]
    assert (world.status.resize_failures, world.status.failures) == (0, 0)


def test_past_the_deadline_those_replacements_are_taken_that_are_warm() -> None:
    world = World(make_job().stages(4).workers(4))
    world.start()
    cordon(world, "digits-w1", "digits-w2")
    world.warm_up(["digits-w4"])
    assert world.generation.layout_generation == 1
    world.wait(600)
    world.settle()
    assert members(world) == ["digits-w0", "digits-w2", "digits-w3", "digits-w4"]
    assert [member.name for member in world.generation.leavers] == ["digits-w1"]


def committing() -> World:
    """A generation that nobody has confirmed."""
    world = World(make_job().stages(4).workers(4))
    world.settle()
    world.warm_up()
    return world


def cleaning() -> World:
    """Two of four workers left after a freeze, and the checkpoint is not durable yet."""
    world = World(make_job().stages(4).workers(4).release())
    world.start()
    world.commit(boundary=9)
    world.commit()
    assert world.status.leaving_ids
    return world


def recovering() -> World:
    """Too few are left for any layout, and the cluster has no room for others."""
    world = World(make_job().stages(4).workers(4))
    world.start()
    world.unschedulable = True
    world.kill("digits-w3")
    world.settle()
    return world


@pytest.mark.parametrize("busy", [committing, cleaning, recovering])
def test_a_drain_has_its_time_whatever_the_job_is_busy_with(busy: Callable[[], World]) -> None:
    world = busy()
    world.builder.set("runPolicy.drainTimeoutSeconds", 60)
    cordon(world, "digits-w0")
    assert stay(world) == len(world.status.worker_ids)
    decided = world.turn()
    assert decided.requeue_after is not None and decided.requeue_after <= 60
    world.wait(60)
    running = [worker for worker in world.workers.values() if worker.phase is WorkerPhase.RUNNING]
    assert stay(world) == len(running) - 1, "none is waited for that finds no node"
    world.workers["digits-w0"] = replace(world.workers["digits-w0"], draining=False)
    world.settle()
    assert world.status.drain_deadline is None


def test_a_worker_on_a_cordoned_node_still_starts_the_job() -> None:
    world = World(make_job().stages(2).workers(2))
    world.settle()
    world.change("digits-w0", draining=True)
    world.settle()
    assert set(world.workers) == {"digits-w0", "digits-w1"}
    world.warm_up()
    assert [member.name for member in world.generation.members] == ["digits-w0", "digits-w1"]
