"""Which workers the scheduler has to give nodes together, and what the operator writes for that."""

from typing import Any

import pytest

from pipetransformer_contract.api import JobStatus, PipeTrainingJob
from pipetransformer_contract.api.labels import JOB_LABEL, MANAGED_BY, POD_GROUP_LABEL
from pipetransformer_contract.api.requests import MERGE_PATCH, Object
from pipetransformer_contract.messages import Generation, Member, ResizeReason
from pipetransformer_operator.controller.ports import Conflict, Invalid, JobKey, Refused
from pipetransformer_operator.kube.client.api import NO_QUERY, Api, NotFound, Query
from pipetransformer_operator.kube.workers.pod_groups import SCHEDULERS, PodGroups, Size
from pipetransformer_operator.kube.workers.pods import observable
from pipetransformer_operator.kube.workers.pool import KubePool
from pipetransformer_operator.kube.workers.rendering import PriorityClasses, owner_reference
from tests.testkit.operator.builders import make_job

KEY = JobKey("default", "digits")


class Cluster(Api):
    """An API server that keeps pods and groups, and shows the pods to the pool.

    Attributes:
        groups: by name.
        said: what was written, in its order: the method and the object's name, with the size of a group.
    """

    def __init__(self) -> None:
        self.pods: dict[str, Object] = {}
        self.groups: dict[str, Object] = {}
        self.said: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        self.pool = self.restarted()

    def restarted(self, scheduler: str = "PodGroup") -> KubePool:
        """The pool of an operator that remembers nothing."""
        self.folder = f"/apis/{SCHEDULERS[scheduler].api}/namespaces/default/podgroups"
        classes = PriorityClasses("base", "claimed")
        self.pool = KubePool(
            self, self, "https://channel", self, None, classes, pod_groups=PodGroups(self, SCHEDULERS[scheduler])
        )
        return self.pool

    def of(self, key: JobKey) -> list[Object]:
        return [observable(pod) for pod in self.pods.values()]

    def listed_version(self, namespace: str) -> int:
        return 0

    async def publish(self, namespace: str) -> None:
        """Workers trust this channel already."""

    async def get(self, path: str, query: Query = NO_QUERY, *, timeout: float = 0, accept: str = "") -> Object:
        if self.error is not None:
            raise self.error
        assert path == self.folder
        if name := query.get("fieldSelector", "").removeprefix("metadata.name="):
            return {"metadata": {}, "items": [self.groups[name]] if name in self.groups else []}
        assert query["labelSelector"] == f"{JOB_LABEL}=digits"
        found = [group for group in self.groups.values() if group["metadata"].get("labels", {}).get(JOB_LABEL)]
        return {"metadata": {}, "items": found}

    async def request(self, method: str, path: str, body: object = None, **options: object) -> Object:
        _, _, name = path.rpartition("/")
        if method == "DELETE":
            self.said.append((method, name))
            kept = self.groups if path == f"{self.folder}/{name}" else self.pods
            if name not in kept:
                raise NotFound(name)
            assert isinstance(body, dict)
            if body["preconditions"]["uid"] != kept[name]["metadata"]["uid"]:
                raise Conflict(name)
            return kept.pop(name)
        assert isinstance(body, dict)
        if method == "PATCH":
            assert (path, options) == (f"{self.folder}/{name}", {"content_type": MERGE_PATCH})
            if name not in self.groups:
                raise NotFound(name)
            if body["metadata"]["uid"] != self.groups[name]["metadata"]["uid"]:
                raise Invalid("metadata.uid: field is immutable")
            if "spec" not in body:
                self.groups[name]["metadata"].setdefault("labels", {}).update(body["metadata"]["labels"])
                self.said.append((method, name))
                return self.groups[name]
            self.groups[name]["spec"]["schedulingPolicy"] = body["spec"]["schedulingPolicy"]
            self.said.append((method, name, _size(self.groups[name])))
            return self.groups[name]
        name = body["metadata"]["name"]
        kept = self.groups if path == self.folder else self.pods
        if name in kept:
            raise Conflict(f"{name} exists")
        kept[name] = {**body, "status": {}}
        kept[name]["metadata"] |= {"uid": f"uid-{name}", "resourceVersion": "1"}
        self.said.append((method, name, _size(body)) if kept is self.groups else (method, name))
        return kept[name]

    async def make(self, wanted: JobStatus, new: list[int]) -> None:
        """What a turn of the job does."""
        await self.pool.prepare(job(), wanted, new)
        for number in new:
            await self.pool.create(job(), number, wanted)

    def give_nodes(self) -> None:
        """The scheduler binds all pods."""
        for pod in self.pods.values():
            pod["spec"]["nodeName"] = "node"

    def members(self) -> dict[str, list[str]]:
        """Pods of each group, as the scheduler sees it."""
        found: dict[str, list[str]] = {}
        for name, pod in self.pods.items():
            found.setdefault(pod["spec"]["schedulingGroup"]["podGroupName"], []).append(name)
        return found


