"""The chart in the hands of the real Helm: what it takes and refuses, and a release's life on a real API server."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.kube.client.api import Api, NotFound
from pipetransformer_operator.kube.trust.authority import CA_FILE, SECRET
from pipetransformer_operator.settings import Settings
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.namespace import Namespace
from tools.devcluster import gobuild
from tools.devcluster.layout import REPOSITORY

pytestmark = pytest.mark.timeout(180)
CHART = REPOSITORY / "charts" / "pipetransformer"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/pipetrainingjobs.training.pipetransformer.io"


def helm(*words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs Helm."""
    done = subprocess.run([gobuild.helm(), *words], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("replica=2", "additional properties 'replica' not allowed"),
        ("image.repo=x", "additional properties 'repo' not allowed"),
        ("monitoring.podMonitor.port=x", "additional properties 'port' not allowed"),
        ("image.digest=latest", "at '/image/digest'"),
        ("image.repository=registry:5000/operator:0.1.0", "at '/image/repository'"),
        ("image.tag=sha256:0", "at '/image/tag'"),
        ("channel.certificateSecret=Own_Secret", "at '/channel/certificateSecret'"),
        ("serviceAccount.name=Own_Account", "at '/serviceAccount/name'"),
        ("priorityClasses.claimed=0", "priorityClasses.claimed: must be below priorityClasses.base"),
        ("logLevel=verbose", "at '/logLevel'"),
        ("logFormat=xml", "at '/logFormat'"),
        ("clientConnection.qps=-1", "at '/clientConnection/qps'"),
        ("clientConnection.burst=40", "clientConnection.burst: needs clientConnection.qps, which is 0 (no limit)"),
        ("lease.namespace=Team_A", "at '/lease/namespace'"),
        ("extraEnv[0].name=PIPETRANSFORMER_KUEUE", "at '/extraEnv/0/name'"),
        ("commonLabels.helm\\.sh/chart=x", "invalid propertyName 'helm.sh/chart'"),
        ("extraEnv[0].name=A,extraEnv[0].value=1", "at '/extraEnv/0/value'"),
        ("commonLabels.team=a b", "at '/commonLabels/team'"),
        ("commonLabels.a b=team", "invalid propertyName 'a b'"),
        ("image.registry=registry/team", "at '/image/registry'"),
        ("nameOverride=Team", "at '/nameOverride'"),
        ("serviceAccount.create=false", "serviceAccount.name must name a ServiceAccount"),
        ("fullnameOverride=team.a", "at '/fullnameOverride'"),
        ("fullnameOverride=yes", "at '/fullnameOverride'"),
        ("replicas=two", "at '/replicas'"),
        ("namespaces={Team_A}", "at '/namespaces/0'"),
        ("imagePullSecrets={registry}", "at '/imagePullSecrets/0'"),
        ("imagePullSecrets[0].name=Own_Secret", "at '/imagePullSecrets/0/name'"),
        ("priorityClasses.base=2000000000", "at '/priorityClasses/base'"),
        ("podLabels.app\\.kubernetes\\.io/component=x", "invalid propertyName 'app.kubernetes.io/component'"),
        ("networkPolicy.nodeCIDRs={10.0.0.1}", "at '/networkPolicy/nodeCIDRs/0'"),
    ],
)
def test_a_value_that_the_chart_does_not_know_is_refused_with_its_place(value: str, words: str) -> None:
    done = helm("template", "x", CHART, "--set", value, check=False)
    assert done.returncode != 0
    assert words in done.stderr


@pytest.mark.parametrize("release", ["1701", "y", "null"])
def test_a_release_that_looks_like_another_value_is_a_label(release: str) -> None:
    done = helm("template", release, CHART, "--set", "fullnameOverride=x")
    labels = re.findall(r"app.kubernetes.io/instance: (.*)", done.stdout)
    assert len(labels) > 20
    assert set(labels) == {f'"{release}"'}


def test_names_that_look_like_numbers_are_names() -> None:
    digits = ("priorityClassName", "serviceAccount.name", "channel.certificateSecret", "namespaces[0]")
    settings = [word for value in digits for word in ("--set-string", f"{value}=1701")]
    prometheus = [
        "--set-string",
        "monitoring.podMonitor.prometheusNamespace=1701",
        "--set",
        "monitoring.podMonitor.enabled=true",
    ]
    known = ["--api-versions", "monitoring.coreos.com/v1/PodMonitor"]
    done = helm("template", "x", CHART, "--namespace", "1701", *settings, *prometheus, *known)
    text = json.dumps([document for document in yaml.safe_load_all(done.stdout) if document])
    assert '"1701"' in text
    assert re.findall(r": 1701[,}]", text) == []


