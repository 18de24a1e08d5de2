"""What the pool remembers of pods beside what the watch shows, and for how long."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from pipetransformer_contract.api import JobStatus, PipeTrainingJob
from pipetransformer_contract.api.labels import (
    CLAIMED_LABEL,
    JOB_LABEL,
    PLACEMENT_GROUP_LABEL,
    QUEUE_LABEL,
    WORKER_LABEL,
)
from pipetransformer_contract.api.requests import Object
from pipetransformer_contract.api.status import Condition, ConditionStatus, ConditionType
from pipetransformer_contract.messages import Generation, Member, ResizeReason
from pipetransformer_operator.controller.ports import Conflict, Invalid, JobKey, NameConflict, Refused
from pipetransformer_operator.kube.capacity.free_accelerators import FreeAccelerators
from pipetransformer_operator.kube.capacity.reservations import Reservations
from pipetransformer_operator.kube.client.api import Api, NotFound
from pipetransformer_operator.kube.node_health.health import NodeHealth
from pipetransformer_operator.kube.trust.authority import Publisher
from pipetransformer_operator.kube.workers.placement import PREFERRED, Groups
from pipetransformer_operator.kube.workers.pods import observable
from pipetransformer_operator.kube.workers.pool import KubePool
from pipetransformer_operator.plan import Worker
from tests.testkit.operator.builders import make_job

pytestmark = pytest.mark.timeout(60)
KEY = JobKey("default", "digits")
NOW = datetime(2026, 1, 1, tzinfo=UTC)


class World(Api):
    """An API server that makes pods, and a pool whose watch is the test, or where `quick` is quicker than an answer."""

    def __init__(self, *, quick: bool = False) -> None:
        self.quick = quick
        self.watched: list[Object] = []
        self.listed = 0
        self.prepared: list[str] = []
        self.made: list[Object] = []
        self.pool = KubePool(self, self, "https://channel", self)

    def of(self, key: JobKey) -> list[Object]:
        return self.watched

    def listed_version(self, namespace: str) -> int:
        return self.listed

    async def publish(self, namespace: str) -> None:
        """Only notes whom."""
        self.prepared.append(namespace)

    async def request(self, method: str, path: str, body: object = None, **options: object) -> Object:
        assert method == "POST" and isinstance(body, dict)
        self.made.append(body)
        created: Object = {**body, "status": {}}
        created["metadata"] |= {"uid": "uid-0", "resourceVersion": "1", "generation": 1}
        if self.quick:
            self.pool.on_pod_gone(KEY, "uid-0")
        return created


def job(stages: int = 2) -> PipeTrainingJob:
    made = make_job().stages(stages).job()
    return made.model_copy(update={"metadata": made.metadata.model_copy(update={"uid": "job-uid"})})


def test_a_template_that_no_server_accepts_has_no_known_room_so_that_the_server_says_what_is_wrong() -> None:
    world, status = World(), JobStatus(resize_failures=1)
    world.pool = KubePool(world, world, "https://channel", world, reservations=Reservations(FreeAccelerators(), []))
    assert world.pool.room(job().model_copy(update={"status": status})) == (0, 0, None, "")
    wrong = make_job("wrong").set("podTemplate.spec.tolerations", {"key": "team"}).job()
    unknown = (None, 0, None, "podTemplate.spec.tolerations is invalid")
    assert world.pool.room(wrong.model_copy(update={"status": status})) == unknown


def test_the_room_of_a_new_job_of_the_same_name_is_that_of_its_own_template() -> None:
    world, counted = World(), FreeAccelerators()
    allocatable = {"nvidia.com/gpu": "2", "cpu": "4", "pods": "110"}
    counted.note_node({"metadata": {"name": "a"}, "status": {"allocatable": allocatable}})
    world.pool = KubePool(world, world, "https://channel", world, reservations=Reservations(counted, []))
    free = []
    for uid, cpu in (("first", "2"), ("second", "4")):
        resources = {"limits": {"nvidia.com/gpu": 1}, "requests": {"cpu": cpu}}
        container = {"name": "trainer", "image": "x", "resources": resources}
        one = make_job().set("podTemplate.spec", {"containers": [container]}).job()
        metadata = one.metadata.model_copy(update={"uid": uid})
        free.append(world.pool.room(one.model_copy(update={"metadata": metadata})).free)
    assert free == [2, 1]


@pytest.mark.parametrize(
    ("accelerator", "claims", "free"),
    [("", ["gpu"], None), ("", [], 110), ("nvidia.com/gpu", ["network"], 2)],
    ids=["by claims", "no accelerators", "also claims"],
)
def test_devices_by_resource_claims_are_not_counted_so_that_no_room_is_known_for_them(
    accelerator: str, claims: list[str], free: int | None
) -> None:
    world, counted = World(), FreeAccelerators()
    counted.note_node({"metadata": {"name": "a"}, "status": {"allocatable": {"nvidia.com/gpu": "2", "pods": "110"}}})
    world.pool = KubePool(world, world, "https://channel", world, reservations=Reservations(counted, []))
    limits = {accelerator: 1} if accelerator else {}
    container = {"name": "trainer", "image": "x", "resources": {"limits": limits}}
    spec = {"containers": [container], "resourceClaims": [{"name": name} for name in claims]}
    asks = make_job().set("acceleratorResource", accelerator).set("podTemplate.spec", spec)
    room = world.pool.room(asks.job())
    assert room.free == free
    assert ("resourceClaims asks for devices" in room.unknown) == (free is None)


@pytest.mark.parametrize(("cordoned", "free"), [(False, 2), (True, 0)])
def test_no_room_is_known_where_no_node_lists_the_accelerator_so_that_a_start_does_not_wait_a_day(
    cordoned: bool, free: int
) -> None:
    nodes, status = NodeHealth(), {"allocatable": {"nvidia.com/gpu": "2", "pods": "110"}}
    world, counted = World(), FreeAccelerators(nodes)
    node: Object = {"metadata": {"name": "a"}, "spec": {"unschedulable": cordoned}, "status": status}
    nodes.note(node, deleted=False)
    counted.note_node(node)
    world.pool = KubePool(world, world, "https://channel", world, nodes, reservations=Reservations(counted, []))
    rooms = []
    for name, resource in (("right", "nvidia.com/gpu"), ("wrong", "nvidia.com/gpus")):
        container = {"name": "trainer", "image": "x", "resources": {"limits": {resource: 1}}}
        asks = make_job(name).set("acceleratorResource", resource).set("podTemplate.spec", {"containers": [container]})
        rooms.append(world.pool.room(asks.job()))
    unknown = (None, 0, None, "no node lists nvidia.com/gpus (spec.acceleratorResource)")
    assert rooms == [(free, free, None, ""), unknown]


async def test_room_is_on_the_nodes_that_pods_tolerate_as_the_api_server_admits_them() -> None:
    """On GKE an admission plugin lets pods that ask for GPUs tolerate the taint of the nodes that have them."""
    added: Object = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    for_a_while: Object = {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"}

    class Admits(World):
        async def request(self, method: str, path: str, body: object = None, **options: object) -> Object:
            created = await super().request(method, path, body, **options)
            return {**created, "spec": {**created["spec"], "tolerations": [for_a_while, added]}}

    counted = FreeAccelerators()
    counted.note_node(
        {
            "metadata": {"name": "a"},
            "spec": {"taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]},
            "status": {"allocatable": {"nvidia.com/gpu": "2", "cpu": "64", "memory": "256Gi", "pods": "110"}},
        }
    )
    world, retries = Admits(), _placed(1).model_copy(update={"status": JobStatus(resize_failures=1)})
    world.pool = KubePool(world, world, "https://channel", world, reservations=Reservations(counted, []))
    assert world.pool.room(retries) == (0, 0, None, ""), "only a pod shows what nodes a retry would reach"
    await world.pool.create(retries, 0, JobStatus())
    assert world.pool.room(retries) == (2, 2, 2, "")
    world.pool.on_pod_gone(KEY, "uid-0")
    assert world.pool.room(retries) == (2, 2, 2, ""), "also of a job that released its pods"
    edited = retries.model_copy(update={"metadata": retries.metadata.model_copy(update={"generation": 2})})
    assert world.pool.room(edited) == (0, 0, None, ""), "its template may be another"
    world.watched = [observable({**world.made[0], "spec": {"nodeName": "a", "tolerations": [added]}})]
    assert world.pool.room(edited) == (2, 2, 2, ""), "also by a pod that an earlier operator made"


def test_there_is_no_room_on_a_node_that_workers_avoid() -> None:
    world, nodes = World(), NodeHealth()
    trains = _placed(1).model_copy(update={"status": JobStatus(resize_failures=1)})
    room = _racks({"a1": 4, "b1": 3})
    world.pool = KubePool(world, world, "https://channel", world, nodes, reservations=room)
    world.watched = [
        {"metadata": {"uid": "pod", "ownerReferences": [{"uid": "job-uid", "controller": True}]}, "spec": {}}
    ]
    assert world.pool.room(trains) == (7, 7, 7, "")
    nodes.blame({f"uid-{number}": "a1" for number in range(2)})
    assert world.pool.room(trains) == (3, 3, 3, "")


async def test_a_pod_that_came_and_went_while_the_watch_was_away_is_gone_with_the_next_list() -> None:
    world = World()
    await world.pool.create(job(), 0, JobStatus())
    assert world.pool.list(job()), "no list is as new as the pod"
    world.listed = 2
    assert not world.pool.list(job())


async def test_a_pod_is_there_from_its_creation_until_the_watch_shows_its_end() -> None:
    world = World()
    await world.pool.create(job(), 0, JobStatus())
    assert [worker.uid for worker in world.pool.list(job())] == ["uid-0"]
    world.pool.on_pod_gone(KEY, "uid-0")
    assert world.pool.list(job()) == ()


async def test_a_doubted_node_takes_nearness_only_from_jobs_with_workers_there() -> None:
    world, nodes, later = World(), NodeHealth(), datetime.max.replace(tzinfo=UTC)
    world.pool = KubePool(world, world, "https://channel", world, nodes)
    nodes.doubt("another", {"node-1": later}, {})
    for of_the_job, kinds in (("node-2", {"nodeAffinity", "podAffinity"}), ("node-1", {"nodeAffinity"})):
        await world.pool.create(job(), 0, JobStatus())
        ((_, there),) = world.pool._written[KEY].items()
        there["spec"]["nodeName"] = of_the_job
        await world.pool.prepare(job(), JobStatus(), [])
        await world.pool.create(job(), 1, JobStatus())
        assert world.made[-1]["spec"]["affinity"].keys() == kinds
        assert "node-1" in json.dumps(world.made[-1]["spec"]["affinity"]["nodeAffinity"])
        world.pool.on_job_gone(KEY)


async def test_a_batch_of_creations_looks_at_the_jobs_workers_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, nodes = World(), NodeHealth()
    world.pool = KubePool(world, world, "https://channel", world, nodes)
    nodes.doubt("another", {"node-1": datetime.max.replace(tzinfo=UTC)}, {})
    looks = 0
    look = world.pool.list

    def counting(of: PipeTrainingJob) -> tuple[Worker, ...]:
        nonlocal looks
        looks += 1
        return look(of)

    monkeypatch.setattr(world.pool, "list", counting)
    await world.pool.prepare(job(), JobStatus(), [])
    for number in range(8):
        await world.pool.create(job(), number, JobStatus())
    assert looks == 1
    assert all("node-1" in json.dumps(pod["spec"]["affinity"]["nodeAffinity"]) for pod in world.made)


async def groups_of(created: Sequence[int], there: Mapping[int, str], stages: int = 2, **status: Any) -> list[str]:
    """The groups of new workers, beside those that are there already; more than four stages may not be."""
    world, nodes = World(), NodeHealth()
    nodes.draining = {"cordoned"}
    world.pool = KubePool(world, world, "https://channel", world, nodes)
    await world.pool.prepare(job(4), JobStatus(), [])
    for number, group in there.items():
        await world.pool.create(job(4), number, JobStatus())
        pod = world.pool._written[KEY].pop("uid-0")
        node = "cordoned" if group.endswith("cordoned") else "node"
        labels = pod["metadata"]["labels"] | {PLACEMENT_GROUP_LABEL: group.removesuffix(" cordoned")}
        pod["metadata"] |= {"uid": f"uid-w{number}", "labels": labels}
        pod["spec"]["nodeName"] = node
        world.watched.append(pod)
    await world.pool.prepare(job(4), JobStatus(), [])
    members = [Member(name="digits-w0", uid="uid-w0", address="10.0.0.1:29500")]
    published = Generation(
        job_uid="job",
        layout_generation=1,
        stages=stages,
        pipelines=1,
        members=members,
        leader="digits-w0",
        nonce="0" * 32,
        reason=ResizeReason.FAILURE,
    )
    wanted = JobStatus(worker_ids=sorted({*there, *created}), generation=published, **status)
    world.made.clear()
    for number in created:
        await world.pool.create(job(4), number, wanted)
    return [pod["metadata"]["labels"][PLACEMENT_GROUP_LABEL] for pod in world.made]


FOUR = {0: "2-0", 1: "2-0", 2: "2-1", 3: "2-1"}


async def test_workers_that_are_created_one_after_the_other_make_a_pipeline() -> None:
    assert await groups_of([0, 1, 2, 3], {}) == ["2-0", "2-0", "2-1", "2-1"]
    assert await groups_of([3, 4], {0: "2-0", 2: "2-0"}) == ["2-1", "2-1"], "a claim after a replacement"
    assert await groups_of([5, 6, 7, 8], {}, stages=4) == ["4-0"] * 4, "a start after a suspension"


async def test_a_replacement_takes_the_place_of_the_one_that_was_lost() -> None:
    lost_first, lost_last = ({key: FOUR[key] for key in FOUR if key != lost} for lost in (0, 3))
    assert await groups_of([4], lost_first) == ["2-0"]
    assert await groups_of([4], lost_last) == ["2-1"]
    assert await groups_of([4], dict.fromkeys((0, 2, 3), "4-0")) == ["4-0"], "who lay together before lies there now"


async def test_who_is_on_the_way_out_leaves_a_place() -> None:
    assert await groups_of([4], FOUR | {1: "2-0 cordoned"}) == ["2-0"]
    assert await groups_of([4, 5], FOUR, leaving_ids=[2, 3]) == ["2-1", "2-1"]


def _racks(gpus: Mapping[str, int]) -> Reservations:
    """A node with so many free GPUs in each rack, which the node's name begins with."""
    free = FreeAccelerators()
    for name, amount in gpus.items():
        allocatable = {"nvidia.com/gpu": str(amount), "cpu": "64", "memory": "256Gi", "pods": "110"}
        metadata = {"name": name, "labels": {"rack": name[0]}}
        free.note_node({"metadata": metadata, "status": {"allocatable": allocatable}})
    return Reservations(free, [])


