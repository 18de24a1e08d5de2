"""Free accelerators: what nodes have, less what pods hold there, and which pods they would take."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.controller.ports import JobKey, Unavailable
from pipetransformer_operator.kube.capacity import free_accelerators
from pipetransformer_operator.kube.capacity.free_accelerators import FreeAccelerators, pod_view
from pipetransformer_operator.kube.capacity.node_fit import NodeView, allows, node_view, requests_of, shape_of
from pipetransformer_operator.kube.capacity.reservations import Reservations, awaits_room
from pipetransformer_operator.kube.events import ClusterListener
from pipetransformer_operator.kube.node_health.health import NodeHealth
from pipetransformer_operator.kube.watches.node_watch import NodeWatch
from pipetransformer_operator.kube.watches.other_pods import OtherPods
from tests.testkit.operator.scripted_api import Listed, ScriptedApi

pytestmark = pytest.mark.timeout(60)
GPU = "nvidia.com/gpu"


class Watched(ClusterListener):
    """Notes which watches were opened."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def on_watch_opened(self, path: str) -> None:
        self.paths.append(path)


class Returned(ClusterListener):
    """Notes whose reservations were returned."""

    def __init__(self) -> None:
        self.by: list[JobKey] = []

    def on_reservation_returned(self, by: JobKey) -> None:
        self.by.append(by)


def node(name: str, gpus: int = 8, *, taints: tuple[dict[str, str], ...] = (), **labels: str) -> dict[str, Any]:
    allocatable = {GPU: str(gpus), "cpu": "64", "memory": "256Gi", "pods": "110"}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": list(taints)},
        "status": {"allocatable": allocatable},
    }


def container(gpus: int = 1, **amounts: str) -> dict[str, Any]:
    return {"name": "main", "resources": {"limits": {GPU: str(gpus)}, "requests": amounts}}


ONE_GPU = shape_of({"containers": [container()]})


def pod(uid: str, on: str = "", gpus: int = 1, phase: str = "Running", nominated: str = "") -> dict[str, Any]:
    status = {"phase": phase, **({"nominatedNodeName": nominated} if nominated else {})}
    spec = {"containers": [container(gpus)], **({"nodeName": on} if on else {})}
    return {"metadata": {"uid": uid, "resourceVersion": "1"}, "spec": spec, "status": status}


def test_pods_of_all_owners_take_accelerators_and_those_that_have_ended_do_not() -> None:
    free = FreeAccelerators()
    free.note_node(node("a"))
    free.note_node(node("b", 2))
    free.note_pod(pod("1", "a", 3))
    free.note_pod(pod("2", "a", 4, "Succeeded"))
    free.note_pod(pod("3", "b", 2))
    free.note_pod(pod("4"))
    free.note_pod(pod("5", "unknown", 2))
    assert free.room_by_node(ONE_GPU) == {"a": 5}
    free.note_pod(pod("3", "b", 2, "Failed"))
    free.drop_pod("1")
    free.drop_pod("1")
    assert free.room_by_node(ONE_GPU) == {"a": 8, "b": 2}


def test_a_pod_for_which_others_are_preempted_holds_its_place_already() -> None:
    free = FreeAccelerators()
    free.note_node(node("a", 2))
    free.note_pod(pod("1", nominated="a", phase="Pending"))
    assert free.room_by_node(ONE_GPU) == {"a": 1}
    free.note_pod(pod("1", "a"))
    assert free.room_by_node(ONE_GPU) == {"a": 1}
    worker = pod("2", nominated="a", phase="Pending")
    worker["metadata"]["labels"] = {JOB_LABEL: "digits"}
    free.note_pod(worker)
    assert free.room_by_node(ONE_GPU) == {"a": 1}, "its job reserved that place"


def test_a_node_that_takes_no_pods_or_is_gone_has_nothing_free() -> None:
    closed: set[str] = set()

    class Gate:
        def is_closed(self, name: str) -> bool:
            return name in closed

    free = FreeAccelerators(Gate())
    shape = shape_of({"containers": [container()]})
    for name in "ab":
        free.note_node(node(name, 1))
    assert free.room_by_node(shape) == {"a": 1, "b": 1}
    closed.add("a")
    free.note_node(node("a", 1))
    assert free.room_by_node(shape) == {"b": 1}
    assert (free.reach_by_node(shape, 0), free.lacking(shape, GPU)) == ({"b": 1}, {"b": 0})
    free.note_node(node("b", 1), deleted=True)
    assert free.room_by_node(shape) == {}


