"""Installs the chart and calls the API server with the rights that it grants."""

from pathlib import Path

import yaml

from pipetransformer_contract.api.requests import APPLY_PATCH, Object
from pipetransformer_operator.kube.client.api import Api
from tests.testkit.operator.operating import SYSTEM

PLURALS = {
    "ConfigMap": "configmaps",
    "PodMonitor": "podmonitors",
    "PrometheusRule": "prometheusrules",
    "ServiceMonitor": "servicemonitors",
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