def _wanted_racks(pod: Object) -> list[str]:
    terms = pod["spec"]["affinity"].get("nodeAffinity", {}).get(PREFERRED, [])
    return [rack for term in terms for one in term["preference"]["matchExpressions"] for rack in one["values"]]


def _placed(stages: int, *wishes: str) -> PipeTrainingJob:
    """A job with these wishes about racks, one GPU a worker."""
    container = {"name": "trainer", "image": "x", "resources": {"limits": {"nvidia.com/gpu": 1}}}
    made = make_job().stages(stages).set("podTemplate.spec.containers", [container])
    made.set("placement", {wish: {"topologyKey": "rack", "required": True} for wish in wishes})
    return job().model_copy(update={"spec": made.job().spec})


@pytest.mark.parametrize(
    ("gpus", "wishes", "racks"),
    [
        ({"a1": 3, "b1": 2, "b2": 2}, ["within"], [["b"], []]),
        ({"a1": 9, "b1": 2, "b2": 2}, ["within"], [["a"], ["a"]]),
        ({"a1": 9, "b1": 2, "b2": 2}, ["within", "spread"], [["a"], ["b"]]),
        ({"a1": 9}, ["within", "spread"], [["a"], []]),
        ({"a1": 3, "b1": 3}, ["within"], [[], []]),
        ({"a1": 8}, ["spread"], [[], []]),
    ],
)
async def test_a_pipeline_begins_in_a_rack_that_has_room_for_all_of_it(
    gpus: dict[str, int], wishes: list[str], racks: list[list[str]]
) -> None:
    world, made = World(), _placed(4, *wishes)
    world.pool = KubePool(world, world, "https://channel", world, reservations=_racks(gpus))
    await world.pool.prepare(made, JobStatus(), range(8))
    for number in range(8):
        await world.pool.create(made, number, JobStatus())
    first, second = racks
    assert [_wanted_racks(pod) for pod in world.made] == [first] * 4 + [second] * 4