def test_a_free_accelerator_is_no_room_where_memory_is_missing() -> None:
    free = FreeAccelerators()
    free.note_node(node("a", 8))
    assert free.room_by_node(shape_of({"containers": [container(cpu="1", memory="100Gi")]})) == {"a": 2}
    assert free.room_by_node(shape_of({"containers": [container(cpu="20500m")]})) == {"a": 3}
    assert free.room_by_node(shape_of({"containers": [container(1, **{"example.com/nic": "1"})]})) == {}


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [
        ({}, "plain"),
        ({"nodeSelector": {"gpu": "a100"}}, "a100"),
        ({"nodeSelector": {"gpu": "a100"}, "tolerations": [{"operator": "Exists"}]}, "a100 tainted"),
        ({"tolerations": [{"key": "team", "value": "ml", "effect": "NoSchedule"}]}, "plain tainted"),
        ({"tolerations": [{"key": "team", "value": "web"}]}, "plain"),
        ({"tolerations": [{"key": "team", "operator": "Exists", "effect": "NoExecute"}]}, "plain"),
    ],
    ids=["nothing", "selector", "selector and toleration", "equal", "another value", "another effect"],
)
def test_selectors_and_taints_say_which_nodes_take_a_pod(spec: dict[str, Any], allowed: str) -> None:
    ml = {"key": "team", "value": "ml", "effect": "NoSchedule"}
    soft = {"key": "old", "effect": "PreferNoSchedule"}
    nodes = [node("plain", taints=(soft,)), node("a100", gpu="a100"), node("tainted", taints=(ml,), gpu="a100")]
    found = [one["metadata"]["name"] for one in nodes if allows(node_view(one), spec)]
    expected = {"plain": ["plain", "a100"], "plain tainted": ["plain", "a100", "tainted"]}
    assert found == expected.get(allowed, allowed.split())


@pytest.mark.parametrize(
    ("term", "matches"),
    [
        ({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}, True),
        ({"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["a"]}]}, False),
        ({"matchExpressions": [{"key": "none", "operator": "NotIn", "values": ["a"]}]}, True),
        ({"matchExpressions": [{"key": "none", "operator": "Exists"}]}, False),
        ({"matchExpressions": [{"key": "none", "operator": "DoesNotExist"}]}, True),
        ({"matchExpressions": [{"key": "memory", "operator": "Gt", "values": ["39"]}]}, True),
        ({"matchExpressions": [{"key": "memory", "operator": "Lt", "values": ["40"]}]}, False),
        ({"matchExpressions": [{"key": "zone", "operator": "Gt", "values": ["1"]}]}, False),
        ({"matchExpressions": [{"key": "memory", "operator": "Gt", "values": ["39Gi"]}]}, False),
        ({"matchExpressions": [{"key": "memory", "operator": "Lt", "values": []}]}, False),
        ({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}, True),
        ({"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n"]}]}, False),
        ({}, False),
    ],
)
def test_required_node_affinity_is_read_as_the_scheduler_reads_it(term: dict[str, Any], matches: bool) -> None:
    view = node_view(node("n", zone="a", memory="40"))
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    assert allows(view, {"affinity": {"nodeAffinity": required}}) == matches
    either = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{}, term]}}
    assert allows(view, {"affinity": {"nodeAffinity": either}}) == matches


