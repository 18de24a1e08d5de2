"""What users do to a job besides letting it train, against a real API server."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pipetransformer_contract.api.requests import MERGE_PATCH, Object
from pipetransformer_operator.controller.ports import Refused
from pipetransformer_operator.kube.client.api import NotFound
from tests.testkit.operator.fake_kubelet import FakeKubelet
from tests.testkit.operator.jobs import packing_job
from tests.testkit.operator.namespace import Namespace, until
from tests.testkit.operator.operating import Operator

pytestmark = pytest.mark.timeout(180)


async def test_a_suspended_job_gives_all_back_and_resumes_in_the_size_of_its_checkpoint(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    await namespace.apply(packing_job().release())
    assert await namespace.layout(1) == (4, 1)
    namespace.advance(15)
    assert await namespace.layout(2) == (2, 1)
    await namespace.patch("digits", {"suspend": True})
    await namespace.state("Suspended")

    async def gone() -> bool:
        return not await namespace.pods()

    await until("all workers are gone", gone)
    await namespace.patch("digits", {"suspend": False})
    assert await namespace.layout(3) == (1, 1), "its checkpoint fits one worker"
    namespace.advance(30)
    assert (await namespace.state("Complete")).get("failures", 0) == 0


# A trainer that ends before the operator deletes its pod leaves a pod that has ended, which `Running` keeps.
@pytest.mark.parametrize(("policy", "fewest"), [("None", 4), ("Running", 0)])
async def test_a_job_that_outlives_its_deadline_fails_and_holds_nothing(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet, policy: str, fewest: int
) -> None:
    await namespace.apply(packing_job().set("runPolicy", {"activeDeadlineSeconds": 2, "cleanPodPolicy": policy}))
    status = await namespace.state("Failed")
    failed = next(condition for condition in status["conditions"] if condition["type"] == "Failed")
    assert failed["reason"] == "DeadlineExceeded"
    assert "the job did not complete within 2 s" in failed["message"]

    async def settled() -> bool:
        phases = [pod["status"].get("phase") for pod in (await namespace.pods()).values()]
        held: int = (await namespace.status())["gpus"]["held"]
        return len(phases) >= fewest and set(phases) <= {"Succeeded"} and held == 0

    await until(f"at least {fewest} pods are left, and all have ended", settled)


@pytest.mark.parametrize(("policy", "left"), [("None", 2), ("Running", 2), ("All", 0)])
async def test_pods_that_have_ended_are_kept_or_not_as_the_job_says(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet, policy: str, left: int
) -> None:
    job = packing_job().stages(1).workers(2).set("elasticPolicy.maxPipelines", 2)
    await namespace.apply(job.set("runPolicy.cleanPodPolicy", policy))
    assert await namespace.layout(1) == (1, 2)
    namespace.advance(30)
    await namespace.state("Complete")

    async def settled() -> bool:
        phases = [pod["status"].get("phase") for pod in (await namespace.pods()).values()]
        held: int = (await namespace.status())["gpus"]["held"]
        return phases == ["Succeeded"] * left and held == 0

    await until(f"{left} pods are left, and have ended", settled)


async def test_the_scale_subresource_is_a_ceiling_in_pods(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    await namespace.apply(packing_job().stages(1).workers(2).set("elasticPolicy.maxPipelines", 4))
    assert await namespace.layout(1) == (1, 2)
    path = f"{namespace.jobs}/digits/scale"

    async def scaled() -> dict[str, Any] | None:
        """The subresource once there are as many pods as it asks for."""
        scale: dict[str, Any] = await namespace.api.get(path)
        return scale if scale["spec"]["replicas"] == scale["status"]["replicas"] else None

    for generation, replicas in ((2, 1), (3, 2)):  # also below the starting size
        await namespace.api.request("PATCH", path, {"spec": {"replicas": replicas}}, content_type=MERGE_PATCH)
        assert await namespace.layout(generation) == (1, replicas)
        scale = await until(f"{replicas} pods", scaled)
        selected = f"{namespace.core}/pods?labelSelector={scale['status']['selector'].replace('=', '%3D')}"
        pods = {pod["metadata"]["name"] for pod in (await namespace.api.get(selected))["items"]}
        assert pods == {1: {"digits-w0"}, 2: {"digits-w0", "digits-w2"}}[replicas]


async def test_a_job_that_somebody_else_manages_is_left_alone(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    await namespace.apply(packing_job("foreign").set("managedBy", "kueue.x-k8s.io/multikueue"))
    await namespace.apply(packing_job("own").stages(1).workers(1))
    assert await namespace.layout(1, "own") == (1, 1)
    assert await namespace.status("foreign") == {}
    assert set(await namespace.pods()) == {"own-w0"}
    assert 'job_name="foreign"' not in await operator.figures()


@contextlib.asynccontextmanager
async def undeletable_pods(namespace: Namespace, words: str) -> AsyncIterator[None]:
    """The cluster refuses to delete pods of the namespace: by a policy, once that is in force."""
    name, folder = f"keep-{namespace.name}", "/apis/admissionregistration.k8s.io/v1"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["DELETE"], "resources": ["pods"]}
    policy = {
        "matchConstraints": {"resourceRules": [rule]},
        "validations": [{"expression": "false", "message": words}],
    }
    binding = {
        "policyName": name,
        "validationActions": ["Deny"],
        "matchResources": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace.name}}},
    }
    kinds = {"validatingadmissionpolicies": policy, "validatingadmissionpolicybindings": binding}
    for kind, spec in kinds.items():
        await namespace.api.request("POST", f"{folder}/{kind}", {"metadata": {"name": name}, "spec": spec})
    pod = next(iter(await namespace.pods()))

    async def refuses() -> bool:
        with contextlib.suppress(NotFound):
            try:
                await namespace.api.request("DELETE", f"{namespace.core}/pods/{pod}", {"dryRun": ["All"]})
            except Refused:
                return True
        return False

    async def lets_go() -> bool:
        return not await refuses()

    try:
        await until("the policy is in force", refuses)
        yield
    finally:
        for kind in reversed(kinds):
            await namespace.api.request("DELETE", f"{folder}/{kind}/{name}")
        await until("the policy is gone", lets_go)


async def test_pods_that_a_policy_keeps_from_being_deleted_are_named_with_its_words_until_it_is_gone(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    await namespace.apply(packing_job().stages(1).workers(1).checkpoint())
    assert await namespace.layout(1) == (1, 1)

    async def suspended(reason: str) -> Object | None:
        status = await namespace.status()
        said = next((one for one in status["conditions"] if one["type"] == "Suspended"), None)
        return {**said, "held": status["gpus"]["held"]} if said and said["reason"] == reason else None

    async with undeletable_pods(namespace, "ask the platform team"):
        await namespace.patch("digits", {"suspend": True})
        said = await until("the refusal is said", lambda: suspended("DeletionRefused"))
        assert "digits-w0" in said["message"] and "ask the platform team" in said["message"]
        assert (said["status"], said["held"]) == ("True", 1)
        await namespace.told("DeletionRefused")
    await until("it is taken back", lambda: suspended("SuspendedByUser"))
    assert await namespace.pods() == {}
