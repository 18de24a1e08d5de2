"""Quota through the real Kueue, a process beside the API server: who waits, who runs, and when quota changes hands."""

from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from pipetransformer_contract.api.labels import JOB_LABEL, PRIORITY_CLASS_LABEL, QUEUE_LABEL
from pipetransformer_contract.api.requests import MERGE_PATCH, Object
from pipetransformer_operator.kube.client.api import Api, NotFound
from pipetransformer_operator.kueue.workload import API, FINALIZER
from tests.testkit.cluster.installing import as_service_account, install
from tests.testkit.operator.builders import JobBuilder
from tests.testkit.operator.charts import render
from tests.testkit.operator.fake_kubelet import FakeKubelet
from tests.testkit.operator.jobs import packing_job
from tests.testkit.operator.namespace import Namespace, until
from tests.testkit.operator.operating import Operator
from tools.devcluster import kueue
from tools.devcluster.layout import Layout

pytestmark = pytest.mark.timeout(240)
GPU = "nvidia.com/gpu"
QUEUE = "team-a"
HELD = "tests/held"
EXAMPLES = Path(__file__).parents[2] / "examples/kueue"
PLURALS = {
    "ResourceFlavor": "resourceflavors",
    "ClusterQueue": "clusterqueues",
    "LocalQueue": "localqueues",
    "WorkloadPriorityClass": "workloadpriorityclasses",
}
SILENT = {"key": "gpus", "operator": "Exists"}


@pytest.fixture(scope="session")
def layout(kubeconfig: Path) -> Iterator[Layout]:
    """The control plane with Kueue beside it."""
    port = int(kubeconfig.parent.name.rpartition("-")[2])
    layout = Layout(name=kubeconfig.parent.name, port=port)
    kueue.start(layout)
    yield layout
    kueue.stop(layout)


class Queue:
    """A LocalQueue of the test's namespace, on a ClusterQueue and a flavor of its own."""

    def __init__(self, namespace: Namespace, gpus: int) -> None:
        self.namespace = namespace
        self.gpus = gpus

    async def make(self) -> None:
        name, api = self.namespace.name, self.namespace.api
        nodes = {"nodeLabels": {"pool": "gold"}, "tolerations": [SILENT]}
        await self._make("resourceflavors", {"metadata": {"name": name}, "spec": nodes})
        quota = {"name": name, "resources": [{"name": GPU, "nominalQuota": self.gpus}]}
        spec = {
            "namespaceSelector": {},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": [{"coveredResources": [GPU], "flavors": [quota]}],
        }
        await self._make("clusterqueues", {"metadata": {"name": name}, "spec": spec})
        body = {"apiVersion": API, "kind": "LocalQueue", "metadata": {"name": QUEUE}, "spec": {"clusterQueue": name}}
        await api.request("POST", f"/apis/{API}/namespaces/{name}/localqueues", body)

    async def _make(self, plural: str, body: Object) -> None:
        kind = {"resourceflavors": "ResourceFlavor", "clusterqueues": "ClusterQueue"}[plural]
        await self.namespace.api.request("POST", f"/apis/{API}/{plural}", {"apiVersion": API, "kind": kind, **body})

    async def workloads(self, job: str = "digits") -> dict[str, Object]:
        """The job's Workloads by name."""
        listed = await self.namespace.api.get(f"/apis/{API}/namespaces/{self.namespace.name}/workloads")
        mine = (one for one in listed["items"] if one["metadata"]["labels"]["training.pipetransformer.io/job"] == job)
        return {one["metadata"]["name"]: one for one in mine}

    async def used(self) -> int:
        """GPUs of the ClusterQueue that somebody holds, as Kueue counts them."""
        queue = await self.namespace.api.get(f"/apis/{API}/clusterqueues/{self.namespace.name}")
        usage = queue.get("status", {}).get("flavorsReservation", [])
        return sum(int(one["total"]) for flavor in usage for one in flavor["resources"])

    async def uses(self, gpus: int) -> None:
        """Waits until so many are held."""

        async def so_many() -> bool:
            return await self.used() == gpus

        await until(f"{gpus} GPUs are held", so_many)


@pytest.fixture
async def queue(namespace: Namespace, layout: Layout) -> Queue:
    """A queue for four GPUs."""
    own = Queue(namespace, gpus=4)
    await own.make()
    return own


