"""Pods of others that find no node: what the API server shows of them is enough for a job to give way."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pipetransformer_contract.api.requests import MERGE_PATCH, Object
from pipetransformer_operator.kube.client.api import Api
from tests.testkit.cluster.installing import as_service_account, install
from tests.testkit.operator.charts import render
from tests.testkit.operator.fake_kubelet import FakeKubelet
from tests.testkit.operator.jobs import packing_job
from tests.testkit.operator.namespace import Namespace, new_namespace
from tests.testkit.operator.operating import Operator

pytestmark = pytest.mark.timeout(180)
GPU = "nvidia.com/gpu"


@pytest.fixture
async def releasing(api: Api, kubeconfig: Path, namespace: Namespace, tmp_path: Path) -> AsyncIterator[Operator]:
    """An operator that the chart told to release workers for others, with the rights that the chart gives it."""
    release = f"y{namespace.name.removeprefix('test-')}"
    documents = render(release, **{"releaseForOthers.enabled": "true"})
    await install(api, documents)
    (deployment,) = (document for document in documents if document["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    rights = await as_service_account(api, kubeconfig, f"{release}-pipetransformer", tmp_path)
    operator = Operator(rights, tmp_path / "operator.log")
    operator.environment |= {
        name: given[name] for name in given if "PRIORITY_CLASS" in name or "RELEASE_FOR_OTHERS" in name
    }
    await operator.start()
    yield operator
    await operator.kill()
    written = operator.log.read_text()
    print(written)
    assert "forbidden" not in written.lower()


async def waiting_pod(namespace: Namespace) -> None:
    """A pod of higher priority in a namespace of somebody else's, and what a scheduler says of it."""
    priority = {"metadata": {"name": f"urgent-{namespace.name}"}, "value": 1000}
    await namespace.api.request("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", priority)
    container: Object = {"name": "main", "image": "x", "resources": {"limits": {GPU: "1"}}}
    spec = {"containers": [container], "priorityClassName": priority["metadata"]["name"]}  # type: ignore[index]
    await namespace.api.request("POST", f"{namespace.core}/pods", {"metadata": {"name": "urgent"}, "spec": spec})
    message = f"0/2 nodes are available: 2 Insufficient {GPU}."
    said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    path = f"{namespace.core}/pods/urgent/status"
    await namespace.api.request("PATCH", path, {"status": {"conditions": [said]}}, content_type=MERGE_PATCH)


async def give_room(api: Api, node: str) -> None:
    """The node is ready and has two accelerators, for the workers of the job."""
    resources = {GPU: "2", "cpu": "8", "memory": "8Gi", "pods": "10"}
    status = {"allocatable": resources, "conditions": [{"type": "Ready", "status": "True"}]}
    await api.request("PATCH", f"/api/v1/nodes/{node}/status", {"status": status}, content_type=MERGE_PATCH)
    # Admission taints a new node until a controller finds it ready, and that controller does not run here.
    await api.request("PATCH", f"/api/v1/nodes/{node}", {"spec": {"taints": None}}, content_type=MERGE_PATCH)


@pytest.mark.slow  # the pod has to wait for a while, and jobs are looked at every ten seconds
async def test_a_claimed_worker_goes_when_a_pod_of_higher_priority_wants_its_accelerator(
    api: Api, namespace: Namespace, releasing: Operator, kubelet: FakeKubelet, node: str, tmp_path: Path
) -> None:
    await give_room(api, node)
    container = {"name": "trainer", "image": "trainer", "resources": {"limits": {GPU: "1"}}}
    job = packing_job().stages(1).workers(1, most=2).set("elasticPolicy.maxPipelines", 2)
    await namespace.apply(job.set("acceleratorResource", GPU).set("podTemplate", {"spec": {"containers": [container]}}))
    assert await namespace.layout(2) == (1, 2)
    for name in ("digits-w0", "digits-w1"):
        await namespace.bind(name, node)
    others = await new_namespace(api, tmp_path / "others")
    await waiting_pod(others)

    assert await namespace.layout(3) == (1, 1)

    status = await namespace.status()
    assert status["generation"]["reason"] == "Release"
    assert [member["name"] for member in status["generation"]["members"]] == ["digits-w0"]
    await namespace.told("ShareChanged")
    await others.clear()
    namespace.advance(30)
    assert (await namespace.state("Complete")).get("failures", 0) == 0