def _size(group: Object) -> int:
    return int(group["spec"]["schedulingPolicy"]["gang"]["minCount"])


def job(uid: str = "job-uid") -> PipeTrainingJob:
    made = make_job().stages(2).workers(4, most=8).job()
    return made.model_copy(update={"metadata": made.metadata.model_copy(update={"uid": uid})})


def status(workers: int, **fields: Any) -> JobStatus:
    """A status that wants workers 0 to `workers` - 1."""
    return JobStatus(worker_ids=list(range(workers)), **fields)


def running(workers: int, **fields: Any) -> JobStatus:
    members = [Member(name=f"digits-w{number}", uid=f"uid-digits-w{number}", address="10.0.0.1:1") for number in (0, 1)]
    return status(
        workers,
        generation=Generation(
            job_uid="job-uid", layout_generation=1, stages=2, pipelines=1, members=members, leader="digits-w0",
            nonce="0" * 32, reason=ResizeReason.START,
        ),
        **fields,
    )  # fmt: skip


async def test_the_first_workers_are_one_group_that_exists_before_them() -> None:
    cluster = Cluster()
    await cluster.make(status(4), [0, 1, 2, 3])
    assert cluster.said == [("POST", "digits-start", 4), *(("POST", f"digits-w{number}") for number in range(4))]
    assert cluster.members() == {"digits-start": [f"digits-w{number}" for number in range(4)]}
    group = cluster.groups["digits-start"]
    assert group["spec"]["priorityClassName"] == cluster.pods["digits-w0"]["spec"]["priorityClassName"] == "base"
    assert (group["apiVersion"], group["kind"]) == ("scheduling.k8s.io/v1beta1", "PodGroup")
    assert group["metadata"]["ownerReferences"] == [owner_reference(job())]
    assert group["metadata"]["labels"] == {JOB_LABEL: "digits", **MANAGED_BY}, "the next operator lists by it"


async def test_an_operator_that_stops_within_a_start_leaves_no_second_group() -> None:
    cluster = Cluster()
    await cluster.pool.prepare(job(), status(4), [0, 1, 2, 3])
    await cluster.pool.create(job(), 0, status(4))
    cluster.restarted()
    await cluster.make(status(4), [1, 2, 3])
    assert [one for one in cluster.said if one[1] == "digits-start"] == [("POST", "digits-start", 4)]
    assert (_size(cluster.groups["digits-start"]), len(cluster.members()["digits-start"])) == (4, 4)


async def test_each_claimed_pipeline_is_a_group_with_the_priority_of_claims() -> None:
    cluster = Cluster()
    await cluster.make(status(4), [0, 1, 2, 3])
    cluster.give_nodes()
    await cluster.make(running(8, claimed_ids=[4, 5, 6, 7]), [4, 5, 6, 7])
    sizes = {name: _size(group) for name, group in cluster.groups.items()}
    assert sizes == {"digits-start": 4, "digits-2-2-claimed": 2, "digits-2-3-claimed": 2}
    assert cluster.members()["digits-2-2-claimed"] == ["digits-w4", "digits-w5"]
    assert cluster.groups["digits-2-3-claimed"]["spec"]["priorityClassName"] == "claimed"


async def test_a_group_needs_fewer_pods_before_some_are_released() -> None:
    cluster = Cluster()
    await cluster.make(status(4), [0, 1, 2, 3])
    cluster.give_nodes()
    cluster.said.clear()
    await cluster.make(running(4, leaving_ids=[2, 3]), [])
    assert cluster.said == [("PATCH", "digits-start", 2)]
    await cluster.make(running(4, leaving_ids=[2, 3]), [])
    assert len(cluster.said) == 1, "nothing changed"


async def test_a_replaced_worker_waits_for_no_worker_that_was_released() -> None:
    cluster = Cluster()
    await cluster.make(status(4), [0, 1, 2, 3])
    cluster.give_nodes()
    await cluster.make(JobStatus(worker_ids=[0, 1, 4], generation=running(2).generation), [4])
    group = cluster.pods["digits-w4"]["spec"]["schedulingGroup"]["podGroupName"]
    assert _size(cluster.groups[group]) == 1
    assert _size(cluster.groups["digits-start"]) == 2