def required(terms: object) -> dict[str, Any]:
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (required([{"matchExpressions": []}]), "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"),
        (required({"nodeSelectorTerms": [{"matchExpressions": [{"operator": "Exists"}]}]}), "matchExpressions.0.key"),
        ({"tolerations": {"key": "team"}}, "tolerations"),
        ({"nodeSelector": ["gpu"]}, "nodeSelector"),
        ({"nodeSelector": {"gpu": True}}, "nodeSelector.gpu"),
        ({"initContainers": ["main"]}, "initContainers.0"),
        ({"overhead": "1"}, "overhead"),
        ({"resources": {"limits": [1]}}, "resources.limits"),
    ],
    ids=["list of terms", "no key", "tolerations", "selector", "value", "init container", "overhead", "resources"],
)
def test_a_template_that_no_server_accepts_fits_nowhere_and_hinders_no_other(wrong: dict[str, Any], where: str) -> None:
    free = FreeAccelerators()
    free.note_node(node("a", 2, taints=({"key": "team", "effect": "NoSchedule"},), memory="40"))
    shape = shape_of({"containers": [container()], **wrong})
    assert shape.unknown.endswith(f"{where} is invalid")
    assert (free.room_by_node(shape), free.lacking(shape, GPU), free.reach_by_node(shape, 1)) == ({}, {}, {})
    free.note_pod(pod("1", "a"))
    assert (free.holders("a"), free.room_by_node(shape)) == (1, {})


def test_a_pod_requests_its_containers_or_its_largest_init_container() -> None:
    spec = {
        "initContainers": [
            {"resources": {"requests": {"cpu": "3"}}},
            {"restartPolicy": "Always", "resources": {"requests": {"cpu": "500m", GPU: "1"}}},
            {"resources": {"requests": {"cpu": "3"}}},
        ],
        "containers": [container(2, cpu="1"), {"name": "helper"}],
        "overhead": {"cpu": "250m"},
    }
    assert requests_of(spec) == {"cpu": 3750, GPU: 3000, "pods": 1000}
    assert requests_of({"containers": [container(0)], "resources": {"requests": {"cpu": "2"}}}) == {
        "cpu": 2000,
        "pods": 1000,
    }


def test_only_a_pod_that_held_accelerators_of_a_node_releases_some() -> None:
    free = FreeAccelerators()
    free.note_node(node("a"))
    assert not free.note_pod(pod("1", "a"))
    assert not free.note_pod(pod("2", "a") | {"spec": {"nodeName": "a", "containers": [{"name": "web"}]}})
    assert not free.drop_pod("2")
    assert free.note_pod(pod("1", "a", phase="Succeeded"))
    assert not free.drop_pod("1"), "it was told already"
    assert not free.note_pod(pod("3", phase="Pending", nominated="a"))
    assert free.note_pod(pod("3", "b")), "the scheduler found it another node"


def test_of_a_node_without_pods_nothing_is_kept() -> None:
    free = FreeAccelerators()
    for number in range(3):
        free.note_pod(pod(str(number), f"node-{number}"))
        assert free.holders(f"node-{number}") == 1
        free.drop_pod(str(number))
    assert list(vars(free)["_holders"]) == []


PODS = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["", "a", "b"]), st.integers(0, 4), st.booleans()))


@settings(max_examples=100, deadline=None)
@given(PODS)
def test_what_is_kept_by_changes_is_what_is_counted_from_scratch(changes: list[tuple[int, str, int, bool]]) -> None:
    free = FreeAccelerators()
    shape = shape_of({"containers": [container()]})
    nodes = [node("a", 4), node("b", 6)]
    for one in nodes:
        free.note_node(one)
    free.room_by_node(shape)
    there: dict[str, dict[str, Any]] = {}
    for number, on, gpus, gone in changes:
        uid = str(number)
        if gone:
            there.pop(uid, None)
            free.drop_pod(uid)
        else:
            there[uid] = pod(uid, on, gpus)
            free.note_pod(there[uid])
    left = {"a": 4, "b": 6}
    for one in there.values():
        if (view := pod_view(one)) is not None and view.node in left:
            left[view.node] -= view.requests.get(GPU, 0) // 1000
    expected = {name: gpus for name, gpus in left.items() if gpus > 0}
    assert free.room_by_node(shape) == expected


def test_what_one_job_is_about_to_take_is_no_room_for_another() -> None:
    free = FreeAccelerators()
    free.note_node(node("a", 3))
    free.note_node(node("b", 2, gpu="v100"))
    shape = shape_of({"containers": [container()]})
    elsewhere = shape_of({"containers": [container()], "nodeSelector": {"gpu": "v100"}})
    returned = Returned()
    room = Reservations(free, [], returned)
    first, second = JobKey("default", "a"), JobKey("default", "b")
    room.reserve(first, shape, 2)
    assert [room.room(first, shape), room.room(second, shape)] == [(5, 5, None, ""), (5, 3, None, "")]
    assert room.room(second, elsewhere) == (2, 0, None, "")
    room.reserve(first, shape, 1)
    room.reserve(first, shape, 1)  # each turn says it again, and must wake no other job
    assert (room.room(second, shape).unreserved, returned.by) == (4, [first])
    room.forget(first)
    assert (room.room(second, shape).unreserved, returned.by) == (5, [first, first])
    room.reserve(first, shape, 9)
    assert room.room(second, shape) == (5, 0, None, "")


