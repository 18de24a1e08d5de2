"""What protects a job's workers, as the real API server takes it."""

import contextlib
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import yaml

from pipetransformer_contract.api import JobStatus, PipeTrainingJob
from pipetransformer_contract.api.labels import CLAIMED_LABEL, JOB_LABEL
from pipetransformer_contract.api.requests import MERGE_PATCH, Object
from pipetransformer_operator.__main__ import release
from pipetransformer_operator.controller.ports import Unavailable
from pipetransformer_operator.kube.client.api import Api, NotFound
from pipetransformer_operator.kube.trust.authority import CA_CONFIG_MAP, CA_FILE
from pipetransformer_operator.kube.workers.protection import Protection
from pipetransformer_operator.kube.workers.rendering import render
from pipetransformer_operator.plan import DisruptionBudget
from tests.testkit import ROOT
from tests.testkit.documented import documented
from tests.testkit.forked import Forked
from tests.testkit.operator.fake_kubelet import FakeKubelet
from tests.testkit.operator.jobs import packing_job
from tests.testkit.operator.namespace import Namespace, until
from tests.testkit.operator.operating import Operator

EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.timeout(180)


async def test_only_the_jobs_own_pods_reach_its_workers_and_evictions_wait_for_replacements(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    await namespace.apply(packing_job())
    assert await namespace.layout(1) == (4, 1)
    policies = (await namespace.api.get(f"/apis/networking.k8s.io/v1/namespaces/{namespace.name}/networkpolicies"))[
        "items"
    ]
    own = {"matchLabels": {JOB_LABEL: "digits"}}
    assert [policy["spec"] for policy in policies] == [
        {"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]}
    ]
    budget = f"/apis/policy/v1/namespaces/{namespace.name}/poddisruptionbudgets/digits-workers"

    async def stay(count: int) -> None:
        async def is_so() -> bool:
            spec = (await namespace.api.get(budget))["spec"]
            assert spec["unhealthyPodEvictionPolicy"] == "IfHealthyBudget"
            return bool(spec["minAvailable"] == count)

        await until(f"{count} workers must stay", is_so)

    await stay(4)
    namespace.advance(15)
    assert await namespace.layout(2) == (2, 2)
    await stay(4)
    selector = (await namespace.api.get(budget))["spec"]["selector"]["matchLabels"]
    pods = (await namespace.api.get(f"{namespace.core}/pods"))["items"]
    assert len(pods) == 4 and all(selector.items() <= pod["metadata"]["labels"].items() for pod in pods)
    owner = (await namespace.api.get(budget))["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["name"], owner["controller"]) == ("PipeTrainingJob", "digits", True)


async def test_a_budget_covers_claimed_workers_only_while_they_are_needed(namespace: Namespace) -> None:
    await namespace.apply(packing_job())
    api, protection = namespace.api, Protection(namespace.api)
    job = PipeTrainingJob.model_validate(await api.get(f"{namespace.jobs}/digits"))
    for claimed in (False, True, False):
        await protection.apply(job, DisruptionBudget(4, claimed=claimed, unready=True))
        path = f"/apis/policy/v1/namespaces/{namespace.name}/poddisruptionbudgets/digits-workers"
        covered = {JOB_LABEL: "digits"} | ({} if claimed else {CLAIMED_LABEL: "false"})
        assert (await api.get(path))["spec"]["selector"] == {"matchLabels": covered}


async def test_what_somebody_deletes_or_changes_of_a_jobs_protection_is_as_it_was_at_once(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    await namespace.apply(packing_job())
    assert await namespace.layout(1) == (4, 1)
    api, folder = namespace.api, f"namespaces/{namespace.name}"
    kept = {
        f"/apis/networking.k8s.io/v1/{folder}/networkpolicies/digits-workers": ("spec", {"ingress": []}),
        f"/apis/policy/v1/{folder}/poddisruptionbudgets/digits-workers": ("spec", {"minAvailable": 1}),
        f"/api/v1/{folder}/configmaps/{CA_CONFIG_MAP}": ("data", {CA_FILE: "nobody's"}),
    }
    for path, (part, edit) in kept.items():
        before = await api.get(path)
        await api.request("DELETE", path, {})
        await until(f"{path} is back", partial(_restored, api, path, part, before, anew=True), timeout=10)
        await api.request("PATCH", path, {part: edit}, content_type=MERGE_PATCH)
        await until(f"{path} is as it was", partial(_restored, api, path, part, before), timeout=10)


async def test_a_policy_of_somebody_else_is_left_as_it_is_and_the_job_says_so_until_it_is_gone(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    path = f"/apis/networking.k8s.io/v1/namespaces/{namespace.name}/networkpolicies"
    body = {"metadata": {"name": "digits-workers"}, "spec": {"podSelector": {}, "policyTypes": ["Egress"]}}
    theirs = await namespace.api.request("POST", path, body)
    await namespace.apply(packing_job())
    await namespace.told("CreationRefused")
    assert await namespace.layout(1) == (4, 1)

    async def is_ours(path: str) -> bool:
        with contextlib.suppress(NotFound):
            return "ownerReferences" in (await namespace.api.get(f"{path}/digits-workers"))["metadata"]
        return False

    budgets = f"/apis/policy/v1/namespaces/{namespace.name}/poddisruptionbudgets"
    await until("the job has a budget all the same", lambda: is_ours(budgets))
    assert await namespace.api.get(f"{path}/digits-workers") == theirs

    await namespace.api.request("DELETE", f"{path}/digits-workers", {})
    namespace.advance(15)
    await until("the job has a policy", lambda: is_ours(path))


async def _restored(api: Api, path: str, part: str, before: Object, *, anew: bool = False) -> bool:
    with contextlib.suppress(NotFound):
        now = await api.get(path)
        another = now["metadata"]["uid"] != before["metadata"]["uid"]
        return bool(now[part] == before[part]) and (another or not anew)
    return False


async def test_workers_run_where_the_restricted_pod_security_standard_is_enforced(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    path = f"/api/v1/namespaces/{namespace.name}"
    await namespace.api.request("PATCH", path, {"metadata": {"labels": labels}}, content_type=MERGE_PATCH)
    secure = {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": "trainer",
                "image": "trainer",
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
        ],
    }
    await namespace.apply(packing_job().stages(1).workers(1).set("podTemplate", {"spec": secure}))
    assert await namespace.layout(1) == (1, 1)


async def test_the_examples_workers_meet_the_restricted_pod_security_standard(
    namespace: Namespace,
) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    path = f"/api/v1/namespaces/{namespace.name}"
    await namespace.api.request("PATCH", path, {"metadata": {"labels": labels}}, content_type=MERGE_PATCH)
    jobs = [yaml.safe_load(file.read_text()) for file in EXAMPLES.rglob("*.yaml") if "podTemplate:" in file.read_text()]
    assert jobs
    for body in jobs:
        metadata = {**body["metadata"], "namespace": namespace.name, "uid": "1"}
        job = PipeTrainingJob.model_validate({**body, "metadata": metadata})
        pod = render(job, 0, JobStatus(), channel_url="https://channel")
        await namespace.api.request("POST", f"{path}/pods", pod, query={"dryRun": "All"})  # Pod Security may refuse it


async def test_a_worker_on_a_cordoned_node_moves_before_it_is_evicted(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet, node: str
) -> None:
    await namespace.apply(packing_job())
    assert await namespace.layout(1) == (4, 1)
    await namespace.bind("digits-w1", node)

    cordon = {"spec": {"unschedulable": True}}
    await namespace.api.request("PATCH", f"/api/v1/nodes/{node}", cordon, content_type=MERGE_PATCH)

    assert await namespace.layout(2) == (4, 1)
    generation = (await namespace.status())["generation"]
    names = [member["name"] for member in generation["members"]]
    assert sorted(names) == ["digits-w0", "digits-w2", "digits-w3", "digits-w4"]
    assert generation["reason"] == "Drain"
    await namespace.told("WorkersDraining", "GenerationConfirmed")
    namespace.advance(30)
    assert (await namespace.state("Complete")).get("failures", 0) == 0


async def lasting(namespace: Namespace) -> Object | None:
    """The job's budget; None where there is none."""
    with contextlib.suppress(NotFound):
        return await namespace.api.get(_budget(namespace))
    return None


def _budget(namespace: Namespace) -> str:
    return f"/apis/policy/v1/namespaces/{namespace.name}/poddisruptionbudgets/digits-workers"


async def evicted(namespace: Namespace, name: str) -> bool:
    """Whether the API server takes an eviction, as `kubectl drain` asks for it."""
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    path = f"{namespace.core}/pods/{name}"
    try:
        await namespace.api.request("POST", f"{path}/eviction", eviction)
    except Unavailable as error:
        assert " 429 " in str(error)
        return False
    return "deletionTimestamp" in (await namespace.api.get(path))["metadata"]


async def guarded(namespace: Namespace, node: str) -> None:
    """A job trains, and its budget refuses the eviction of a worker that runs on a node and is ready."""
    await namespace.apply(packing_job())
    assert await namespace.layout(1) == (4, 1)
    await namespace.bind("digits-w1", node)
    ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    path = f"{namespace.core}/pods/digits-w1/status"
    await namespace.api.request("PATCH", path, ready, content_type=MERGE_PATCH)

    async def is_there() -> Object | None:
        return await lasting(namespace)

    budget = await until("the job has a budget", is_there)
    none = {"currentHealthy": 4, "desiredHealthy": 4, "expectedPods": 4, "disruptionsAllowed": 0}
    seen = {"status": none | {"observedGeneration": budget["metadata"]["generation"]}}
    await namespace.api.request("PATCH", f"{_budget(namespace)}/status", seen, content_type=MERGE_PATCH)
    assert not await evicted(namespace, "digits-w1")


async def test_an_operator_that_is_scaled_to_zero_takes_its_budgets_with_it_and_nodes_can_be_drained(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet, node: str
) -> None:
    await guarded(namespace, node)

    await operator.signal(signal.SIGTERM)
    await operator.exit_code()

    assert await lasting(namespace) is None
    assert await evicted(namespace, "digits-w1")


async def test_an_operator_that_comes_back_protects_the_jobs_that_train_again(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet, node: str
) -> None:
    await guarded(namespace, node)
    await operator.signal(signal.SIGTERM)
    await operator.exit_code()

    await operator.start()

    async def is_there() -> bool:
        return await lasting(namespace) is not None

    await until("the job has a budget again", is_there)


async def test_the_budgets_that_a_killed_operator_left_are_deleted_by_one_command(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet, node: str, kubeconfig: Path, tmp_path: Path
) -> None:
    await guarded(namespace, node)
    await operator.kill()
    assert not await evicted(namespace, "digits-w1")
    budget = await lasting(namespace)
    (command,) = documented("kubectl delete poddisruptionbudgets")
    label, _, value = command.rpartition(" ")[2].partition("=")
    assert budget is not None and budget["metadata"]["labels"][label] == value, "kubectl finds it as well"

    environment = {"KUBECONFIG": str(kubeconfig), "PIPETRANSFORMER_NAMESPACES": namespace.name}
    assert await Forked(release, {**os.environ, **environment}, tmp_path / "release.log").wait() == 0

    assert await evicted(namespace, "digits-w1")


async def test_where_nodes_are_not_seen_the_only_copy_of_a_stage_may_be_evicted_and_that_is_no_failure(
    namespace: Namespace, kubelet: FakeKubelet, node: str, kubeconfig: Path, tmp_path: Path
) -> None:
    """The cluster's parts are played: the disruption controller, which allows what the budget does, and the kubelet."""
    operator = Operator(kubeconfig, tmp_path / "operator.log", namespace=namespace.name)
    await operator.start()
    try:
        await namespace.apply(packing_job().checkpoint())
        assert await namespace.layout(1) == (4, 1)
        api, pod = namespace.api, f"{namespace.core}/pods/digits-w1"
        await namespace.bind("digits-w1", node)
        ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        uid = (await api.request("PATCH", f"{pod}/status", ready, content_type=MERGE_PATCH))["metadata"]["uid"]
        path = f"/apis/policy/v1/namespaces/{namespace.name}/poddisruptionbudgets/digits-workers"

        async def allowed() -> bool:
            budget = await api.get(path)
            allowed: int = 4 - budget["spec"]["minAvailable"]
            counted = {"currentHealthy": 4, "desiredHealthy": 4 - allowed, "expectedPods": 4}
            seen = {"disruptionsAllowed": allowed, "observedGeneration": budget["metadata"]["generation"]}
            await api.request("PATCH", f"{path}/status", {"status": counted | seen}, content_type=MERGE_PATCH)
            return allowed == 1

        await until("one worker may go", allowed)
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "digits-w1"}}
        await api.request("POST", f"{pod}/eviction", eviction)
        assert "deletionTimestamp" in (await api.get(pod))["metadata"], "it has its time to leave a checkpoint"
        kubelet.processes[uid].send_signal(signal.SIGTERM)
        await kubelet.processes[uid].wait()
        await api.request("DELETE", pod, {"gracePeriodSeconds": 0})

        async def whole_again() -> bool:
            generation = (await namespace.status())["generation"]
            stays = "digits-w1" in {member["name"] for member in generation["members"]}
            return not stays and (generation["stages"], generation["confirmedGeneration"]) == (
                4,
                generation["layoutGeneration"],
            )

        await until("others hold all four stages", whole_again)
        await namespace.told("WorkerDrained")
        namespace.advance(30)
        assert (await namespace.state("Complete")).get("failures", 0) == 0
    finally:
        await operator.kill()
        print(operator.log.read_text())


async def test_a_replacement_that_was_bound_to_a_dead_node_is_replaced_in_its_turn(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet, node: str
) -> None:
    kubelet.room = 2
    await namespace.apply(packing_job().stages(1).workers(2).set("elasticPolicy.maxPipelines", 2))
    assert await namespace.layout(1) == (1, 2)
    target = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    path = f"{namespace.core}/pods/digits-w1/status"
    await namespace.api.request("PATCH", path, {"status": {"conditions": [target]}}, content_type=MERGE_PATCH)
    assert await namespace.layout(2) == (1, 1)

    async def created(name: str) -> bool:
        return name in await namespace.pods()

    await until("a replacement", lambda: created("digits-w2"))
    await namespace.bind("digits-w2", node)
    silent = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}
    path = f"/api/v1/nodes/{node}/status"
    await namespace.api.request("PATCH", path, {"status": {"conditions": [silent]}}, content_type=MERGE_PATCH)

    await until("another replacement", lambda: created("digits-w3"))
    kubelet.room = 8192
    assert await namespace.layout(3) == (1, 2)
    names = {member["name"] for member in (await namespace.status())["generation"]["members"]}
    assert names == {"digits-w0", "digits-w3"}
    namespace.advance(30)
    assert (await namespace.state("Complete")).get("failures", 0) == 0


async def test_a_worker_of_a_job_that_starts_is_replaced_when_its_node_is_deleted(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet, node: str
) -> None:
    kubelet.room = 1
    await namespace.apply(packing_job().stages(1).workers(2).set("elasticPolicy.maxPipelines", 2))

    async def left_over() -> str | None:
        pods = (await namespace.pods()).values()
        return next((p["metadata"]["name"] for p in pods if p.get("status", {}).get("conditions")), None)

    name = await until("a worker that finds no node", left_over)
    await namespace.bind(name, node)
    await namespace.api.request("DELETE", f"/api/v1/nodes/{node}", {})

    async def given_up() -> bool:
        pod = (await namespace.pods()).get(name)
        return pod is None or "deletionTimestamp" in pod["metadata"]

    await until("the worker is given up", given_up)
    kubelet.room = 8192
    assert await namespace.layout(1) == (1, 2)
    assert name not in {member["name"] for member in (await namespace.status())["generation"]["members"]}
