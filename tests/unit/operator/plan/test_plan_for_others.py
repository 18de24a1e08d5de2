"""Claimed pipelines for pods of others that wait: whose goes, one at a time, and never one of the starting size."""

from dataclasses import replace
from typing import Any

import pytest

from pipetransformer_contract.api.status import Share
from pipetransformer_contract.messages import ResizeReason
from pipetransformer_operator.controller.for_others import ReleaseForOthers
from pipetransformer_operator.kube.capacity.free_accelerators import FreeAccelerators
from pipetransformer_operator.kube.watches.other_pods import PATIENCE_SECONDS, OtherPods, pending_pod_of
from pipetransformer_operator.plan import Claims, PendingPod, choose_claim, claims_of
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.world import World

pytestmark = pytest.mark.timeout(60)
GPU = "nvidia.com/gpu"
BIG = "big.com/gpu"
LACKS_MANY = {GPU: 2, BIG: 2**35}
POD = PendingPod("pod", 100, {GPU: 2})
CLAIMS = Claims("default/a", 3, GPU, -10, 4, 3, True)


class Others:
    """Pods of other owners, as the test has them."""

    def __init__(self, pods: list[PendingPod]) -> None:
        self._pods = pods

    def waiting(self) -> list[PendingPod]:
        return self._pods


def grown(on_pack: str = "Widen", most: int = 4) -> World:
    """A job of two pipelines of one worker that has claimed as many more as it may."""
    limits = {"name": "trainer", "image": "trainer", "resources": {"limits": {GPU: "1"}}}
    job = make_job().stages(1).workers(2, most=most).checkpoint().on_pack(on_pack).set("acceleratorResource", GPU)
    world = World(job.set("podTemplate.spec.containers", [limits]))
    world.start()
    for _ in range(2, most):
        world.warm_up()
        world.commit(checkpoint=0)
    return world


def claims(world: World) -> Claims | None:
    return claims_of(world.spec, world.observed(), world.now)


@pytest.mark.parametrize(
    ("waiting", "claim", "given", "releases"),
    [
        (POD, CLAIMS, 0, True),
        (POD, CLAIMS, 1, True),
        (POD, CLAIMS, 2, False),
        (replace(POD, priority=-10), CLAIMS, 0, False),
        (replace(POD, requests={"amd.com/gpu": 1}), CLAIMS, 0, False),
        (POD, replace(CLAIMS, next_smaller=None), 0, False),
        (POD, replace(CLAIMS, settled=False), 0, False),
    ],
    ids=["nothing given", "half given", "all given", "no higher priority", "other devices", "no claim", "under way"],
)
def test_a_claim_is_for_pods_of_higher_priority_that_lack_what_it_frees(
    waiting: PendingPod, claim: Claims, given: int, releases: bool
) -> None:
    assert (choose_claim([waiting], [claim], {"pod": given}) is not None) == releases


def test_the_pod_of_the_highest_priority_is_served_by_the_largest_of_the_least_important_claims() -> None:
    urgent = PendingPod("urgent", 200, {GPU: 1})
    jobs = [
        CLAIMS,
        replace(CLAIMS, key="default/b", workers=6, next_smaller=5),
        replace(CLAIMS, key="default/c", priority=0),
    ]
    found = choose_claim([POD, urgent], jobs, {})
    assert found is not None
    assert (found.pod.uid, found.claim.key) == ("urgent", "default/b")


def test_claims_leave_the_node_where_the_fewest_have_to_go_until_the_pod_fits() -> None:
    pod = replace(POD, missing_by_node={"a": 3, "b": 2})
    jobs = [
        replace(CLAIMS, claimed_by_node={"a": 3, "b": 1}, smallest=1),
        replace(CLAIMS, key="default/b", claimed_by_node={"b": 1}, smallest=3),
    ]
    found = choose_claim([pod], jobs, {})
    assert found is not None and (found.claim.key, found.node) == ("default/a", "b")
    found = choose_claim([pod], jobs[:1], {})
    assert found is not None and (found.claim.key, found.node) == ("default/a", "a")


@pytest.mark.parametrize("places", [{"a": 4}, {}, {"a": 1, "b": 0}], ids=["too few", "no node", "room already"])
def test_no_claim_is_given_up_where_the_pod_would_not_fit_by_it(places: dict[str, int]) -> None:
    pod, job = replace(POD, missing_by_node=places), replace(CLAIMS, workers=6, claimed_by_node={"a": 3}, smallest=2)
    assert choose_claim([pod], [job], {}) is None
    assert choose_claim([pod], [replace(job, claimed_by_node={"a": 4}, smallest=3)], {}) is None, (
        "of its starting size nothing goes"
    )