async def test_groups_without_pods_are_deleted() -> None:
    cluster = Cluster()
    await cluster.make(status(4), [0, 1, 2, 3])
    cluster.give_nodes()
    await cluster.make(running(6, claimed_ids=[4, 5]), [4, 5])
    assert len(cluster.groups) == 2
    for number in (4, 5):
        await cluster.pool.delete(job(), f"digits-w{number}", f"uid-digits-w{number}")
    await cluster.make(running(4), [])
    assert list(cluster.groups) == ["digits-start"]
    await cluster.make(running(6, claimed_ids=[4, 5]), [4, 5])
    assert cluster.groups.keys() == cluster.members().keys(), "it is made again"


async def test_a_group_that_somebody_deleted_is_made_again_if_its_size_changes_and_not_missed_otherwise() -> None:
    cluster = Cluster()
    await cluster.make(status(4), [0, 1, 2, 3])
    cluster.give_nodes()
    await cluster.make(running(6, claimed_ids=[4, 5]), [4, 5])
    cluster.groups.clear()
    with pytest.raises(Conflict, match="PodGroup digits-start"):
        await cluster.make(running(4, leaving_ids=[2, 3]), [])
    await cluster.make(running(4, leaving_ids=[2, 3]), [])
    assert _size(cluster.groups["digits-start"]) == 2
    del cluster.pods["digits-w4"], cluster.pods["digits-w5"]
    cluster.groups.pop("digits-2-2-claimed")
    await cluster.make(running(4, leaving_ids=[2, 3]), [])
    assert list(cluster.groups) == ["digits-start"]


async def test_a_new_worker_finds_its_group_also_if_somebody_deleted_it() -> None:
    cluster = Cluster()
    await cluster.make(status(4), [0, 1, 2, 3])
    cluster.give_nodes()
    for number in (4, 5):  # a worker is replaced, and so is its replacement
        await cluster.make(JobStatus(worker_ids=[0, 1, number], generation=running(2).generation), [number])
        group = cluster.pods.pop(f"digits-w{number}")["spec"]["schedulingGroup"]["podGroupName"]
        assert _size(cluster.groups.pop(group)) == 1


async def test_a_new_job_of_the_same_name_looks_for_its_own_groups() -> None:
    cluster = Cluster()
    await cluster.make(status(4), [0, 1, 2, 3])
    cluster.pods.clear()
    with pytest.raises(Refused, match="PodGroup digits-start of a deleted job of the same name still exists"):
        await cluster.pool.prepare(job("another"), status(4), [0, 1, 2, 3])
    cluster.groups.clear()
    await cluster.pool.prepare(job("another"), status(4), [0, 1, 2, 3])
    assert list(cluster.groups) == ["digits-start"]


async def test_a_group_whose_label_another_client_removed_is_found_again() -> None:
    cluster = Cluster()
    await cluster.make(status(4), [0, 1, 2, 3])
    del cluster.groups["digits-start"]["metadata"]["labels"]
    cluster.restarted()
    with pytest.raises(Conflict, match="digits-start exists"):
        await cluster.make(status(4), [4])
    assert cluster.groups["digits-start"]["metadata"]["labels"] == {JOB_LABEL: "digits"}
    await cluster.make(status(4), [])
    assert cluster.said[-1] == ("PATCH", "digits-start")


async def test_a_group_that_is_deleted_while_it_is_labelled_again_is_a_conflict() -> None:
    class Deleted(Cluster):
        async def request(self, method: str, path: str, body: object = None, **options: object) -> Object:
            if method == "PATCH":
                raise NotFound(path)
            return await super().request(method, path, body, **options)

    cluster = Deleted()
    await cluster.make(status(4), [0, 1, 2, 3])
    del cluster.groups["digits-start"]["metadata"]["labels"]
    with pytest.raises(Conflict, match="digits-start exists"):
        await cluster.make(status(4), [4])


async def test_another_owners_new_group_of_the_name_is_not_resized() -> None:
    cluster = Cluster()
    await cluster.make(status(4), [0, 1, 2, 3])
    cluster.give_nodes()
    cluster.groups["digits-start"]["metadata"] |= {"uid": "another", "ownerReferences": []}
    with pytest.raises(Refused, match="PodGroup digits-start exists and belongs to another owner"):
        await cluster.make(running(4, leaving_ids=[2, 3]), [])
    assert _size(cluster.groups["digits-start"]) == 4


