"""Gangs on real schedulers that know them (that of Kubernetes 1.37, and Volcano), with fake nodes and workers that only
speak."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipetransformer_contract.api import GROUP, PLURAL, VERSION
from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_contract.api.requests import MERGE_PATCH, Object
from tests.testkit.cluster import installing
from tests.testkit.cluster.api_server import ApiServer, api_server
from tests.testkit.operator.charts import render
from tests.testkit.operator.scale.cluster import OperatorProcess, control_plane, install, make_namespaces
from tests.testkit.operator.scale.living import LivingJobs
from tests.testkit.operator.scale.nodes import GPU
from tests.testkit.operator.scale.run import STAGES, manifest
from tools.devcluster import gobuild, volcano

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # it builds another Kubernetes, once
TEAM = "team"
PODS = f"/api/v1/namespaces/{TEAM}/pods"
SECONDS = 120.0


@dataclass(frozen=True)
class Scheduler:
    """A scheduler that knows gangs.

    Attributes:
        value: of the chart's `gangScheduling`.
        kubernetes: the version of the cluster.
        api: group and version of its `PodGroup`.
        size: of a group, from its spec.
    """

    value: str
    kubernetes: str
    api: str
    size: Callable[[Object], int]

    @property
    def groups(self) -> str:
        return f"/apis/{self.api}/namespaces/{TEAM}/podgroups"


KUBERNETES = Scheduler(
    "PodGroup",
    gobuild.KUBERNETES_WITH_GANGS,
    "scheduling.k8s.io/v1beta1",
    lambda spec: spec["schedulingPolicy"]["gang"]["minCount"],
)
VOLCANO = Scheduler("Volcano", gobuild.KUBERNETES, "scheduling.volcano.sh/v1beta1", lambda spec: spec["minMember"])


@dataclass
class Gangs:
    """A cluster of fake nodes with the operator as the chart installs it with `gangScheduling`.

    Attributes:
        scheduler: binds the pods.
        jobs: those of the test.
        log: the operator's.
        news: what happened to pods and groups, in the API server's order: the event's type and the object.
        tasks: run as long as the cluster.
    """

    scheduler: Scheduler
    api: ApiServer
    jobs: LivingJobs
    log: Path
    news: list[tuple[str, Object]] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def follow(self, path: str) -> None:
        """Notes what happens there, until it is cancelled."""
        listed = await self.api.send("GET", path)
        async for event in self.api.events(path, listed["metadata"]["resourceVersion"]):
            self.news.append((event["type"], event["object"]))

    async def status(self, name: str) -> Object:
        job = await self.api.send("GET", f"/apis/{GROUP}/{VERSION}/namespaces/{TEAM}/{PLURAL}/{name}")
        found: Object = job.get("status", {})
        return found

    async def bound(self) -> dict[str, list[str]]:
        """Names of pods that have a node, by job."""
        found: dict[str, list[str]] = {}
        for pod in (await self.api.send("GET", PODS))["items"]:
            if pod["spec"].get("nodeName") and JOB_LABEL in pod["metadata"].get("labels", {}):
                found.setdefault(pod["metadata"]["labels"][JOB_LABEL], []).append(pod["metadata"]["name"])
        return found

    async def sizes(self) -> dict[str, int]:
        """How many pods each group needs together."""
        groups = (await self.api.send("GET", self.scheduler.groups))["items"]
        return {group["metadata"]["name"]: self.scheduler.size(group["spec"]) for group in groups}

    async def until(self, what: str, holds: Callable[[], Awaitable[bool]]) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                while not await holds():
                    for task in (*self.tasks, *self.jobs.tasks.values()):
                        if task.done() and not task.cancelled():
                            task.result()
                    await asyncio.sleep(0.2)
        except TimeoutError:
            pytest.fail(f"not within {SECONDS:g} s: {what}\n{await self.state()}\n{self.log.read_text()[-3000:]}")

    async def state(self) -> str:
        """What jobs and pods say of themselves, for a test that fails."""
        jobs = (await self.api.send("GET", f"/apis/{GROUP}/{VERSION}/namespaces/{TEAM}/{PLURAL}"))["items"]
        pods = (await self.api.send("GET", PODS))["items"]
        said = []
        for kind, found in (("job", jobs), ("pod", pods)):
            for one in found:
                ends = one["metadata"].get("deletionTimestamp", "")
                said += [
                    f"{kind} {one['metadata']['name']} {ends}: {condition['type']} {condition['status']}"
                    f" {condition.get('reason')} {condition.get('message')}"
                    for condition in one.get("status", {}).get("conditions", [])
                ]
        return "\n".join([*said, f"groups: {await self.sizes()}"])

    async def trains(self, name: str, workers: int) -> bool:
        """Whether that many workers are members of the job's present layout."""
        published = (await self.status(name)).get("generation") or {}
        return len(published.get("members", [])) == workers