def test_what_a_job_can_give_up_by_node_is_what_it_claimed_there() -> None:
    world = grown(most=6)
    for number in range(6):
        world.change(f"digits-w{number}", node="ab"[number % 2])
    present = claims(world)
    assert present is not None
    assert (present.smallest, dict(present.claimed_by_node), present.frees("a"), present.frees("c")) == (
        2,
        {"a": 2, "b": 2},
        2,
        0,
    )


def test_those_leave_whose_node_the_pod_waits_for() -> None:
    world = grown(most=6)
    for number, node in enumerate("xxabab"):
        world.change(f"digits-w{number}", node=node)
    generation = world.status.layout_generation
    world.share = Share(workers=4, layout_generation=generation, for_others=True, node="a")
    world.settle()
    assert {member.name for member in world.generation.leavers} == {"digits-w2", "digits-w4"}


@pytest.mark.parametrize("on_pack", ["Widen", "Auto"])
def test_a_job_releases_what_it_claimed_pipeline_by_pipeline_and_keeps_its_starting_size(on_pack: str) -> None:
    world = grown(on_pack)
    pods = [PendingPod("pod", 100, {GPU: 8})]
    asking = ReleaseForOthers(Others(pods))
    sizes = [len(world.generation.members)]
    for _ in range(8):
        present = claims(world)
        assert present is not None
        world.share = asking.look([present]).get("default/digits")
        world.settle()
        world.commit(checkpoint=0)
        world.leave()
        sizes.append(len(world.generation.members))
    assert sorted(set(sizes), reverse=True) == [4, 3, 2]
    assert {member.name for member in world.generation.members} == {"digits-w0", "digits-w1"}
    assert set(world.workers) == {"digits-w0", "digits-w1"}, "it sleeps over its next claim"
    assert world.status.failures == 0
    pods.clear()
    world.share = asking.look([]).get("default/digits")
    world.wait(3601)
    world.settle()
    assert len(world.workers) > 2, "it claims again"


def test_a_job_is_asked_for_no_more_than_the_pod_wants_and_one_job_at_a_time() -> None:
    other = replace(CLAIMS, key="default/b")
    asking = ReleaseForOthers(Others([POD]))
    asked = {"default/a": Share(workers=3, layout_generation=3, for_others=True)}
    assert asking.look([CLAIMS, other]) == asked
    published = replace(CLAIMS, layout_generation=4, workers=3, next_smaller=2, settled=False)
    assert asking.look([published, other]) == asked, "its leavers are not gone"
    second = {"default/b": Share(workers=3, layout_generation=3, for_others=True)}
    assert asking.look([replace(published, settled=True), other]) == second
    assert asking.look([CLAIMS]) == {}, "the second job is gone, and the pod has what it wants"


@pytest.mark.parametrize("why", [{"next_smaller": None}, {"settled": False}], ids=["no layout", "lost workers"])
def test_a_job_that_cannot_give_what_it_was_asked_for_holds_up_nobody(why: dict[str, Any]) -> None:
    asking = ReleaseForOthers(Others([POD]))
    assert set(asking.look([CLAIMS])) == {"default/a"}
    other = replace(CLAIMS, key="default/b")
    assert set(asking.look([replace(CLAIMS, **why), other])) == {"default/b"}


def test_a_job_that_went_back_to_its_layout_has_given_nothing_and_holds_up_nobody() -> None:
    asking = ReleaseForOthers(Others([POD]))
    assert set(asking.look([CLAIMS])) == {"default/a"}
    other = replace(CLAIMS, key="default/b")
    undone = replace(CLAIMS, layout_generation=5, next_smaller=None)
    asked = {"default/b": Share(workers=3, layout_generation=3, for_others=True)}
    assert asking.look([undone, other]) == asked
    gave = replace(other, layout_generation=4, workers=3, next_smaller=2)
    assert asking.look([undone, gave]) == {"default/b": Share(workers=2, layout_generation=4, for_others=True)}
    assert asking.look([undone, replace(gave, layout_generation=5, workers=2, next_smaller=None)]) == {}