def test_before_all_pods_are_listed_there_is_no_room() -> None:
    free = FreeAccelerators()
    free.note_node(node("a", 3))
    shape = shape_of({"containers": [container()]})
    room = Reservations(free, [OtherPods(ScriptedApi(), free)]).room(JobKey("default", "a"), shape)
    assert room == (None, 0, None, "the operator has not yet listed all pods")


def test_within_reach_is_what_pods_of_lower_priority_hold_as_well() -> None:
    free = FreeAccelerators()
    shape = shape_of({"containers": [container(2)]})
    free.note_node(node("a", 4))
    for uid, priority in (("1", -11), ("2", 0), ("3", 1000)):
        one = pod(uid, "a")
        free.note_pod(one | {"spec": one["spec"] | {"priority": priority}})
    assert [free.reach_by_node(shape, priority) for priority in (-11, 0, 1, 2000)] == [{"a": n} for n in (0, 1, 1, 2)]


def test_within_reach_is_what_it_is_after_each_change() -> None:
    free = FreeAccelerators()
    shape = shape_of({"containers": [container()]})
    free.note_node(node("a", 4))
    seen = [free.reach_by_node(shape, 1)]
    free.note_pod(pod("1", "a", 3) | {"spec": {"nodeName": "a", "containers": [container(3)], "priority": 1}})
    seen.append(free.reach_by_node(shape, 1))
    free.note_node(node("b", 2))
    seen.append(free.reach_by_node(shape, 1))
    free.drop_pod("1")
    seen.append(free.reach_by_node(shape, 1))
    free.note_node(node("a"), deleted=True)
    seen.append(free.reach_by_node(shape, 1))
    assert seen == [{"a": 4}, {"a": 1}, {"a": 1, "b": 2}, {"a": 4, "b": 2}, {"b": 2}]


def test_jobs_that_wait_alike_look_at_all_nodes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def counted(view: NodeView, spec: Mapping[str, Any]) -> bool:
        looked.append(view.name)
        return allows(view, spec)

    monkeypatch.setattr(free_accelerators, "allows", counted)
    free = FreeAccelerators()
    for number in range(10):
        free.note_node(node(f"n{number}", 1))
    others = OtherPods(ScriptedApi(), free, lambda: seconds)
    seconds = 0.0
    for number in range(50):
        others.note(scheduler_says("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", f"pod-{number}"))
    seconds = 60.0
    assert len(others.waiting()) == 50
    for _ in range(50):
        free.reach_by_node(shape_of({"containers": [container()]}), 0)
    assert len(looked) == 20, "each node once for the pods of others, and once for jobs"


def test_what_a_node_lacks_for_a_pod_counts_where_the_node_would_take_it_at_all() -> None:
    free = FreeAccelerators()
    for name, gpus, labels in (("large", 8, {}), ("small", 2, {}), ("other", 8, {"gpu": "v100"})):
        free.note_node(node(name, gpus, taints=(), **labels))
        free.note_pod(pod(name, name, 2))
    shape = shape_of({"containers": [container(4)]})
    assert free.lacking(shape, GPU) == {"large": 0, "other": 0}
    free.note_pod(pod("more", "large", 5))
    assert free.lacking(shape, GPU) == {"large": 3, "other": 0}
    chosen = shape_of({"containers": [container(4)], "nodeSelector": {"gpu": "a100"}})
    assert free.lacking(chosen, GPU) == {}
    assert (free.holders("large"), free.holders("none")) == (2, 0)


def scheduler_says(message: str, uid: str = "1") -> dict[str, Any]:
    said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return pod(uid, phase="Pending") | {"status": {"conditions": [said]}}