def test_a_chart_that_depends_on_it_may_switch_it_on_and_off(tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "charts" / "pipetransformer")
    depends = {"name": "pipetransformer", "version": "0.1.0", "condition": "pipetransformer.enabled"}
    about = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [depends]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(about))
    for value, is_there in (("true", True), ("false", False)):
        done = helm("template", "x", tmp_path, "--set", f"pipetransformer.enabled={value}")
        assert ("kind: Deployment" in done.stdout) is is_there


@pytest.mark.parametrize("name", ["1st", "team.a"])
def test_a_release_that_no_service_can_be_named_after_is_refused_in_words(name: str) -> None:
    done = helm("template", name, CHART, check=False)
    assert done.returncode != 0
    assert f"release name {name}: must begin with a letter and contain no dot" in done.stderr


def test_what_the_schema_takes_is_what_values_yaml_documents() -> None:
    whole = json.loads((CHART / "values.schema.json").read_text())
    schema = {key: _resolved(part, whole["definitions"]) for key, part in whole["properties"].items()}
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    optional = {"resources.claims"}  # of Kubernetes, empty by default
    for key in values:
        assert _leaves(values[key], key) == _properties(schema[key], key) - optional, key


def test_what_the_chart_cannot_do_without_may_not_be_null() -> None:
    needed = list(_needed(yaml.safe_load((CHART / "values.yaml").read_text())))
    for depth in {path.count(".") for path in needed}:
        nulls = [path for path in needed if path.count(".") == depth]
        done = helm("template", "x", CHART, *(f"--set={path}=null" for path in nulls), check=False)
        assert done.returncode != 0
        for path in nulls:
            where, _, name = path.rpartition(".")
            pointer = "/" + where.replace(".", "/") if where else ""
            assert re.search(f"at '{pointer}': missing propert.*'{name}'", done.stderr), path


def test_what_may_be_empty_may_be_null() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    free = {leaf for key in values for leaf in _leaves(values[key], key)} - {*_needed(values)}
    helm("template", "x", CHART, *(f"--set={path}=null" for path in free))


def _needed(values: dict[str, Any], path: str = "") -> Iterator[str]:
    """Paths of what is not empty by default, free maps aside."""
    for key, value in values.items():
        if value not in ({}, [], "") and key not in _FREE | {"resources"}:
            yield f"{path}{key}"
            if isinstance(value, dict):
                yield from _needed(value, f"{path}{key}.")


def _leaves(value: Any, path: str) -> set[str]:
    """Paths of the fields of a value; free maps, such as labels, are fields."""
    if path == "resources" or not isinstance(value, dict) or path.rpartition(".")[2] in _FREE:
        return {f"{path}.{key}" for key in value} if path == "resources" else {path}
    return {leaf for key, item in value.items() for leaf in _leaves(item, f"{path}.{key}")}


_FREE = {
    "annotations",
    "labels",
    "commonLabels",
    "nodeSelector",
    "affinity",
    "podAnnotations",
    "podLabels",
    "podSecurityContext",
}


def _resolved(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with each of its references replaced by what it names."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _resolved(definitions[schema["$ref"].rpartition("/")[2]], definitions)
        return {key: _resolved(part, definitions) for key, part in schema.items()}
    return schema


def _properties(schema: Any, path: str) -> set[str]:
    if "properties" not in schema:
        return {path}
    return {leaf for key, item in schema["properties"].items() for leaf in _properties(item, f"{path}.{key}")}


def template(*words: str) -> dict[str, Object]:
    """What the chart renders, by kind and name."""
    documents = yaml.safe_load_all(helm("template", "x", CHART, "--namespace", "system", *words).stdout)
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in documents if one}


def test_every_object_and_pod_of_a_release_has_the_common_labels() -> None:
    found = template("--set", "commonLabels.team=ml", "--set", "commonLabels.tier=gold", "--set", "podLabels.tier=own")
    assert {name: one["metadata"]["labels"]["team"] for name, one in found.items()} == dict.fromkeys(found, "ml")
    pods = {name: one["spec"]["template"]["metadata"]["labels"] for name, one in found.items() if _makes_pods(one)}
    assert pods.keys() == {"Deployment/x-pipetransformer", "Job/x-pipetransformer-release"}
    assert {labels["team"] for labels in pods.values()} == {"ml"}
    assert pods["Deployment/x-pipetransformer"]["tier"] == "own", "a pod's own label counts more"
    selector = found["Deployment/x-pipetransformer"]["spec"]["selector"]["matchLabels"]
    assert "team" not in selector, "a selector cannot be changed later"