@pytest.fixture(params=[KUBERNETES, VOLCANO], ids=lambda scheduler: scheduler.value)
def scheduler(request: pytest.FixtureRequest) -> Scheduler:
    found: Scheduler = request.param
    return found


@pytest.fixture
async def gangs(tmp_path: Path, scheduler: Scheduler, nodes: int) -> AsyncIterator[Gangs]:
    log = tmp_path / "operator.log"
    async with control_plane(scheduler.kubernetes) as layout, api_server(layout.kubeconfig) as api:
        if scheduler is VOLCANO:
            await asyncio.to_thread(volcano.start, layout)
        await install(api)
        await make_namespaces(api, [TEAM])
        documents = render("gangs", gangScheduling=f'"{scheduler.value}"')
        (deployment,) = (document for document in documents if document["kind"] == "Deployment")
        await installing.install(api, [document for document in documents if document is not deployment])
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
        told = {name: given[name] for name in given if "PRIORITY_CLASS" in name or "GANG" in name}
        rights = await installing.as_service_account(api, layout.kubeconfig, "gangs-pipetransformer", tmp_path)
        async with OperatorProcess(layout, log, KUBECONFIG=str(rights), **told) as operator:
            jobs = await LivingJobs.of(operator, api, STAGES)
            await jobs.nodes.create(nodes)
            made = Gangs(scheduler, api, jobs, log)
            for one in (jobs.nodes.run(), made.follow(PODS), made.follow(scheduler.groups)):
                made.tasks.append(asyncio.create_task(one))
            yield made
            for task in made.tasks:
                task.cancel()
            await asyncio.wait(made.tasks)
        assert "forbidden" not in log.read_text().lower()


def job(name: str, **policy: Any) -> Object:
    """A job of eight workers."""
    made = manifest(name, release=True)
    made["spec"]["elasticPolicy"] |= policy
    return made


@pytest.mark.parametrize("nodes", [1])
async def test_two_jobs_on_room_for_one_never_hold_half_of_it_each(gangs: Gangs) -> None:
    first, second = await asyncio.gather(*(gangs.jobs.submit(TEAM, job(name)) for name in ("one", "two")))

    async def trains() -> bool:
        return bool(first.confirmed or second.confirmed)

    await gangs.until("one of them trains", trains)
    ahead, behind = ("one", "two") if first.confirmed else ("two", "one")
    assert {name: len(pods) for name, pods in (await gangs.bound()).items()} == {ahead: STAGES}
    await gangs.api.send("DELETE", f"/apis/{GROUP}/{VERSION}/namespaces/{TEAM}/{PLURAL}/{ahead}")
    await gangs.until("the other one trains", lambda: gangs.trains(behind, STAGES))

    holders: dict[str, set[str]] = {}
    for kind, pod in gangs.news:
        if pod["kind"] != "Pod":
            continue
        held = holders.setdefault(pod["metadata"]["labels"][JOB_LABEL], set())
        if kind == "DELETED":
            held.discard(pod["metadata"]["uid"])
        elif pod["spec"].get("nodeName"):
            held.add(pod["metadata"]["uid"])
        assert min(map(len, holders.values()), default=0) == 0 or len(holders) == 1, "both hold GPUs"
    assert set(holders) == {"one", "two"}