async def test_another_owners_new_group_of_the_name_is_not_deleted() -> None:
    cluster = Cluster()
    await cluster.make(status(1), [0])
    await cluster.pool.delete(job(), "digits-w0", "uid-digits-w0")
    cluster.groups["digits-start"]["metadata"] |= {"uid": "another", "ownerReferences": []}
    for _ in range(2):
        await cluster.make(status(0), [])
    assert list(cluster.groups) == ["digits-start"]
    assert cluster.said.count(("DELETE", "digits-start")) == 1, "it counts as gone"


async def test_an_invalid_group_is_told() -> None:
    class Invalidating(Cluster):
        async def request(self, method: str, path: str, body: object = None, **options: object) -> Object:
            raise Invalid("spec.priorityClassName: invalid")

    with pytest.raises(Invalid, match=r"spec\.priorityClassName: invalid"):
        await Invalidating().make(status(4), [0, 1, 2, 3])


async def test_of_a_job_that_is_deleted_while_its_workers_are_created_no_further_one_is() -> None:
    cluster = Cluster()
    await cluster.pool.prepare(job(), status(4), [0, 1, 2, 3])
    await cluster.pool.create(job(), 0, status(4))
    for _ in range(2):
        cluster.pool.on_job_gone(KEY)
    with pytest.raises(Conflict, match="digits was deleted while its workers were created"):
        await cluster.pool.create(job(), 1, status(4))
    assert list(cluster.pods) == ["digits-w0"]


async def test_a_group_of_another_owner_is_told_and_not_waited_for() -> None:
    """As one that an orphaned job left: it is there until somebody deletes it."""
    cluster = Cluster()
    await cluster.make(status(4), [0, 1, 2, 3])
    del cluster.groups["digits-start"]["metadata"]["ownerReferences"]
    with pytest.raises(Refused, match="PodGroup digits-start exists and belongs to another owner: delete or rename it"):
        await cluster.pool.prepare(job("another"), status(4), [0, 1, 2, 3])
    cluster.groups.clear()
    await cluster.pool.prepare(job("another"), status(4), [0, 1, 2, 3])
    assert list(cluster.groups) == ["digits-start"]


@pytest.mark.parametrize(
    ("scheduler", "needs"),
    [
        ("PodGroup", "Kubernetes 1.37 or newer, with the feature gate GenericWorkload and scheduling.k8s.io/v1beta1"),
        ("Volcano", "Volcano"),
    ],
)
async def test_a_cluster_without_groups_is_told_what_it_needs(scheduler: str, needs: str) -> None:
    cluster = Cluster()
    cluster.restarted(scheduler)
    cluster.error = NotFound("404")
    with pytest.raises(Refused, match=f"^gangScheduling: the cluster needs {needs}.*: 404$"):
        await cluster.pool.prepare(job(), status(4), [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("own", "scheduler"), [({}, "volcano"), ({"schedulerName": ""}, "volcano"), ({"schedulerName": "mine"}, "mine")]
)
async def test_volcano_reads_the_group_from_an_annotation(own: Object, scheduler: str) -> None:
    cluster = Cluster()
    cluster.restarted("Volcano")
    pod: Object = {"metadata": {"labels": {}, "annotations": {}}, "spec": own}
    PodGroups(cluster, SCHEDULERS["Volcano"]).join(pod, job(), "start")
    assert pod == {
        "metadata": {
            "labels": {POD_GROUP_LABEL: "start"},
            "annotations": {"scheduling.k8s.io/group-name": "digits-start"},
        },
        "spec": {"schedulerName": scheduler},
    }
    assert SCHEDULERS["Volcano"].count(3) == {"minMember": 3}


@pytest.mark.parametrize(
    ("annotations", "queue"), [({}, {}), ({"scheduling.volcano.sh/queue-name": "team"}, {"queue": "team"})]
)
def test_a_group_joins_the_queue_of_volcano_that_the_job_names(annotations: dict[str, str], queue: Object) -> None:
    spec = SCHEDULERS["Volcano"].spec(Size(3, "low"), annotations)
    assert spec == {"minMember": 3, "priorityClassName": "low", **queue}
    assert SCHEDULERS["Volcano"].spec(Size(3, ""), annotations) == {"minMember": 3, **queue}


async def test_workers_are_one_group_where_only_workers_that_leave_have_nodes() -> None:
    cluster = Cluster()
    await cluster.make(status(2), [0, 1])
    cluster.give_nodes()
    await cluster.make(JobStatus(worker_ids=[0, 1, *range(2, 6)], leaving_ids=[0, 1]), [2, 3, 4, 5])
    assert list(cluster.members()) == ["digits-start"]
    assert cluster.said[-5] == ("PATCH", "digits-start", 4)