def test_a_label_of_a_monitor_counts_more_than_a_common_label_and_stands_once() -> None:
    monitor = "monitoring.serviceMonitor"
    done = helm(
        "template", "x", CHART, "--set", "commonLabels.release=x", "--set", f"{monitor}.enabled=true",
        "--set", f"{monitor}.labels.release=prometheus", "--api-versions", "monitoring.coreos.com/v1/ServiceMonitor",
        "--show-only", "templates/monitoring.yaml",
    )  # fmt: skip
    assert re.findall(r"^    release: (.*)$", done.stdout, re.MULTILINE) == ["prometheus"]


def _uninstall(found: dict[str, Object]) -> Any:
    """What the pod of `helm uninstall` should be."""
    return found["Job/x-pipetransformer-release"]["spec"]["template"]["spec"]


def _makes_pods(one: Any) -> bool:
    return "template" in one.get("spec", {})


def test_another_name_replaces_the_charts_in_names_and_labels() -> None:
    found = template("--set", "nameOverride=elastic")
    assert {name.partition("/")[2] for name in found if name.startswith(("Deployment", "Service/"))} == {"x-elastic"}
    operator = found["Deployment/x-elastic"]["spec"]
    assert operator["selector"]["matchLabels"]["app.kubernetes.io/name"] == "elastic"
    assert found["Service/x-elastic"]["spec"]["selector"] == operator["selector"]["matchLabels"]


def test_an_account_that_exists_gets_the_permissions_and_the_operator_more_environment() -> None:
    found = template(
        "--set", "serviceAccount.create=false", "--set", "serviceAccount.name=own", "--set", "logFormat=Json",
        "--set", "extraEnv[0].name=HTTPS_PROXY", "--set", "extraEnv[0].value=http://proxy:3128",
        "--set", "image.registry=registry:5000",
    )  # fmt: skip
    assert [name for name in found if name.startswith("ServiceAccount/")] == [
        "ServiceAccount/x-pipetransformer-release"
    ]
    subject = {"kind": "ServiceAccount", "name": "own", "namespace": "system"}
    assert found["ClusterRoleBinding/x-pipetransformer"]["subjects"] == [subject]
    operator = found["Deployment/x-pipetransformer"]["spec"]["template"]["spec"]
    assert operator["serviceAccountName"] == "own"
    assert operator["automountServiceAccountToken"] is True, "whatever that account says"
    (container,) = operator["containers"]
    assert container["image"].startswith("registry:5000/pipetransformer-operator:")
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert (environment["HTTPS_PROXY"], environment["PIPETRANSFORMER_LOG_FORMAT"]) == ("http://proxy:3128", "Json")


def test_the_pods_of_helm_run_on_the_nodes_of_the_operator_and_reach_the_api_server_as_it_does() -> None:
    terms = [{"matchExpressions": [{"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"]}]}]
    nodes = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    apart = [{"topologyKey": "kubernetes.io/hostname", "labelSelector": {}}]
    affinity = {
        "nodeAffinity": nodes,
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": apart},
    }
    proxy = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    found = template(
        "--set-json", f"affinity={json.dumps(affinity)}", "--set-json", f"extraEnv={json.dumps([proxy])}",
        "--set", "nodeSelector.disk=ssd", "--set", "tolerations[0].key=infra",
    )  # fmt: skip
    operator = found["Deployment/x-pipetransformer"]["spec"]["template"]["spec"]
    assert operator["affinity"] == affinity
    uninstall = _uninstall(found)
    for pod in (found["Pod/x-pipetransformer-test"]["spec"], uninstall):
        assert pod["affinity"] == {"nodeAffinity": nodes}, "beside the operator there may be no room for it"
        assert (pod["nodeSelector"], pod["tolerations"]) == ({"disk": "ssd"}, [{"key": "infra"}])
    assert uninstall["containers"][0]["env"] == [proxy]