def test_a_job_sleeps_over_a_release_that_it_could_not_commit_and_may_be_asked_again_then() -> None:
    world = grown()
    present = claims(world)
    assert present is not None and present.next_smaller == 3
    world.share = Share(workers=3, layout_generation=present.layout_generation, for_others=True)
    world.settle()
    assert len(world.generation.members) == 3
    world.break_group(list(world.workers))
    world.wait(2)
    world.settle()
    assert (len(world.generation.members), world.generation.reason) == (4, ResizeReason.UNDO)
    world.commit()
    undone = claims(world)
    assert undone is not None and undone.settled and undone.next_smaller is None
    assert world.status.next_resize_time is not None
    world.wait((world.status.next_resize_time - world.now).total_seconds())
    again = claims(world)
    assert again is not None and again.settled and again.next_smaller == 3


def test_workers_on_a_lost_node_free_nothing_and_are_not_waited_for() -> None:
    world = grown()
    world.change("digits-w3", terminating=True)
    leaving = claims(world)
    assert leaving is not None and not leaving.settled
    world.change("digits-w3", node_lost=True)
    lost = claims(world)
    assert lost is not None and lost.settled


def test_a_job_that_starts_ended_or_runs_on_no_accelerator_has_nothing_to_release() -> None:
    world = grown()
    assert claims(world) is not None
    world.builder.suspended()
    assert claims(world) is None
    assert claims(World(make_job())) is None
    cpu = World(make_job().stages(1).workers(1, most=2))
    cpu.start()
    assert claims(cpu) is None


def pod(message: str, *, reason: str = "Unschedulable", uid: str = "pod", **wants: str) -> dict[str, Any]:
    requests = {f"{name}.com/gpu": amount for name, amount in wants.items()} | {"cpu": "500m"}
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    container = {"name": "main", "resources": {"requests": requests}}
    spec = {"containers": [container, container], "priority": 7}
    return {"metadata": {"uid": uid}, "spec": spec, "status": {"conditions": [condition]}}


def nominated(shown: dict[str, Any]) -> dict[str, Any]:
    return shown | {"status": shown["status"] | {"nominatedNodeName": "node-1"}}


@pytest.mark.parametrize(
    ("shown", "lacks"),
    [
        (pod("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", nvidia="2"), {GPU: 4}),
        (pod("0/2 nodes: 1 Insufficient cpu, 1 Insufficient nvidia.com/gpu, 1 x.", nvidia="1", amd="1"), {GPU: 2}),
        (pod("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", nvidia="3k"), {GPU: 6000}),
        (pod("2 Insufficient big.com/gpu, 2 Insufficient nvidia.com/gpu.", nvidia="1", big="16Gi"), LACKS_MANY),
        (pod("2 Insufficient big.com/gpu, 2 Insufficient nvidia.com/gpu.", nvidia="1", big="~"), {GPU: 2}),
        (pod("0/2 nodes are available: 2 Insufficient nvidia.com/gpu-shared.", nvidia="1"), None),
        (pod("0/2 nodes are available: 2 node(s) didn't match", nvidia="1"), None),
        (pod("2 Insufficient nvidia.com/gpu.", reason="SchedulingGated", nvidia="1"), None),
        (nominated(pod("2 Insufficient nvidia.com/gpu.", nvidia="1")), None),
        ({"metadata": {"uid": "pod"}, "spec": {"containers": []}, "status": {}}, None),
    ],
    ids=[
        "gpus",
        "the one that lacks",
        "thousands",
        "a large amount",
        "an odd amount",
        "another resource",
        "the wrong nodes",
        "gated",
        "preempts",
        "new",
    ],
)
def test_the_scheduler_says_what_a_pod_waits_for(shown: dict[str, Any], lacks: dict[str, int] | None) -> None:
    found = pending_pod_of(shown)
    assert (found.requests if found else None) == lacks
    assert found is None or found.priority == 7


def test_a_pod_waits_once_it_has_found_no_node_for_a_while() -> None:
    now = 0.0
    api: Any = None
    pods = OtherPods(api, FreeAccelerators(), clock=lambda: now)
    shown = pod("2 Insufficient nvidia.com/gpu.", nvidia="1")
    pods.note(shown)
    now = PATIENCE_SECONDS - 1
    pods.note(shown)
    assert pods.waiting() == []
    now = PATIENCE_SECONDS
    assert [one.uid for one in pods.waiting()] == ["pod"]
    pods.note(shown, deleted=True)
    assert pods.waiting() == []
