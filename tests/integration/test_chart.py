"""The chart as the API server takes it: its rights are enough for an operator that runs as its ServiceAccount."""

import asyncio
import contextlib
import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from pipetransformer_contract.api.requests import APPLY_PATCH, Object
from pipetransformer_operator.__main__ import RELEASE_BUDGETS
from pipetransformer_operator.kube.client.api import Api, NotFound
from pipetransformer_operator.settings import Settings
from tests.testkit.cluster.installing import PLURALS, as_service_account, install
from tests.testkit.operator.charts import MONITORING, MONITORS, monitoring_values, render, template
from tests.testkit.operator.fake_kubelet import FakeKubelet
from tests.testkit.operator.jobs import packing_job
from tests.testkit.operator.namespace import Namespace, until
from tests.testkit.operator.operating import SYSTEM, Operator
from tools.devcluster import gobuild

pytestmark = pytest.mark.timeout(180)


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
    operator.environment["PIPETRANSFORMER_CLAIM_PRIORITY_CLASS"] = f"{release}-pipetransformer-claimed--11"
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


def test_helm_waits_until_an_operator_leads() -> None:
    """Helm wants so many pods ready: the replicas, less those that a rolling update may take away."""
    (deployment,) = (document for document in render("x") if document["kind"] == "Deployment")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_the_operator_leaves_a_lost_node_soon() -> None:
    own = [{"key": "gpu", "operator": "Exists"}]
    for given in ([], own):
        documents = render("x", tolerations=json.dumps(given))
        (deployment,) = (document for document in documents if document["kind"] == "Deployment")
        first, second, *others = deployment["spec"]["template"]["spec"]["tolerations"]
        assert {first["key"], second["key"]} == {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}
        assert first["tolerationSeconds"] == second["tolerationSeconds"] == 15
        assert others == given