@pytest.mark.parametrize("nodes", [2])
async def test_a_claimed_pipeline_gets_all_of_its_gpus_or_none(gangs: Gangs) -> None:
    container = {"name": "main", "image": "x", "resources": {"limits": {GPU: "4"}}}
    other = {"metadata": {"name": "other"}, "spec": {"containers": [container]}}
    await gangs.api.send("POST", PODS, other)
    await gangs.jobs.submit(TEAM, job("wide", maxWorkers=2 * STAGES, onPack="Widen", claimFrom="Autoscaler"))
    await gangs.until("the job trains", lambda: gangs.trains("wide", STAGES))

    async def claims() -> bool:
        claimed = {name: size for name, size in (await gangs.sizes()).items() if name.endswith("-claimed")}
        pods = (await gangs.api.send("GET", PODS))["items"]
        refused = [
            pod
            for pod in pods
            for one in pod["status"].get("conditions", [])
            if (one["type"], one["status"]) == ("PodScheduled", "False")
        ]
        return claimed == {f"wide-{STAGES}-1-claimed": STAGES} and len(refused) == STAGES

    await gangs.until("the scheduler looked at a claimed pipeline, and has no nodes for it", claims)
    assert {name: len(pods) for name, pods in (await gangs.bound()).items()} == {"wide": STAGES}
    assert (await gangs.sizes())["wide-start"] == STAGES
    await gangs.api.send("DELETE", f"{PODS}/other")
    await gangs.until("the job trains with the claimed pipeline", lambda: gangs.trains("wide", 2 * STAGES))


@pytest.mark.parametrize("nodes", [1])
async def test_a_group_needs_fewer_pods_before_the_released_ones_go(gangs: Gangs) -> None:
    made = await gangs.jobs.submit(TEAM, job("packs"))

    async def trains() -> bool:
        return made.confirmed == 1

    await gangs.until("the job trains", trains)
    made.freeze(made.report().num_layers // 2)

    async def released() -> bool:
        return len((await gangs.bound())["packs"]) == STAGES // 2

    await gangs.until("half of the pods are gone", released)
    assert await gangs.sizes() == {"packs-start": STAGES // 2}
    lowered = next(
        int(one["metadata"]["resourceVersion"])
        for _, one in gangs.news
        if one["kind"] == "PodGroup" and gangs.scheduler.size(one["spec"]) == STAGES // 2
    )
    ended = min(
        int(one["metadata"]["resourceVersion"]) for _, one in gangs.news if "deletionTimestamp" in one["metadata"]
    )
    assert lowered < ended


@pytest.mark.parametrize(("scheduler", "nodes"), [(VOLCANO, 1)], indirect=["scheduler"])
async def test_a_job_keeps_to_the_limit_of_its_queue_of_volcano(gangs: Gangs) -> None:
    queues = f"/apis/{gangs.scheduler.api}/queues"
    queue = {"kind": "Queue", "apiVersion": gangs.scheduler.api, "metadata": {"name": TEAM}, "spec": _limit(STAGES - 1)}
    await gangs.api.send("POST", queues, queue)
    queued = job("queued")
    queued["spec"]["podTemplate"]["metadata"] = {"annotations": {"scheduling.volcano.sh/queue-name": TEAM}}
    await gangs.jobs.submit(TEAM, queued)

    async def held_back() -> bool:
        pods = (await gangs.api.send("GET", PODS))["items"]
        refused = [one for pod in pods for one in pod["status"].get("conditions", []) if one["type"] == "PodScheduled"]
        return len(refused) == STAGES and {one["status"] for one in refused} == {"False"}

    await gangs.until("Volcano looked at all pods, and the queue has no room", held_back)
    await gangs.api.send("PATCH", f"{queues}/{TEAM}", {"spec": _limit(STAGES)}, content_type=MERGE_PATCH)
    await gangs.until("the job trains", lambda: gangs.trains("queued", STAGES))


def _limit(gpus: int) -> Object:
    return {"weight": 1, "capability": {GPU: str(gpus)}}
