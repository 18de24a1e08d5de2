"""What is done about Workloads where the operator does not use Kueue, or no longer."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pipetransformer_contract.api import JobStatus
from pipetransformer_contract.api.labels import JOB_LABEL, PRIORITY_CLASS_LABEL
from pipetransformer_contract.api.requests import APPLY_PATCH, JSON, MERGE_PATCH, Object
from pipetransformer_contract.api.status import QuotaRequest
from pipetransformer_operator.controller.ports import Conflict, Refused, Unavailable
from pipetransformer_operator.kube.client.api import NO_QUERY, Api, NotFound, Query
from pipetransformer_operator.kube.events import NO_LISTENER
from pipetransformer_operator.kube.workers.rendering import ANYWHERE
from pipetransformer_operator.kueue import quota
from pipetransformer_operator.kueue.quota import KueueQuota, NoKueue
from pipetransformer_operator.kueue.watch import Workloads
from pipetransformer_operator.kueue.workload import FINALIZER
from pipetransformer_operator.plan import Answer, Queue
from tests.testkit.operator.builders import make_job

pytestmark = pytest.mark.timeout(60)
KUEUES = "kueue.x-k8s.io/resource-in-use"


class FakeKueue(Api):
    """Workloads by namespace; what is raised instead of the first answers, None for an answer."""

    def __init__(self, workloads: dict[str, list[Object]], *raised: Exception | None) -> None:
        self.workloads = workloads
        self.raised = list(raised)
        self.patched: dict[str, list[str]] = {}

    async def list(
        self, path: str, query: Query = NO_QUERY, *, timeout: float = 0, accept: str = ""
    ) -> AsyncIterator[Object]:
        assert query == {"labelSelector": JOB_LABEL}
        self._raise()
        yield {"items": self.workloads[path.split("/")[5] if "namespaces" in path else ""]}

    async def request(self, method: str, path: str, body: Any = None, **_: Any) -> Object:
        assert method == "PATCH"
        self._raise()
        self.patched[body["metadata"]["uid"]] = body["metadata"]["finalizers"]
        return {}

    def _raise(self) -> None:
        if self.raised and (error := self.raised.pop(0)) is not None:
            raise error


def workload(uid: str, *finalizers: str) -> Object:
    names = {"name": uid, "namespace": "team-a", "uid": uid, "resourceVersion": "1"}
    return {"metadata": names | {"finalizers": list(finalizers)}}


@pytest.mark.parametrize("namespaces", [[], ["team-a", "team-b"]])
async def test_our_finalizer_alone_is_dropped(namespaces: list[str]) -> None:
    theirs, kept = workload("b", KUEUES), [workload("a", FINALIZER, KUEUES), workload("c", FINALIZER)]
    api = FakeKueue({"": [theirs, *kept], "team-a": [theirs, kept[0]], "team-b": [kept[1]]})
    await NoKueue(api, namespaces).run()
    assert api.patched == {"a": [KUEUES], "c": []}


@pytest.mark.parametrize("error", [NotFound("404"), Refused("403")], ids=["no Kueue", "no right"])
async def test_where_there_is_nothing_to_let_go_of_nothing_is_done(error: Exception) -> None:
    api = FakeKueue({"": [workload("a", FINALIZER)]}, error)
    await NoKueue(api, []).run()
    assert api.patched == {}


async def test_an_outage_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "ABANDONED_SECONDS", 0.0)
    api = FakeKueue({"": [workload("a", FINALIZER)]}, Unavailable("list"), None, Refused("a webhook"))
    await NoKueue(api, []).run()
    assert api.patched == {"a": []}


class Recorder(Api):
    """Takes whatever is made, and remembers it."""

    def __init__(self) -> None:
        self.made: list[Object] = []

    async def request(self, method: str, path: str, body: Any = None, **_: Any) -> Object:
        assert method == "POST"
        self.made.append(body)
        return {**body, "metadata": {**body["metadata"], "uid": body["metadata"]["name"], "resourceVersion": "1"}}


async def test_only_claims_have_the_priority_of_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workloads, "problem", lambda self, namespace: "")
    api = Recorder()
    asked = KueueQuota(api, [], NO_LISTENER)
    requests = [QuotaRequest(name=f"digits-q{n}", queue="team-a", workers=1, own=n == 1) for n in range(3)]
    await asked.apply(make_job().job(), JobStatus(quota_requests=requests))
    assert ["priority" in body["spec"] for body in api.made] == [False, False, True]


class Waiting(Api):
    """Keeps the Workloads of one job, none of which is admitted."""

    def __init__(self) -> None:
        self.kept: dict[str, Object] = {}
        self.versions = 0

    async def get(self, path: str, query: Query = NO_QUERY, *, timeout: float = 0, accept: str = "") -> Object:
        if path.endswith("/urgnet"):
            raise NotFound(path)
        return {"value": 1000}

    async def request(self, method: str, path: str, body: Any = None, **_: Any) -> Object:
        name = path.rpartition("/")[2]
        self.versions += 1
        if method == "POST":
            name = body["metadata"]["name"]
            known = {"uid": f"{name}-{self.versions}", "resourceVersion": str(self.versions)}
            self.kept[name] = {**body, "metadata": {**body["metadata"], **known}}
        elif method == "DELETE":
            return self.kept.pop(name)
        return self.kept.get(name, {})


async def test_a_waiting_job_is_asked_for_again_with_its_new_priority_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Workloads, "problem", lambda self, namespace: "")
    api = Waiting()
    asked = KueueQuota(api, [], NO_LISTENER)
    waiting = JobStatus(quota_requests=[QuotaRequest(name="digits-q0", queue="team-a", workers=1)])
    seen = []
    for name in ("", "urgent", "urgent", "research", ""):
        job = make_job().label(PRIORITY_CLASS_LABEL, name).job() if name else make_job().job()
        for _ in range(3):
            await asked.apply(job, waiting)
        made = api.kept["digits-q0"]
        seen.append((made["spec"].get("priorityClassRef", {}).get("name", ""), made["metadata"]["uid"]))
    assert [name for name, _ in seen] == ["", "urgent", "urgent", "research", ""]
    assert len({uid for _, uid in seen}) == 4, "and only then"


async def test_a_job_whose_new_priority_class_does_not_exist_keeps_its_place_in_the_queue_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Workloads, "problem", lambda self, namespace: "")
    api = Waiting()
    asked = KueueQuota(api, [], NO_LISTENER)
    waiting = JobStatus(quota_requests=[QuotaRequest(name="digits-q0", queue="team-a", workers=1)])
    await asked.apply(make_job().job(), waiting)
    place = api.kept["digits-q0"]["metadata"]["uid"]
    typo = make_job().label(PRIORITY_CLASS_LABEL, "urgnet").job().model_copy(update={"status": waiting})
    with pytest.raises(Refused):
        await asked.apply(typo, waiting)
    assert api.kept["digits-q0"]["metadata"]["uid"] == place
    words = f"metadata.labels[{PRIORITY_CLASS_LABEL}]: WorkloadPriorityClass urgnet does not exist"
    assert asked.observe(typo) == Queue("", {"digits-q0": Answer(False, words)})
    without = make_job().job().model_copy(update={"status": waiting})
    await asked.apply(without, waiting)
    assert asked.observe(without) == Queue("", {"digits-q0": Answer(False, "")})


async def test_a_claim_that_waits_keeps_its_place_although_claims_have_no_priority_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Workloads, "problem", lambda self, namespace: "")
    asked = KueueQuota(api := Waiting(), [], NO_LISTENER)
    job = make_job().label(PRIORITY_CLASS_LABEL, "urgent").job()
    starting = QuotaRequest(name="digits-q0", queue="team-a", workers=1, admitted=True)
    claim = QuotaRequest(name="digits-q1", queue="team-a", workers=1)
    for _ in range(3):
        await asked.apply(job, JobStatus(quota_requests=[starting, claim]))
    assert (list(api.kept), api.versions) == (["digits-q1"], 1)


class Flavors(Api):
    """Serves ResourceFlavors, and remembers which were read."""

    def __init__(self) -> None:
        self.read: list[str] = []

    async def get(self, path: str, query: Query = NO_QUERY, *, timeout: float = 0, accept: str = "") -> Object:
        name = path.rpartition("/")[2]
        self.read.append(name)
        return {"spec": {"nodeLabels": {"flavor": name}}}


def admitted(version: int, flavor: str, rack: str) -> Object:
    owner = {"controller": True, "uid": make_job().job().metadata.uid}
    metadata: Object = {"name": "digits-q0", "namespace": "default", "uid": "q0", "resourceVersion": str(version)}
    metadata |= {"labels": {JOB_LABEL: "digits"}, "ownerReferences": [owner]}
    checks = [{"podSetUpdates": [{"nodeSelector": {"rack": rack}}]}]
    assigned = [{"flavors": {"nvidia.com/gpu": flavor}}]
    return {"metadata": metadata, "status": {"admission": {"podSetAssignments": assigned}, "admissionChecks": checks}}


async def test_a_workload_that_is_admitted_again_places_its_pods_by_the_new_admission() -> None:
    api, job = Flavors(), make_job().job()
    asked = KueueQuota(api, [], NO_LISTENER)
    status = JobStatus(quota_requests=[QuotaRequest(name="digits-q0", queue="team-a", workers=1, worker_ids=[0])])
    places = []
    for version, (flavor, rack) in enumerate([("gold", "1"), ("gold", "2"), ("iron", "2")]):
        asked._seen.note(admitted(version, flavor, rack))
        places.append((await asked.assigned(job, 0, status)).node_selector)
    assert places == [
        {"flavor": flavor, "rack": rack} for flavor, rack in (("gold", "1"), ("gold", "2"), ("iron", "2"))
    ]
    assert api.read == ["gold", "iron"]


OWNER = make_job().job().metadata.uid
EVICTED: Object = {"type": "Evicted", "status": "True", "reason": "Preempted", "message": "for another"}
WAITS = QuotaRequest(name="digits-q0", queue="team-a", workers=2)
HOLDS = WAITS.model_copy(update={"admitted": True})
GONE = {"preconditions": {"uid": "q0"}}
#: In the answer to the deletion Kueue's own finalizer is gone, unlike in what the watch showed before.
DELETED: Object = {"uid": "q0", "namespace": "team-a", "resourceVersion": "7", "finalizers": [FINALIZER, "a/b"]}
FREED = {"metadata": {"uid": "q0", "resourceVersion": "7", "finalizers": ["a/b"]}}


class Written(Api):
    """Remembers method, end of the path, content type and body of each write. The object is gone if `missing`."""

    def __init__(self, *, missing: bool = False) -> None:
        self.missing = missing
        self.writes: list[tuple[str, str, str, Object]] = []

    async def request(self, method: str, path: str, body: Any = None, *, content_type: str = JSON, **_: Any) -> Object:
        self.writes.append((method, path.partition("/workloads/")[2], content_type, body))
        if self.missing:
            raise NotFound(path)
        answer = admitted(2, "gold", "1")
        if method == "DELETE":
            answer["metadata"] |= DELETED
        return {"kind": "Workload"} | answer


@pytest.mark.parametrize(
    ("requests", "metadata", "conditions", "writes"),
    [
        ([WAITS], {}, [], []),
        ([WAITS], {"deletionTimestamp": "2026-01-01T00:00:00Z"}, [EVICTED], []),
        ([HOLDS], {}, [EVICTED], []),
        ([WAITS], {}, [EVICTED], [("PATCH", "digits-q0/status", MERGE_PATCH, None)]),
        ([HOLDS.less(1)], {}, [], [("PATCH", "digits-q0/status", APPLY_PATCH, None)]),
        ([], {}, [], [("DELETE", "digits-q0", JSON, GONE), ("PATCH", "digits-q0", MERGE_PATCH, FREED)]),
        ([], {"ownerReferences": [{"controller": True, "uid": "another"}]}, [], []),
        ([HOLDS], {"ownerReferences": [{"controller": True, "uid": "another"}]}, [], []),
    ],
    ids=["waits", "ends", "leaves", "has left", "returns", "needs no more", "another job's", "vanished"],
)
async def test_what_is_written_to_a_workload_follows_from_it_and_the_status(
    requests: list[QuotaRequest],
    metadata: Object,
    conditions: list[Object],
    writes: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Workloads, "problem", lambda self, namespace: "")
    api, seen = Written(), admitted(1, "gold", "1")
    asked = KueueQuota(api, [], NO_LISTENER)
    seen["metadata"] |= {"finalizers": [KUEUES, FINALIZER], **metadata}
    seen["status"]["conditions"] = conditions
    asked._seen.note(seen | {"spec": {}})
    await asked.apply(make_job().job(), JobStatus(quota_requests=requests))
    assert [(*one, None if "status" in body else body) for *one, body in api.writes] == writes


async def test_a_workload_that_is_gone_when_its_quota_is_returned_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Workloads, "problem", lambda self, namespace: "")
    asked = KueueQuota(Written(missing=True), [], NO_LISTENER)
    asked._seen.note(admitted(1, "gold", "1") | {"spec": {}})
    with pytest.raises(Conflict):
        await asked.apply(make_job().job(), JobStatus(quota_requests=[HOLDS.less(1)]))
    await asked.apply(make_job().job(), JobStatus())
    assert not asked._mine(make_job().job())


async def test_a_workload_that_is_admitted_again_places_its_pods_by_what_its_flavor_says_now() -> None:
    api, job = Flavors(), make_job().job()
    asked = KueueQuota(api, [], NO_LISTENER)
    status = JobStatus(quota_requests=[HOLDS.model_copy(update={"worker_ids": [0, 1]})])
    for version, time in enumerate(["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"]):
        seen = admitted(version, "gold", "1")
        seen["status"]["conditions"] = [{"type": "QuotaReserved", "status": "True", "lastTransitionTime": time}]
        asked._seen.note(seen)
        for worker in (0, 1):
            await asked.assigned(job, worker, status)
    assert api.read == ["gold", "gold"]


async def test_a_name_that_another_owners_workload_has_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workloads, "problem", lambda self, namespace: "")
    job = make_job().job().model_copy(update={"status": JobStatus(quota_requests=[WAITS])})

    class Taken(Api):
        owner = "another"

        def __init__(self) -> None:
            pass

        async def get(self, path: str, query: Query = NO_QUERY, *, timeout: float = 0, accept: str = "") -> Object:
            assert path.endswith("/workloads/digits-q0")
            found = admitted(1, "gold", "1")
            found["metadata"]["ownerReferences"][0]["uid"] = self.owner
            return found | {"spec": {}}

        async def request(self, method: str, path: str, body: Any = None, **_: Any) -> Object:
            raise Conflict(path)

    asked = KueueQuota(api := Taken(), [], NO_LISTENER)
    words = "Workload digits-q0 exists and belongs to another owner"
    with pytest.raises(Refused, match=words):
        await asked.apply(job, job.status)
    assert asked.observe(job) == Queue("", {"digits-q0": Answer(False, words)})
    api.owner = job.metadata.uid  # an earlier request was made, although its answer did not arrive
    await asked.apply(job, job.status)
    assert list(asked._mine(job)) == ["digits-q0"]


async def test_pods_wait_until_it_is_known_which_nodes_their_quota_is_for() -> None:
    class Away(Flavors):
        error: Exception | None = None

        async def get(self, path: str, query: Query = NO_QUERY, *, timeout: float = 0, accept: str = "") -> Object:
            if self.error is not None:
                raise self.error
            return await super().get(path)

    asked, job = KueueQuota(api := Away(), [], NO_LISTENER), make_job().job()
    requests = [HOLDS.model_copy(update={"worker_ids": [0]}), WAITS.model_copy(update={"name": "digits-q1"})]
    status = JobStatus(quota_requests=requests)
    for seen in (None, admitted(1, "gold", "1") | {"status": {}}):
        if seen is not None:
            asked._seen.note(seen)
        with pytest.raises(Refused, match="cannot read Workload digits-q0 now"):
            await asked.assigned(job, 0, status)
    asked._seen.note(admitted(2, "gold", "1"))
    for api.error in (Unavailable("away"), NotFound("deleted")):
        with pytest.raises(Refused, match="ResourceFlavors of Workload digits-q0"):
            await asked.assigned(job, 0, status)
    api.error = None
    known = await asked.assigned(job, 0, status)
    api.error = Unavailable("away")
    assert await asked.assigned(job, 0, status) == known
    assert await asked.assigned(job, 1, status) == ANYWHERE


class Ending(Api):
    """Lists one pod of a job in each part of the list. The job has this metadata, or is gone if that is empty."""

    def __init__(self, job: Object, *phases: str, owner: str = OWNER) -> None:
        self.job, self.phases, self.owner = job, phases, owner
        self.looked = self.parts = 0
        self.released: list[str] = []

    async def get(self, path: str, query: Query = NO_QUERY, *, timeout: float = 0, accept: str = "") -> Object:
        if path.endswith("/digits"):
            self.looked += 1
            if not self.job:
                raise NotFound(path)
            return {"metadata": self.job}
        assert "limit" in query, "a job has thousands of pods, and this looks every second"
        part = int(query.get("continue", 0))
        self.parts += 1
        more = {"continue": str(part + 1)} if part + 1 < len(self.phases) else {}
        owner = {"controller": True, "uid": self.owner}
        pod = {"metadata": {"ownerReferences": [owner]}, "status": {"phase": self.phases[part]}}
        return {"metadata": more, "items": [pod]}

    async def request(self, method: str, path: str, body: Any = None, **_: Any) -> Object:
        self.released.append(method)
        return {}


LIVES: Object = {"uid": OWNER}
ENDS: Object = {"uid": OWNER, "deletionTimestamp": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("api", "parts", "released"),
    [
        (Ending({}, "Running", "Running", "Running"), 1, []),
        (Ending({}, "Succeeded", "Running", "Failed"), 2, []),
        (Ending({}, "Succeeded", "Failed", "Succeeded"), 3, ["PATCH"]),
        (Ending({}, "Running", owner="another"), 1, ["PATCH"]),
        (Ending(LIVES, "Succeeded"), 0, []),
        (Ending(ENDS, "Running"), 1, []),
        (Ending(ENDS, "Succeeded"), 1, ["PATCH"]),
        (Ending({"uid": "another"}, "Succeeded"), 1, ["PATCH"]),
    ],
    ids=["runs", "the second runs", "ended", "another job's", "lives", "ends", "ends without", "created again"],
)
async def test_a_deleted_workload_keeps_its_quota_while_its_job_or_a_pod_of_it_lives(
    api: Ending, parts: int, released: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "LOOK_SECONDS", 0.0)
    asked = KueueQuota(api, [], NO_LISTENER)
    ending = admitted(1, "gold", "1")
    ending["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [FINALIZER]}
    asked._seen.note(ending)
    looks = asyncio.create_task(asked._release_orphans())
    while not api.looked and not looks.done():  # noqa: ASYNC110 - each turn of the loop counts
        await asyncio.sleep(0)
    looks.cancel()
    await asyncio.gather(looks, return_exceptions=True)
    assert (api.parts, api.released) == (parts, released)


@pytest.mark.parametrize("error", [Conflict("it changed"), Unavailable("away")], ids=["changed", "away"])
async def test_a_workload_that_cannot_be_released_now_is_released_later(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "LOOK_SECONDS", 0.0)

    class Troubled(Ending):
        async def request(self, method: str, path: str, body: Any = None, **_: Any) -> Object:
            self.released.append(method)
            if len(self.released) == 1:
                raise error
            return {}

    asked = KueueQuota(api := Troubled({}, "Succeeded"), [], NO_LISTENER)
    ending = admitted(1, "gold", "1")
    ending["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [FINALIZER]}
    asked._seen.note(ending)
    looks = asyncio.create_task(asked._release_orphans())
    while asked._seen.all() and not looks.done():  # noqa: ASYNC110 - each turn of the loop counts
        await asyncio.sleep(0)
    looks.cancel()
    await asyncio.gather(looks, return_exceptions=True)
    assert api.released == ["PATCH", "PATCH"]


async def test_that_a_workload_cannot_be_released_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quota, "LOOK_SECONDS", 0.0)

    class Away(Ending):
        async def request(self, method: str, path: str, body: Any = None, **_: Any) -> Object:
            self.released.append(method)
            raise Unavailable("Kueue is away")

    asked = KueueQuota(api := Away({}, "Succeeded"), [], NO_LISTENER)
    ending = admitted(1, "gold", "1")
    ending["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [FINALIZER]}
    asked._seen.note(ending)
    looks = asyncio.create_task(asked._release_orphans())
    while len(api.released) < 5 and not looks.done():  # noqa: ASYNC110 - each turn of the loop counts
        await asyncio.sleep(0)
    looks.cancel()
    await asyncio.gather(looks, return_exceptions=True)
    assert [one.message for one in caplog.records] == ["cannot release Workload digits-q0 now: Kueue is away"]