def test_no_service_of_the_namespace_sets_what_the_operator_is_told_by_its_environment() -> None:
    (deployment,) = (document for document in render("x") if document["kind"] == "Deployment")
    assert deployment["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_the_operator_meets_the_restricted_pod_security_standard() -> None:
    (deployment,) = (document for document in render("x") if document["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_each_container_has_resources_because_a_quota_of_the_namespace_refuses_pods_without() -> None:
    asks = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}}
    documents = render("x", resources=json.dumps(asks))
    templates = [one["spec"]["template"]["spec"] for one in documents if one["kind"] in ("Deployment", "Job")]
    specs = [*templates, *(one["spec"] for one in documents if one["kind"] == "Pod")]
    assert [one["resources"] for spec in specs for one in spec["containers"]] == [asks] * 3


def test_a_namespaced_operator_has_no_right_over_the_cluster_but_to_check_tokens() -> None:
    documents = render("x", namespaces='["team-a", "team-b"]')
    (cluster,) = (document for document in documents if document["kind"] == "ClusterRole")
    assert [rule["resources"] for rule in cluster["rules"]] == [["tokenreviews"]]
    roles = [one["metadata"]["namespace"] for one in documents if one["kind"] == "Role" and not _hook(one)]
    assert roles == ["team-a", "team-b", SYSTEM, SYSTEM]


def test_a_namespaced_operator_releases_nothing_for_pods_of_others_because_it_sees_none() -> None:
    done = template("x", namespaces='["team-a"]', **{"releaseForOthers.enabled": "true"})
    assert (
        "releaseForOthers.enabled: only an operator of all namespaces (namespaces: []) sees other pods" in done.stderr
    )
    assert "RELEASE_FOR_OTHERS" not in yaml.safe_dump_all(render("x"))
    rules = [[d.get("rules") for d in render("x", **{"releaseForOthers.enabled": on})] for on in ("false", "true")]
    assert rules[0] == rules[1], "it needs no right besides"


def test_nothing_of_kueue_is_needed_where_it_is_not_used() -> None:
    assert "kueue" not in yaml.safe_dump_all(render("x"))


def test_a_release_that_uses_kueue_no_more_may_let_go_of_what_it_kept_there() -> None:
    documents = render("x", ["kueue.x-k8s.io/v1beta2/Workload"])
    rules = [rule for document in documents for rule in document.get("rules", [])]
    assert {"apiGroups": ["kueue.x-k8s.io"], "resources": ["workloads"], "verbs": ["list", "patch"]} in rules
    assert "PIPETRANSFORMER_KUEUE" not in yaml.safe_dump_all(documents)


@pytest.mark.parametrize(
    ("gangs", "group"), [("PodGroup", "scheduling.k8s.io"), ("Volcano", "scheduling.volcano.sh"), ("None", None)]
)
def test_the_operator_writes_groups_only_of_the_scheduler_that_it_is_told_of(gangs: str, group: str | None) -> None:
    documents = render("x", gangScheduling=json.dumps(gangs))
    rules = [rule for one in documents for rule in one.get("rules", []) if rule["resources"] == ["podgroups"]]
    assert [rule["apiGroups"] for rule in rules] == ([[group]] if group else [])
    (deployment,) = (one for one in documents if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    given = {one["name"]: one.get("value", "") for one in container["env"]}
    url = {"PIPETRANSFORMER_CHANNEL_URL": "https://channel", "POD_NAMESPACE": SYSTEM}
    assert Settings.from_environment(given | url).gang_scheduling == ("" if gangs == "None" else gangs)


@pytest.mark.parametrize("kueue", ["false", "true"])
def test_no_right_is_a_wildcard(kueue: str) -> None:
    documents = render("x", **{"kueue.enabled": kueue})
    rules = [rule for document in documents for rule in document.get("rules", [])]
    assert rules
    assert not [rule for rule in rules if "*" in {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}]


@pytest.mark.parametrize("namespaces", ["[]", '["team-a"]'])
def test_no_secret_lease_or_configmap_of_others_may_be_read_or_changed(namespaces: str) -> None:
    documents = render("x", namespaces=namespaces)
    rules = [rule for document in documents for rule in document.get("rules", [])]
    shared = [rule for rule in rules if {"secrets", "leases", "configmaps"} & set(rule["resources"])]
    assert {resource for rule in shared for resource in rule["resources"]} == {"secrets", "leases", "configmaps"}
    assert all(rule["verbs"] == ["create"] or rule.get("resourceNames") for rule in shared)


def test_claimed_workers_have_the_lower_priority_and_preempt_nobody() -> None:
    classes = {d["metadata"]["name"]: d for d in render("x") if d["kind"] == "PriorityClass"}
    base, claimed = classes["x-pipetransformer-base-0"], classes["x-pipetransformer-claimed--11"]
    autoscaled = classes["x-pipetransformer-autoscaled--10"]
    assert claimed["preemptionPolicy"] == autoscaled["preemptionPolicy"] == "Never"
    cutoff = -10  # of the cluster autoscaler: it adds no node for pods below
    assert claimed["value"] < cutoff <= autoscaled["value"] < base["value"]
    other = render("x", **{"priorityClasses.base": "5"})
    (deployment,) = (document for document in other if document["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert environment["PIPETRANSFORMER_BASE_PRIORITY_CLASS"] == "x-pipetransformer-base-5", "a value is for good"
    assert environment["PIPETRANSFORMER_CLAIM_PRIORITY_CLASS"] == claimed["metadata"]["name"]
    assert "x-pipetransformer-base-5" in {d["metadata"]["name"] for d in other if d["kind"] == "PriorityClass"}


async def test_the_api_server_takes_everything_that_shows_the_operator(api: Api) -> None:
    for file in gobuild.prometheus_operator_crds():
        definition = yaml.safe_load(file.read_text())
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{definition['metadata']['name']}"
        await api.request("PATCH", path, definition, content_type=APPLY_PATCH)

    async def served() -> bool:
        with contextlib.suppress(NotFound):
            known = (await api.get(f"/apis/{MONITORING}"))["resources"]
            return {PLURALS[kind] for kind in MONITORS} <= {resource["name"] for resource in known}
        return False

    await until("the monitors' kinds are served", served)
    documents = render("x", MONITORS, monitoring=monitoring_values(team="ml"))
    shown = [document for document in documents if document["kind"] in (*MONITORS, "ConfigMap")]
    assert sorted(document["kind"] for document in shown) == [
        "ConfigMap",
        "ConfigMap",
        "PodMonitor",
        "PrometheusRule",
        "ServiceMonitor",
    ]
    assert {document["metadata"]["labels"]["team"] for document in shown} == {"ml"}
    await install(api, shown)


def test_nothing_that_shows_the_operator_is_installed_unless_asked_for() -> None:
    kinds = {document["kind"] for document in render("x")}
    assert not kinds & {*MONITORS, "ConfigMap"}


@pytest.mark.parametrize("kind", MONITORS)
def test_a_monitor_without_its_definition_is_refused_in_words(kind: str) -> None:
    done = template("x", [other for other in MONITORS if other != kind], monitoring=monitoring_values())
    assert done.returncode != 0
    assert f"monitoring.{kind[0].lower()}{kind[1:]}.enabled: the cluster has no kind {kind}" in done.stderr


def test_workers_are_scraped_by_a_prometheus_whose_namespace_is_known() -> None:
    done = template("x", MONITORS, monitoring='{"podMonitor": {"enabled": true}}')
    assert "monitoring.podMonitor.prometheusNamespace: set the namespace of Prometheus" in done.stderr
    (deployment,) = (d for d in render("x", MONITORS, monitoring=monitoring_values()) if d["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert {"name": "PIPETRANSFORMER_SCRAPER_NAMESPACE", "value": "monitoring"} in container["env"]


def operator_rules(release: str, monitoring: str) -> list[str]:
    """Expressions about the operator, as the release has them."""
    (rules,) = (d for d in render(release, MONITORS, monitoring=monitoring) if d["kind"] == "PrometheusRule")
    written = [rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"]]
    return [text for text in written if re.search(r"pipetransformer_(?!trainer|job)", text)]


def test_alerts_of_a_release_are_about_its_own_operator() -> None:
    own = f'namespace="{SYSTEM}",service="x-pipetransformer"'
    texts = operator_rules("x", monitoring_values())
    assert len(texts) > 6
    for text in texts:
        asked = re.findall(r"pipetransformer_[\w:]+(?:\{[^}]*\})?", text)
        assert [one for one in asked if own not in one] == []


def test_an_operator_that_is_scraped_in_another_way_is_known_by_its_metrics_alone() -> None:
    for text in operator_rules("x", '{"prometheusRule": {"enabled": true}}'):
        assert "namespace=" not in text and "service=" not in text


def test_a_jobs_pod_cannot_show_what_is_the_operators_to_show() -> None:
    (monitor,) = (d for d in render("x", MONITORS, monitoring=monitoring_values()) if d["kind"] == "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (kept,) = endpoint["metricRelabelings"]
    assert (kept["sourceLabels"], kept["action"]) == (["__name__"], "keep")
    names = ["pipetransformer_trainer_step", "process_open_fds", "pipetransformer_leader", "pipetransformer_job_state"]
    assert [bool(re.fullmatch(kept["regex"], name)) for name in names] == [True, True, False, False]
    assert monitor["spec"]["sampleLimit"] > 0


def test_a_namespaced_release_scrapes_the_workers_of_its_namespaces() -> None:
    documents = render("x", MONITORS, namespaces='["team-a"]', monitoring=monitoring_values())
    (monitor,) = (document for document in documents if document["kind"] == "PodMonitor")
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["team-a"]}


@pytest.mark.parametrize(("namespaces", "kind"), [([], "ClusterRole"), (["team-a", "team-b"], "Role")])
def test_what_follows_an_uninstall_deletes_the_budgets_of_jobs_that_train_on(namespaces: list[str], kind: str) -> None:
    documents = render("x", namespaces=json.dumps(namespaces))
    after = [one for one in documents if _hook(one) == "post-delete"]
    (pod,) = (one["spec"]["template"]["spec"] for one in after if one["kind"] == "Job")
    assert pod["containers"][0]["command"][-1] == RELEASE_BUDGETS
    roles = [one for one in after if one["kind"] == kind]
    assert [role["metadata"].get("namespace", "") for role in roles] == (namespaces or [""])
    rule = {"apiGroups": ["policy"], "resources": ["poddisruptionbudgets"], "verbs": ["list", "delete"]}
    assert all(role["rules"] == [rule] for role in roles)
    assert {one["subjects"][0]["name"] for one in after if "subjects" in one} == {pod["serviceAccountName"]}


def _hook(document: Object) -> str:
    return str(document["metadata"].get("annotations", {}).get("helm.sh/hook", ""))


@pytest.mark.parametrize("secure", ["false", "true"])
async def test_helm_test_passes_whether_metrics_are_open_or_need_a_token(
    namespace: Namespace, kubeconfig: Path, tmp_path: Path, secure: str
) -> None:
    operator = Operator(kubeconfig, tmp_path / "operator.log", namespace=namespace.name)
    operator.environment["PIPETRANSFORMER_SECURE_METRICS"] = secure
    await operator.start()
    try:

        async def ready() -> bool:
            return await operator.asked("/readyz") == 200

        await until("the operator leads", ready)
        (pod,) = (one for one in render("x", **{"monitoring.secureMetrics": secure}) if one["kind"] == "Pod")
        *_, program = pod["spec"]["containers"][0]["command"]
        ports = {":8080/": f":{operator.metrics_port}/", ":8443/": f":{operator.channel_port}/"}
        for here, there in {f"x-pipetransformer.{SYSTEM}.svc": "127.0.0.1", **ports}.items():
            assert here in program
            program = program.replace(here, there)
        tested = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stderr=asyncio.subprocess.PIPE)
        _, said = await tested.communicate()
        assert tested.returncode == 0, said.decode()
    finally:
        await operator.kill()