def test_a_pod_that_no_node_takes_for_other_reasons_reserves_nothing() -> None:
    assert awaits_room(pod("1", phase="Pending"))
    assert awaits_room(scheduler_says("0/2 nodes are available: 2 Insufficient nvidia.com/gpu."))
    assert not awaits_room(scheduler_says("0/2 nodes are available: 2 node(s) had volume node affinity conflict."))
    assert not awaits_room(pod("1", "a"))


async def test_a_pod_of_others_that_went_unseen_holds_nothing_after_the_next_list() -> None:
    free = FreeAccelerators()
    free.note_node(node("a", 4))
    both = Listed([pod("1", "a"), pod("2", "a")])
    api = ScriptedApi(both, [{"type": "DELETED", "object": pod("2", "a")}], [])
    others = OtherPods(api, free)
    assert not others.listed
    await api.answer(others.run())
    assert (others.listed, free.room_by_node(ONE_GPU)) == (True, {"a": 3})


class Freed(ClusterListener):
    """Counts how often it heard that accelerators became free."""

    def __init__(self) -> None:
        self.times = 0

    def on_accelerators_released(self, by: JobKey | None) -> None:
        assert by is None, "no job of ours released them"
        self.times += 1


def test_a_pod_of_others_that_ends_or_shrinks_frees_accelerators_and_says_so() -> None:
    free, freed = FreeAccelerators(), Freed()
    free.note_node(node("a", 4))
    others = OtherPods(ScriptedApi(), free, events=freed)
    others.note(pod("1", "a", 2))
    others.note(pod("2", "a", 1))
    assert (free.room_by_node(ONE_GPU), freed.times) == ({"a": 1}, 0)
    others.note(pod("1", "a", 2, "Succeeded") | {"metadata": {"uid": "1", "resourceVersion": "2"}})
    assert (free.room_by_node(ONE_GPU), freed.times) == ({"a": 3}, 1)
    others.note(pod("2", "a"), deleted=True)
    assert (free.room_by_node(ONE_GPU), freed.times) == ({"a": 4}, 2)
    others.note(pod("3"), deleted=True)
    assert freed.times == 2, "a pod that held nothing frees nothing"


def test_a_pod_of_others_that_finds_a_node_waits_no_more() -> None:
    seconds = 0.0
    others = OtherPods(ScriptedApi(), FreeAccelerators(), lambda: seconds)
    waiting = scheduler_says("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", "1")
    others.note(waiting)
    seconds = 60.0
    assert [(one.uid, one.priority) for one in others.waiting()] == [("1", 0)]
    others.note(pod("1", "a") | {"metadata": {"uid": "1", "resourceVersion": "2"}})
    assert others.waiting() == []


async def test_a_waiting_pod_of_others_that_went_unseen_waits_no_more_after_the_next_list() -> None:
    seconds, freed = 0.0, Freed()
    free = FreeAccelerators()
    free.note_node(node("a", 4))
    waiting = scheduler_says("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", "1")
    api = ScriptedApi(Listed([waiting, pod("2", "a")]), Unavailable("410"), Listed([]))
    others = OtherPods(api, free, lambda: seconds, freed)
    await api.answer(others.run())
    seconds = 60.0
    assert others.waiting() == []
    assert (free.room_by_node(ONE_GPU), freed.times) == ({"a": 4}, 1)


async def test_a_node_that_went_unseen_has_nothing_free_after_the_next_list() -> None:
    class Free(FreeAccelerators):
        def __init__(self) -> None:
            super().__init__()
            self.lost = NodeHealth()

        def on_node_changed(self, node: Object, *, deleted: bool) -> None:
            self.lost.note(node, deleted=deleted)
            self.note_node(node, deleted=deleted)

    def listed(*names: str) -> Listed:
        return Listed([node(name, 2) for name in names])

    seen: Object = {"metadata": {"resourceVersion": "6"}}
    api = ScriptedApi(
        listed("a", "b", "c"),
        [{"type": "DELETED", "object": seen | {"metadata": node("b")["metadata"] | seen["metadata"]}}],
        Unavailable("410"),
        listed("c"),
    )
    free, watched = Free(), Watched()
    await api.answer(NodeWatch(api, free, watched).run())
    assert free.room_by_node(ONE_GPU) == {"c": 2}
    assert free.lost.is_gone("a") and free.lost.is_gone("b") and not free.lost.is_gone("c")
    assert watched.paths == ["/api/v1/nodes"]