@pytest.fixture
async def asking(api: Api, namespace: Namespace, kubeconfig: Path, tmp_path: Path) -> AsyncIterator[Operator]:
    """An operator that uses Kueue, with the rights of the chart alone."""
    release = f"r{namespace.name.removeprefix('test-')}"
    await install(api, render(release, **{"kueue.enabled": "true", "namespaces": f'["{namespace.name}"]'}))
    rights = await as_service_account(api, kubeconfig, f"{release}-pipetransformer", tmp_path)
    running = Operator(rights, tmp_path / "operator.log", namespace=namespace.name)
    running.environment["PIPETRANSFORMER_KUEUE"] = "true"
    await running.start()
    yield running
    await running.kill()
    written = (tmp_path / "operator.log").read_text()
    print(written)
    assert "forbidden" not in written.lower()


def queued(job: JobBuilder) -> JobBuilder:
    """The job, in the queue, with a GPU a worker."""
    trainer = {"name": "trainer", "image": "trainer", "resources": {"limits": {GPU: 1}}}
    pods = {"spec": {"containers": [trainer]}}
    return job.label(QUEUE_LABEL, QUEUE).checkpoint().set("acceleratorResource", GPU).set("podTemplate", pods)


async def admitted(namespace: Namespace, job: str) -> tuple[str, str]:
    """Status and reason of the job's condition Admitted."""
    conditions = (await namespace.status(job)).get("conditions", [])
    return next(((c["status"], c["reason"]) for c in conditions if c["type"] == "Admitted"), ("", ""))


async def waits(namespace: Namespace, job: str) -> None:
    """Returns once the queue said that the job has to wait."""

    async def told() -> bool:
        return await admitted(namespace, job) == ("False", "WaitingForQuota")

    await until(f"{job} waits", told)


async def test_the_examples_queue_admits_the_examples_job(
    asking: Operator, namespace: Namespace, layout: Layout
) -> None:
    for body in yaml.safe_load_all((EXAMPLES / "queue.yaml").read_text()):
        scope = f"namespaces/{namespace.name}/" if body["kind"] == "LocalQueue" else ""
        await namespace.api.request("POST", f"/apis/{API}/{scope}{PLURALS[body['kind']]}", body)
    job = yaml.safe_load((EXAMPLES / "job.yaml").read_text())
    await namespace.api.request("POST", namespace.jobs, job)

    async def reserved() -> bool:
        return await admitted(namespace, "queued") == ("True", "QuotaReserved")

    await until("the example's job has its quota", reserved)


async def hold(namespace: Namespace, names: set[str]) -> None:
    """Pods of these names stay, terminating, when they are deleted: as those of a slow container."""
    for name in names:
        body = {"metadata": {"finalizers": [HELD]}}
        await namespace.api.request("PATCH", f"{namespace.core}/pods/{name}", body, content_type=MERGE_PATCH)


async def let_go(namespace: Namespace) -> None:
    """What was held may end."""
    for name, pod in (await namespace.pods()).items():
        if pod["metadata"].get("finalizers"):
            body = {"metadata": {"finalizers": None}}
            await namespace.api.request("PATCH", f"{namespace.core}/pods/{name}", body, content_type=MERGE_PATCH)


async def terminating(namespace: Namespace) -> set[str]:
    """Names of pods that were deleted and are not gone."""
    return {name for name, pod in (await namespace.pods()).items() if "deletionTimestamp" in pod["metadata"]}


