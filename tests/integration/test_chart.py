"""The chart as the API server takes it: its rights are enough for an operator that runs as its ServiceAccount."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipetransformer_operator.kube.api import APPLY_PATCH, Api, Object
from tools.devcluster import gobuild
from tools.devcluster.layout import REPOSITORY

from .conftest import SYSTEM, FakeKubelet, Namespace, Operator, until
from .test_operator import packing_job

pytestmark = pytest.mark.timeout(180)
CHART = REPOSITORY / "charts" / "pipetransformer"
PLURALS = {
    "ClusterRole": "clusterroles",
    "ClusterRoleBinding": "clusterrolebindings",
    "Deployment": "deployments",
    "NetworkPolicy": "networkpolicies",
    "PriorityClass": "priorityclasses",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
}
CLUSTER_SCOPED = {"ClusterRole", "ClusterRoleBinding", "PriorityClass"}


def render(release: str, **values: Any) -> list[Object]:
    """What Helm would install, without the CRD."""
    settings = [part for key, value in values.items() for part in ("--set-json", f"{key}={value}")]
    command = [
        str(gobuild.helm()),
        "template",
        release,
        str(CHART),
        "--namespace",
        SYSTEM,
        "--set",
        "crds.install=false",
    ]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, check=True)
    return [document for document in yaml.safe_load_all(done.stdout) if document]


async def install(api: Api, documents: list[Object]) -> None:
    """Applies all but what needs a node, and what Helm runs only when it is asked to."""
    for document in documents:
        if "helm.sh/hook" in document["metadata"].get("annotations", {}):
            continue
        group = document["apiVersion"]
        folder = f"/apis/{group}" if "/" in group else f"/api/{group}"
        if document["kind"] not in CLUSTER_SCOPED:
            folder += f"/namespaces/{document['metadata']['namespace']}"
        path = f"{folder}/{PLURALS[document['kind']]}/{document['metadata']['name']}"
        await api.request("PATCH", path, document, content_type=APPLY_PATCH, strict=True)


async def as_service_account(api: Api, kubeconfig: Path, name: str, folder: Path) -> Path:
    """A kubeconfig of the ServiceAccount, which has no right but what roles give it."""
    path = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/{name}/token"
    answer = await api.request("POST", path, {"spec": {"expirationSeconds": 3600}})
    return with_token(kubeconfig, answer["status"]["token"], folder / f"{name}.kubeconfig")


def with_token(kubeconfig: Path, token: str, target: Path) -> Path:
    content = yaml.safe_load(kubeconfig.read_text())
    content["users"][0]["user"] = {"token": token}
    target.write_text(yaml.safe_dump(content))
    return target


@pytest.mark.parametrize("namespaced", [False, True], ids=["clusterwide", "namespaced"])
async def test_a_job_runs_and_gives_back_under_an_operator_with_the_charts_rights_alone(
    api: Api, kubeconfig: Path, namespace: Namespace, kubelet: FakeKubelet, tmp_path: Path, namespaced: bool
) -> None:
    release = f"r{namespace.name.removeprefix('test-')}"
    values = {"namespaces": f'["{namespace.name}"]'} if namespaced else {}
    await install(api, render(release, **values))
    rights = await as_service_account(api, kubeconfig, f"{release}-pipetransformer", tmp_path)
    log = tmp_path / "operator.log"
    operator = Operator(rights, log, namespace=namespace.name if namespaced else "")
    operator.environment["PIPETRANSFORMER_CLAIM_PRIORITY_CLASS"] = f"{release}-pipetransformer-claimed"
    try:
        await operator.start()
        await namespace.apply(packing_job().release().set("runPolicy.ttlSecondsAfterFinished", 0))
        assert await namespace.layout(1) == (4, 1)
        namespace.advance(15)
        assert await namespace.layout(2) == (2, 1)
        await namespace.told("GenerationConfirmed")
        namespace.advance(30)

        async def gone() -> bool:
            return not (await api.get(namespace.jobs))["items"]

        await until("the job has outlived its time", gone)
    finally:
        await operator.kill()
        written = log.read_text()
        print(written)
    assert "forbidden" not in written.lower()


def test_the_operator_meets_the_restricted_pod_security_standard() -> None:
    (deployment,) = (document for document in render("x") if document["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_namespaced_operator_has_no_right_over_the_cluster_but_to_check_tokens() -> None:
    documents = render("x", namespaces='["team-a", "team-b"]')
    (cluster,) = (document for document in documents if document["kind"] == "ClusterRole")
    assert [rule["resources"] for rule in cluster["rules"]] == [["tokenreviews"]]
    roles = [document["metadata"]["namespace"] for document in documents if document["kind"] == "Role"]
    assert roles == ["team-a", "team-b", SYSTEM]


def test_nothing_of_kueue_is_needed_where_it_is_not_used() -> None:
    assert "kueue" not in yaml.safe_dump_all(render("x"))


@pytest.mark.parametrize("kueue", ["false", "true"])
def test_no_right_is_a_wildcard(kueue: str) -> None:
    documents = render("x", **{"kueue.enabled": kueue})
    rules = [rule for document in documents for rule in document.get("rules", [])]
    assert rules
    assert not [rule for rule in rules if "*" in {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}]


def test_claimed_workers_have_the_lower_priority_and_preempt_nobody() -> None:
    classes = {d["metadata"]["name"]: d for d in render("x") if d["kind"] == "PriorityClass"}
    base, claimed = classes["x-pipetransformer-base"], classes["x-pipetransformer-claimed"]
    assert claimed["value"] < base["value"]
    assert claimed["preemptionPolicy"] == "Never"