def test_the_lease_may_have_a_namespace_and_requests_a_limit() -> None:
    found = template(
        "--set", "lease.namespace=leases",
        "--set", "clientConnection.qps=20", "--set", "clientConnection.burst=40",
    )  # fmt: skip
    for kind in ("Role", "RoleBinding"):
        assert found[f"{kind}/x-pipetransformer-lease"]["metadata"]["namespace"] == "leases"
    (container,) = found["Deployment/x-pipetransformer"]["spec"]["template"]["spec"]["containers"]
    environment = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    settings = Settings.from_environment(environment | {"POD_NAMESPACE": "system"})
    assert settings.lease_namespace == "leases"
    limiter = settings.api_limiter()
    assert limiter is not None and (limiter.max_rate, limiter.time_period) == (40, 2)


def test_metrics_may_be_read_only_over_tls_by_who_is_allowed() -> None:
    found = template(
        "--set", "monitoring.secureMetrics=true", "--set", "monitoring.serviceMonitor.enabled=true",
        "--api-versions", "monitoring.coreos.com/v1/ServiceMonitor",
    )  # fmt: skip
    (endpoint,) = found["ServiceMonitor/x-pipetransformer"]["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"] == {
        "serverName": "x-pipetransformer.system.svc",
        "ca": {"secret": {"name": SECRET, "key": CA_FILE}},
    }
    rules = found["ClusterRole/x-pipetransformer"]["rules"]
    assert "subjectaccessreviews" in {resource for rule in rules for resource in rule["resources"]}
    reader = found["ClusterRole/x-pipetransformer-metrics-reader"]["rules"]
    assert reader == [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]
    (container,) = found["Deployment/x-pipetransformer"]["spec"]["template"]["spec"]["containers"]
    assert {"name": "PIPETRANSFORMER_SECURE_METRICS", "value": "true"} in container["env"]


def test_every_pod_of_the_chart_is_restricted_and_pulls_by_digest_with_the_secret() -> None:
    digest = "sha256:" + "a" * 64
    found = template(
        "--set", f"image.digest={digest}", "--set", "imagePullSecrets[0].name=registry",
        "--set", "priorityClassName=system-cluster-critical",
    )  # fmt: skip
    operator = found["Deployment/x-pipetransformer"]["spec"]["template"]["spec"]
    assert operator["priorityClassName"] == "system-cluster-critical"
    for pod in (operator, found["Pod/x-pipetransformer-test"]["spec"], _uninstall(found)):
        (container,) = pod["containers"]
        assert container["image"] == f"pipetransformer-operator@{digest}"
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_cluster_may_choose_the_user_of_every_pod_of_the_chart() -> None:
    found = template("--set", "podSecurityContext.runAsUser=null", "--set", "podSecurityContext.runAsGroup=null")
    operator = found["Deployment/x-pipetransformer"]["spec"]["template"]["spec"]
    for pod in (operator, found["Pod/x-pipetransformer-test"]["spec"], _uninstall(found)):
        assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def test_who_may_edit_or_view_a_namespace_may_do_so_with_its_jobs() -> None:
    found = template()
    rights = {"edit": {"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"}}
    rights["view"] = {"get", "list", "watch"}
    for role, verbs in rights.items():
        one = found[f"ClusterRole/x-pipetransformer-{role}"]
        assert one["metadata"]["labels"][f"rbac.authorization.k8s.io/aggregate-to-{role}"] == "true"
        (jobs,) = (rule for rule in one["rules"] if rule["resources"] == ["pipetrainingjobs"])
        assert set(jobs["verbs"]) == verbs
    assert [one for one in template("--set", "namespaces={team-a}") if one.startswith("ClusterRole/")] == [
        "ClusterRole/x-pipetransformer"
    ]


def test_only_workers_of_the_served_namespaces_and_helm_test_reach_the_channel() -> None:
    found = template("--set", "namespaces={team-a}")
    policy = found["NetworkPolicy/x-pipetransformer"]["spec"]
    channel, other = policy["ingress"]
    workers, test = channel["from"]
    assert channel["ports"] == [{"port": "channel"}]
    assert workers["namespaceSelector"]["matchExpressions"][0]["values"] == ["team-a"]
    assert workers["podSelector"]["matchExpressions"][0]["key"] == "training.pipetransformer.io/job"
    labels = found["Pod/x-pipetransformer-test"]["metadata"]["labels"]
    assert test["podSelector"]["matchLabels"].items() <= labels.items()
    assert "from" not in other and {"port": "metrics"} in other["ports"]
    service = found["Service/x-pipetransformer"]["spec"]["selector"]
    assert not service.items() <= labels.items(), "the Service would send workers to the test's pod"