async def test_a_job_waits_for_quota_until_the_pods_that_another_released_are_gone(
    namespace: Namespace, queue: Queue, asking: Operator, kubelet: FakeKubelet
) -> None:
    await namespace.apply(queued(packing_job().release()))
    assert await namespace.layout(1) == (4, 1)
    await queue.uses(4)  # Kueue tells it some seconds late
    pod = (await namespace.pods())["digits-w0"]["spec"]
    assert pod["nodeSelector"] == {"pool": "gold"}
    assert SILENT in pod["tolerations"]
    await namespace.apply(queued(packing_job("other").stages(2).workers(2).release()))
    await waits(namespace, "other")
    assert (await namespace.status("other"))["state"] == "Pending"

    await hold(namespace, {"digits-w2", "digits-w3"})
    namespace.advance(15)
    assert await namespace.layout(2) == (2, 1)

    async def leaving() -> bool:
        return await terminating(namespace) == {"digits-w2", "digits-w3"}

    await until("two workers are terminating", leaving)
    assert await queue.used() == 4
    assert await admitted(namespace, "other") == ("False", "WaitingForQuota")
    await let_go(namespace)
    assert await namespace.layout(1, "other") == (2, 1)
    (workload,) = (await queue.workloads()).values()
    assert workload["status"]["reclaimablePods"] == [{"name": "workers", "count": 2}]

    namespace.advance(30)
    namespace.advance(30, "other")
    await namespace.state("Complete")
    await namespace.state("Complete", "other")
    await queue.uses(0)
    assert not await queue.workloads() and not await queue.workloads("other")


async def test_a_claimed_pipeline_gives_way_to_another_job_and_the_first_trains_on(
    namespace: Namespace, queue: Queue, asking: Operator, kubelet: FakeKubelet
) -> None:
    await namespace.apply(queued(packing_job().stages(2).workers(2, most=4)))
    assert await namespace.layout(2) == (2, 2)
    assert {name: one["spec"]["podSets"][0]["count"] for name, one in (await queue.workloads()).items()} == {
        "digits-q0": 2,
        "digits-q1": 2,
    }

    await namespace.apply(queued(packing_job("other").stages(2).workers(2)))
    assert await namespace.layout(1, "other") == (2, 1)
    assert await namespace.layout(3) == (2, 1)
    status = await namespace.status()
    assert {member["name"] for member in status["generation"]["members"]} == {"digits-w0", "digits-w1"}
    assert (status["state"], status.get("failures", 0)) == ("Running", 0)
    assert await admitted(namespace, "digits") == ("True", "QuotaReserved")
    assert "digits-q1" not in await queue.workloads()


async def test_a_job_whose_priority_class_is_raised_while_it_waits_takes_the_quota(
    namespace: Namespace, queue: Queue, asking: Operator, kubelet: FakeKubelet
) -> None:
    urgent = {"apiVersion": API, "kind": "WorkloadPriorityClass", "metadata": {"name": namespace.name}, "value": 1000}
    await namespace.api.request("POST", f"/apis/{API}/workloadpriorityclasses", urgent)
    await namespace.apply(queued(packing_job().release()))
    assert await namespace.layout(1) == (4, 1)
    other = queued(packing_job("other").stages(4).workers(4).release())
    await namespace.apply(other)
    await waits(namespace, "other")
    (made,) = (await until("the job has a Workload", partial(queue.workloads, "other"))).values()

    label = {"metadata": {"labels": {PRIORITY_CLASS_LABEL: namespace.name}}}
    await namespace.api.request("PATCH", f"{namespace.jobs}/other", label, content_type=MERGE_PATCH)
    assert await namespace.layout(1, "other") == (4, 1)
    (now,) = (await queue.workloads("other")).values()
    assert now["spec"]["priorityClassRef"]["name"] == namespace.name
    assert now["metadata"]["uid"] != made["metadata"]["uid"]


@pytest.mark.slow
async def test_a_job_that_is_preempted_itself_comes_back_in_the_size_of_its_checkpoint(
    namespace: Namespace, queue: Queue, asking: Operator, kubelet: FakeKubelet
) -> None:
    urgent = {"apiVersion": API, "kind": "WorkloadPriorityClass", "metadata": {"name": namespace.name}, "value": 1000}
    await namespace.api.request("POST", f"/apis/{API}/workloadpriorityclasses", urgent)
    await namespace.apply(queued(packing_job().release()))
    assert await namespace.layout(1) == (4, 1)
    namespace.advance(15)
    assert await namespace.layout(2) == (2, 1)
    await queue.uses(2)
    uid = (await queue.workloads())["digits-q0"]["metadata"]["uid"]

    other = queued(packing_job("other").stages(4).workers(4).release()).label(PRIORITY_CLASS_LABEL, namespace.name)
    await namespace.apply(other)
    assert await namespace.layout(1, "other") == (4, 1)
    status = await namespace.status()
    assert (status["state"], status.get("failures", 0)) == ("Pending", 0)
    assert "generation" not in status
    assert await admitted(namespace, "digits") == ("False", "WaitingForQuota")

    namespace.advance(30, "other")
    await namespace.state("Complete", "other")
    generation = status["layoutGeneration"] + 1
    assert await namespace.layout(generation) == (1, 1)
    assert (await queue.workloads())["digits-q0"]["metadata"]["uid"] == uid, "it kept its place"
    namespace.advance(30)
    await namespace.state("Complete")