async def test_a_pipeline_begins_nowhere_for_room_on_nodes_that_its_workers_avoid() -> None:
    world, made, nodes = World(), _placed(4, "within"), NodeHealth()
    nodes.blame({f"uid-{number}": "a1" for number in range(9)})
    room = _racks({"a1": 4, "a2": 3, "b1": 4})
    world.pool = KubePool(world, world, "https://channel", world, nodes, reservations=room)
    await world.pool.prepare(made, JobStatus(), range(4))
    await world.pool.create(made, 0, JobStatus())
    assert "b" in _wanted_racks(world.made[0]) and "a" not in _wanted_racks(world.made[0])


async def test_a_pipeline_of_devices_that_nobody_counts_begins_anywhere() -> None:
    """By its processors alone a rack without any device might have most room."""
    world, made = World(), _placed(4, "within").model_dump(by_alias=True, exclude_unset=True)
    made["spec"]["acceleratorResource"] = ""
    made["spec"]["podTemplate"]["spec"] |= {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one"}]}
    by_claim = PipeTrainingJob.model_validate(made)
    world.pool = KubePool(world, world, "https://channel", world, reservations=_racks({"a1": 8}))
    await world.pool.prepare(by_claim, JobStatus(), range(4))
    await world.pool.create(by_claim, 0, JobStatus())
    assert _wanted_racks(world.made[0]) == []


async def test_a_pipeline_of_a_queue_begins_where_its_flavor_says() -> None:
    world, made = World(), _placed(4, "within")
    queued = made.metadata.model_copy(update={"labels": {QUEUE_LABEL: "team"}})
    world.pool = KubePool(world, world, "https://channel", world, reservations=_racks({"a1": 8}))
    await world.pool.prepare(made.model_copy(update={"metadata": queued}), JobStatus(), range(4))
    await world.pool.create(made, 0, JobStatus())
    assert _wanted_racks(world.made[0]) == []


async def test_a_replacement_goes_to_its_pipeline_and_a_new_pipeline_to_another_rack() -> None:
    world, made = World(), _placed(2, "within", "spread")
    world.pool = KubePool(world, world, "https://channel", world, reservations=_racks({"a1": 8, "b1": 3}))
    await world.pool.prepare(made, JobStatus(), [0])
    await world.pool.create(made, 0, JobStatus())
    ((_, there),) = world.pool._written[KEY].items()
    there["spec"]["nodeName"] = "a1"
    world.made.clear()
    await world.pool.prepare(made, JobStatus(worker_ids=[0]), [1, 2, 3])
    for number in (1, 2, 3):
        await world.pool.create(made, number, JobStatus(worker_ids=[0]))
    assert [_wanted_racks(pod) for pod in world.made] == [[], ["b"], ["b"]]
    begins = {"matchExpressions": [{"key": "rack", "operator": "In", "values": ["b"]}]}
    assert world.made[1]["spec"]["affinity"]["nodeAffinity"][PREFERRED] == [{"weight": 100, "preference": begins}]


def test_a_group_is_alone_only_while_the_job_has_no_worker_of_another() -> None:
    beside, alone = Groups(2, 2, ["2-0", "2-0"]), Groups(2, 2, ["2-0"])
    assert (beside.of(4), beside.is_alone("2-1")) == ("2-1", False), "a claimed pipeline keeps its distance"
    assert (alone.of(4), alone.is_alone("2-0")) == ("2-0", True)
    assert (alone.of(5), alone.is_alone("2-0")) == ("2-1", False)


async def test_each_pair_of_groups_has_one_that_keeps_its_distance() -> None:
    world = World()
    await world.pool.prepare(job(2), JobStatus(), [])
    for number in range(4):
        await world.pool.create(job(2), number, JobStatus())
    kinds = [pod["spec"]["affinity"].keys() for pod in world.made]
    assert kinds == [{"podAffinity"}] * 2 + [{"podAffinity", "podAntiAffinity"}] * 2


@pytest.mark.parametrize("label", ["", "x", "-1", "9999-7", "99999999999999999999-0", "\u00b2-0"])
async def test_a_label_that_somebody_changed_makes_no_group_larger_than_a_pipeline(label: str) -> None:
    groups = await groups_of(range(1, 9), {0: label})
    assert groups[3:] == sorted(groups[3:]) and set(groups[3:]) <= {"2-0", "2-1", "2-2", "2-3"}


async def test_a_pod_that_ends_before_its_creation_is_answered_does_not_exist() -> None:
    world = World(quick=True)
    await world.pool.create(job(), 0, JobStatus())
    assert world.pool.list(job()) == ()


async def test_of_a_deleted_job_whose_pods_end_after_it_nothing_is_kept() -> None:
    world = World()
    empty = World().pool
    await world.pool.prepare(job(), JobStatus(), [])
    await world.pool.create(job(), 0, JobStatus())
    world.pool.on_job_gone(KEY)
    world.pool.on_pod_gone(KEY, "uid-0")
    for memory in ("_written", "_gone_meanwhile", "_requests", "_unattended", "_avoided", "_placement_groups"):
        assert vars(world.pool)[memory] == vars(empty)[memory]


async def test_of_a_job_that_goes_while_its_pod_is_made_no_shape_is_kept() -> None:
    class Late(World):
        async def request(self, method: str, path: str, body: object = None, **options: object) -> Object:
            self.pool.on_job_gone(KEY)
            return await super().request(method, path, body, **options)

    world = Late()
    world.pool.room(job())
    await world.pool.create(job(), 0, JobStatus())
    assert world.pool._shapes == {}


async def test_a_namespace_is_made_fit_for_the_job_and_not_for_each_worker() -> None:
    world = World()
    await world.pool.prepare(job(), JobStatus(), [])
    await world.pool.create(job(), 0, JobStatus())
    assert world.prepared == ["default"]


@pytest.mark.parametrize(
    ("owner", "error", "words"),
    [
        ("digits", Refused, "pod digits-w0 of a deleted job of the same name still exists"),
        ("other", NameConflict, "digits-w0 already exists and is not a worker of this job"),
        (None, NameConflict, "digits-w0 already exists and is not a worker of this job"),
    ],
)
async def test_a_pod_of_a_deleted_job_is_awaited_and_a_foreign_pod_is_a_conflict(
    owner: str | None, error: type[Exception], words: str
) -> None:
    class Taken(World):
        async def request(self, method: str, path: str, body: object = None, **options: object) -> Object:
            if method == "POST":
                raise Conflict("exists")
            controller = {"kind": "PipeTrainingJob", "name": owner, "uid": "earlier", "controller": True}
            owners = {"ownerReferences": [controller]} if owner else {}
            return {"metadata": {"name": "digits-w0", "uid": "uid-9", **owners}}

    with pytest.raises(error, match=words):
        await Taken().pool.create(job(), 0, JobStatus())


class Trust:
    trusted = b"trusted"


class Failing(World):
    """An API server that answers each request with the same error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.pool = KubePool(self, self, "https://channel", Publisher(self, Trust()))

    async def request(self, method: str, path: str, body: object = None, **options: object) -> Object:
        raise self.error


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.prepare(job(), JobStatus(), []),
        lambda pool: pool.protect(job(), None),
        lambda pool: pool.create(job(), 0, JobStatus()),
    ],
    ids=["prepare", "protect", "create"],
)
async def test_a_namespace_that_is_gone_is_a_conflict(call: Callable[[KubePool], Awaitable[None]]) -> None:
    with pytest.raises(Conflict, match='namespaces "default" not found'):
        await call(Failing(NotFound('POST /api: 404 namespaces "default" not found')).pool)


@pytest.mark.parametrize(
    ("error", "words"),
    [(Refused("403 exceeded quota"), "403 exceeded quota"), (Invalid("422 spec"), "spec.podTemplate: 422 spec")],
)
async def test_only_an_invalid_pod_is_blamed_on_the_template(error: Refused, words: str) -> None:
    with pytest.raises(Refused) as raised:
        await Failing(error).pool.create(job(), 0, JobStatus())
    assert (type(raised.value), str(raised.value)) == (type(error), words)


async def test_a_template_that_makes_no_pod_is_named() -> None:
    wrong = make_job().set("podTemplate.spec.tolerations", {"key": "team"}).job()
    with pytest.raises(Refused, match=r"^spec\.podTemplate: .*tolerations: must be a list of objects"):
        await World().pool.create(wrong, 0, JobStatus())


class Admitting(World):
    """An API server whose admission changes what is created, and that says the end of pods in its own way."""

    def __init__(self, took: str = "") -> None:
        super().__init__()
        self.took = took
        self.there: Object | None = None
        self.deleted: list[tuple[str, object]] = []
        self.answer: Object = {"kind": "Status"}

    async def request(self, method: str, path: str, body: object = None, **options: object) -> Object:
        if method == "DELETE":
            self.deleted.append((path.rpartition("/")[2], body))
            return self.answer
        if method == "GET":
            assert self.there is not None
            return self.there
        if self.there is not None:
            raise Conflict("exists")
        self.there = await super().request(method, path, body, **options)
        metadata = self.there["metadata"] = dict(self.there["metadata"])
        metadata["labels"] = {
            key: value for key, value in metadata["labels"].items() if self.took not in (key, "labels")
        }
        if self.took == "ownerReferences":
            del metadata[self.took]
        return self.there


@pytest.mark.parametrize(("own", "asked"), [(None, 30), (600, None)])
async def test_a_deleted_worker_gets_the_grace_period_of_its_template_or_30_s(
    own: int | None, asked: int | None
) -> None:
    template = {"containers": [{"name": "trainer", "image": "x"}]}
    made = make_job().set(
        "podTemplate.spec", template | ({} if own is None else {"terminationGracePeriodSeconds": own})
    )
    world = Admitting()
    await world.pool.delete(made.job(), "digits-w0", "uid-0")
    ((name, options),) = world.deleted
    assert name == "digits-w0" and isinstance(options, dict)
    assert options.get("gracePeriodSeconds") == asked


@pytest.mark.parametrize("took", [JOB_LABEL, WORKER_LABEL, CLAIMED_LABEL, "ownerReferences", "labels"])
async def test_a_pod_that_admission_makes_unrecognisable_is_deleted_at_once(took: str) -> None:
    world = Admitting(took)
    words = "job, label training.pipetransformer.io/worker-id" if took == "labels" else took
    with pytest.raises(Refused, match=f"pod digits-w0 was deleted: an admission .* removed its .*{words}"):
        await world.pool.create(job(), 0, JobStatus())
    assert world.deleted == [("digits-w0", {"preconditions": {"uid": "uid-0"}})]
    assert world.pool.list(job()) == ()


async def test_the_next_operator_deletes_an_unrecognisable_pod() -> None:
    world = Admitting(WORKER_LABEL)
    for _ in range(2):
        with pytest.raises(Refused, match="removed its label"):
            await world.pool.create(job(), 0, JobStatus())
    assert len(world.deleted) == 2


@pytest.mark.parametrize("orphan", [True, False])
async def test_pods_of_a_deleted_job_are_deleted_unless_they_are_orphans(orphan: bool) -> None:
    world, kept = Admitting(), job()
    await world.pool.create(kept, 0, JobStatus())
    assert world.there is not None
    if orphan:
        world.there = {**world.there, "metadata": {**world.there["metadata"], "ownerReferences": []}}
    metadata = kept.metadata.model_copy(update={"deletion_timestamp": "2026-01-01T00:00:00Z"})
    await world.pool.delete(kept.model_copy(update={"metadata": metadata}), "digits-w0", "uid-0")
    assert len(world.deleted) == (not orphan)


async def test_of_a_pod_that_is_gone_by_the_answer_to_its_deletion_nothing_is_kept() -> None:
    world = Admitting()
    await world.pool.create(job(), 0, JobStatus())
    assert world.there is not None
    metadata = {**world.there["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
    del metadata["resourceVersion"]
    world.answer = {**world.there, "kind": "Pod", "metadata": metadata}  # as where somebody else was quicker
    await world.pool.delete(job(), "digits-w0", "uid-0")
    assert world.pool.list(job()) == ()
    world.watched = [world.there]
    assert [worker.uid for worker in world.pool.list(job())] == ["uid-0"], "until the watch has shown its end"


def test_a_job_reserves_room_for_each_wanted_worker_that_still_lacks_it() -> None:
    counted, one = FreeAccelerators(), job()
    counted.note_node({"metadata": {"name": "a"}, "status": {"allocatable": {"nvidia.com/gpu": "8", "pods": "110"}}})
    reservations = Reservations(counted, [])
    world, asker = World(), World()
    world.pool = KubePool(world, world, "https://channel", world, reservations=reservations)
    asker.pool = KubePool(asker, asker, "https://channel", asker, reservations=reservations)
    labels = {JOB_LABEL: "digits", PLACEMENT_GROUP_LABEL: "0"}
    for index, node in enumerate(("a", None)):
        owner = {"uid": "job-uid", "controller": True}
        metadata = {
            "uid": f"uid-{index}",
            "name": f"digits-w{index}",
            "ownerReferences": [owner],
            "resourceVersion": "1",
        }
        spec = {"nodeName": node} if node else {}
        world.watched.append({"metadata": {**metadata, "labels": {**labels, WORKER_LABEL: str(index)}}, "spec": spec})
    other = make_job("other").stages(2).job()

    def unreserved() -> int:
        found = asker.pool.room(other).unreserved
        assert found is not None
        return found

    before = unreserved()
    world.pool.reserve_room(one, JobStatus(worker_ids=[0, 1, 2]))
    assert before - unreserved() == 2, "one of three has a node"
    ended = Condition(type=ConditionType.COMPLETE, status=ConditionStatus.TRUE, reason="", last_transition_time=NOW)
    world.pool.reserve_room(one, JobStatus(worker_ids=[0, 1, 2], conditions=[ended]))
    assert unreserved() == before, "it creates no worker any more"
    world.pool.reserve_room(one, JobStatus(worker_ids=[0]))
    assert unreserved() == before


async def test_replacements_fill_the_first_pipeline_first_whatever_order_the_watch_shows() -> None:
    assert await groups_of([4, 5], {2: "2-1", 0: "2-0"}) == ["2-0", "2-1"]