def test_nodes_whose_workers_have_their_network_reach_the_channel_if_the_values_say_which() -> None:
    found = template("--set", "networkPolicy.nodeCIDRs={10.0.0.0/16,fd00::/64}")
    channel, _ = found["NetworkPolicy/x-pipetransformer"]["spec"]["ingress"]
    assert channel["from"][2:] == [{"ipBlock": {"cidr": "10.0.0.0/16"}}, {"ipBlock": {"cidr": "fd00::/64"}}]
    assert channel["ports"] == [{"port": "channel"}]


def older_chart(folder: Path) -> Path:
    """The chart of a version before: its CRD does not know `status.drainDeadline` yet."""
    chart = folder / "older"
    shutil.copytree(CHART, chart)
    about = yaml.safe_load((chart / "Chart.yaml").read_text()) | {"version": "0.0.1", "appVersion": "0.0.1"}
    (chart / "Chart.yaml").write_text(yaml.safe_dump(about))
    (file,) = (chart / "files").glob("*_pipetrainingjobs.yaml")
    definition = yaml.safe_load(file.read_text())
    del _status_fields(definition)["drainDeadline"]
    file.write_text(yaml.safe_dump(definition))
    return chart


def _status_fields(definition: Object) -> Object:
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    fields: Object = schema["properties"]["status"]["properties"]
    return fields


async def test_a_release_is_upgraded_rolled_back_and_removed_and_another_takes_over_its_definition_and_jobs(
    api: Api, namespace: Namespace, kubeconfig: Path, tmp_path: Path
) -> None:
    where = ("--kubeconfig", kubeconfig, "--namespace", namespace.name)
    first, second = (f"{letter}{namespace.name.removeprefix('test-')}" for letter in "ab")

    async def is_new() -> bool:
        return "drainDeadline" in _status_fields(await api.get(CRD))

    async def image() -> str:
        path = f"/apis/apps/v1/namespaces/{namespace.name}/deployments/{first}-pipetransformer"
        pod = (await api.get(path))["spec"]["template"]["spec"]
        return str(pod["containers"][0]["image"])

    async def channel() -> tuple[str, list[Object]]:
        name = f"{first}-pipetransformer"
        assert await api.get(f"{namespace.core}/services/{name}")
        path = f"/apis/apps/v1/namespaces/{namespace.name}/deployments/{name}"
        (container,) = (await api.get(path))["spec"]["template"]["spec"]["containers"]
        return name, [one for one in container["env"] if one["name"] == "PIPETRANSFORMER_CHANNEL_URL"]

    # The tests' definition is nobody's: the first release takes it over, as the second does from the first.
    helm("install", first, older_chart(tmp_path), *where, "--take-ownership")
    assert not await is_new()
    assert await image() == "pipetransformer-operator:0.0.1"
    await namespace.apply(make_job())

    helm("upgrade", first, CHART, *where)
    assert await is_new()
    assert await image() == "pipetransformer-operator:0.1.0"

    helm("rollback", first, "1", *where)
    assert await image() == "pipetransformer-operator:0.0.1"
    helm("upgrade", first, CHART, *where, "--set", "priorityClasses.base=5")

    narrowed = ("--set", f"namespaces={{{namespace.name}}}", "--dry-run=server")
    said = helm("upgrade", first, CHART, *where, *narrowed).stdout
    assert f"kubectl apply --namespace {namespace.name} -f examples/" in said, "a job elsewhere would wait forever"

    known = await channel()
    helm("uninstall", first, *where, "--no-hooks")  # no kubelet runs the one that deletes budgets
    with pytest.raises(NotFound):
        await image()
    assert (await namespace.status()) == {}, "the job is as it was"

    refused = helm("install", second, CHART, *where, check=False)
    assert "invalid ownership metadata" in refused.stderr
    helm("install", second, CHART, *where, "--take-ownership", "--set", f"fullnameOverride={first}-pipetransformer")
    assert await channel() == known, "running workers know it by this"
    assert (await api.get(CRD))["metadata"]["annotations"]["meta.helm.sh/release-name"] == second

    helm("uninstall", second, *where, "--no-hooks")
    await api.request("DELETE", f"{namespace.jobs}/digits", {})
    assert (await api.get(namespace.jobs))["items"] == [], "nothing holds the job back without an operator"