@pytest.mark.slow
async def test_while_kueue_is_away_jobs_train_and_recover_and_others_wait_without_a_verdict(
    namespace: Namespace, queue: Queue, asking: Operator, kubelet: FakeKubelet, layout: Layout
) -> None:
    await namespace.apply(queued(packing_job().stages(2).workers(4, least=2)))
    assert await namespace.layout(1) == (2, 2)
    before = await admitted(namespace, "digits")
    kueue.daemon(layout).stop()
    try:
        await asking.kill()
        await asking.start()
        await namespace.apply(queued(packing_job("other").stages(2).workers(2)))

        async def unknown() -> bool:
            return await admitted(namespace, "other") == ("Unknown", "QueueUnavailable")

        await until("nothing is known of the other's queue", unknown)
        namespace.advance(15)
        await namespace.layout(2)
        status = await namespace.status()
        assert await admitted(namespace, "digits") == before
        assert len(status["generation"]["members"]) == 4
        assert len(await namespace.pods()) == 4
    finally:
        kueue.start(layout)
    await waits(namespace, "other")
    namespace.advance(30)
    await namespace.state("Complete")
    assert await namespace.layout(1, "other") == (2, 1)


@pytest.mark.slow
async def test_quota_of_a_deleted_job_is_held_until_its_pods_are_gone(
    namespace: Namespace, queue: Queue, asking: Operator, kubelet: FakeKubelet
) -> None:
    await namespace.apply(queued(packing_job()))
    assert await namespace.layout(1) == (4, 1)
    await hold(namespace, {"digits-w0"})
    await namespace.api.request("DELETE", f"{namespace.jobs}/digits", {})
    # No garbage collector runs here: this is what it does.
    folder = f"/apis/{API}/namespaces/{namespace.name}/workloads/digits-q0"
    await namespace.api.request("DELETE", folder, {})
    await namespace.api.request("DELETE", f"{namespace.core}/pods", {})
    workload = await namespace.api.get(folder)
    assert workload["metadata"]["finalizers"] == [FINALIZER]
    assert await terminating(namespace) == {"digits-w0"}
    await let_go(namespace)

    async def gone() -> bool:
        try:
            await namespace.api.get(folder)
        except NotFound:
            return True
        return False

    await until("the Workload is gone", gone)
    await queue.uses(0)


async def test_an_operator_without_kueue_tells_a_job_in_a_queue_why_it_waits(
    namespace: Namespace, operator: Operator
) -> None:
    await namespace.apply(queued(packing_job()))

    async def told() -> bool:
        return await admitted(namespace, "digits") == ("Unknown", "QueueUnavailable")

    await until("the job is told", told)
    assert not await namespace.pods()


async def test_an_operator_without_kueue_lets_go_of_the_workloads_of_one_that_used_it(
    namespace: Namespace, layout: Layout, operator: Operator
) -> None:
    await operator.kill()
    folder = f"/apis/{API}/namespaces/{namespace.name}/workloads"
    pods = {"spec": {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": "trainer"}]}}
    kept = {
        "apiVersion": API,
        "kind": "Workload",
        "metadata": {"name": "digits-q0", "labels": {JOB_LABEL: "digits"}, "finalizers": [FINALIZER]},
        "spec": {"queueName": QUEUE, "podSets": [{"name": "workers", "count": 1, "template": pods}]},
    }
    await namespace.api.request("POST", folder, kept)
    await namespace.api.request("DELETE", f"{folder}/digits-q0", {})
    assert (await namespace.api.get(f"{folder}/digits-q0"))["metadata"]["finalizers"] == [FINALIZER]
    await operator.start()

    async def gone() -> bool:
        return not (await namespace.api.get(folder))["items"]

    await until("the Workload is gone", gone)
