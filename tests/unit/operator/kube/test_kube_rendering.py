"""How a worker's pod is made: what is added to the user's template, and what is left alone."""

import json
from typing import Any

import pytest

from pipetransformer_contract.api import JobStatus
from pipetransformer_contract.api.labels import CLAIMED_LABEL, JOB_LABEL, PLACEMENT_GROUP_LABEL, WORKER_LABEL
from pipetransformer_contract.spec import TrainerSpec
from pipetransformer_contract.wire import TOKEN_AUDIENCE, Env
from pipetransformer_operator.controller.ports import Refused
from pipetransformer_operator.kube.trust.authority import CA_CONFIG_MAP, CA_FILE
from pipetransformer_operator.kube.workers.placement import PREFERRED, REQUIRED
from pipetransformer_operator.kube.workers.pods import controller_uid
from pipetransformer_operator.kube.workers.protection import disruption_budget, network_policy
from pipetransformer_operator.kube.workers.rendering import Assignment, PriorityClasses, render
from pipetransformer_operator.plan import DisruptionBudget
from tests.testkit.operator.builders import JobBuilder, make_job
from tests.testkit.operator.kubelet import without_escapes
from tests.testkit.operator.rendered import CHANNEL, pod_of


def with_containers(*containers: dict[str, Any], **spec: Any) -> JobBuilder:
    return make_job().set("podTemplate", {"spec": {"containers": list(containers), **spec}})


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def test_a_worker_gets_its_job_its_name_and_the_way_to_the_channel() -> None:
    pod = pod_of(make_job())
    given = environment(pod["spec"]["containers"][0])
    assert pod["metadata"]["name"] == given[Env.WORKER_NAME] == "digits-w3"
    assert given[Env.CHANNEL_URL] == CHANNEL
    job = make_job().job().metadata
    assert (given[Env.JOB_NAMESPACE], given[Env.JOB_NAME], given[Env.JOB_UID]) == ("default", "digits", job.uid)
    fields = {name: value["fieldRef"]["fieldPath"] for name, value in given.items() if isinstance(value, dict)}
    assert fields == {
        Env.WORKER_UID: "metadata.uid",
        Env.WORKER_ADDRESS: "status.podIP",
        Env.NODE_NAME: "spec.nodeName",
    }


def test_a_worker_that_comes_later_gets_the_numbers_of_the_jobs_start() -> None:
    """The default size of a micro-batch follows from them, and all workers must have the same."""
    job = make_job().workers(4, most=8).job()
    pod = render(job, 3, JobStatus(num_shards=2, initial_workers=2), channel_url=CHANNEL)
    spec = TrainerSpec.model_validate(json.loads(environment(pod["spec"]["containers"][0])[Env.JOB_SPEC]))
    assert (spec.num_shards, spec.workers) == (2, 2)


def test_a_job_that_speaks_of_variables_reaches_the_worker_as_it_is() -> None:
    job = make_job().set("data.options", {"pattern": "$(PIPETRANSFORMER_JOB_NAME)/$$[0-9]$"})
    container = pod_of(job)["spec"]["containers"][0]
    by_kubelet = without_escapes(environment(container)[Env.JOB_SPEC])
    assert TrainerSpec.model_validate_json(by_kubelet).data == job.job().spec.data


def test_the_trainer_is_the_container_of_that_name_and_sidecars_are_left_alone() -> None:
    sidecar = {"name": "logs", "image": "logs"}
    pod = pod_of(with_containers(sidecar, {"name": "trainer", "image": "trainer"}))
    assert pod["spec"]["containers"][0] == sidecar
    assert "env" in pod["spec"]["containers"][1]


def test_what_the_user_wrote_in_the_template_is_kept() -> None:
    container = {"name": "trainer", "image": "x", "env": [{"name": "TMPDIR", "value": "/big"}], "workingDir": "/src"}
    pod = pod_of(with_containers(container, nodeSelector={"zone": "a"}, automountServiceAccountToken=True))
    trainer = pod["spec"]["containers"][0]
    assert environment(trainer)["TMPDIR"] == "/big"
    assert trainer["workingDir"] == "/src"
    assert pod["spec"]["nodeSelector"] == {"zone": "a"}
    assert pod["spec"]["automountServiceAccountToken"] is True


def test_a_wrong_node_selector_of_the_template_is_refused_where_a_quota_adds_to_it() -> None:
    job = with_containers({"name": "trainer", "image": "x"}, nodeSelector=["zone"]).job()
    with pytest.raises(Refused, match="nodeSelector: must be an object"):
        render(job, 0, JobStatus(), channel_url=CHANNEL, assignment=Assignment(node_selector={"gpu": "a100"}))


@pytest.mark.parametrize("field", ["env", "volumeMounts", "ports", "volumes"])
def test_a_list_of_the_template_may_be_null_and_a_wrong_one_is_refused(field: str) -> None:
    def pod(value: Any) -> dict[str, Any]:
        inside = field != "volumes"
        container = {"name": "trainer", "image": "x"} | ({field: value} if inside else {})
        return pod_of(with_containers(container, **({} if inside else {field: value})))

    assert pod(None) == pod([])
    (odd,) = [item for item in (pod([{"odd": 1}])["spec"], pod([{"odd": 1}])["spec"]["containers"][0]) if field in item]
    assert {"odd": 1} in odd[field], "what it lacks is said by the API server"
    pod([{"name": ["odd"]}])
    for wrong in ({"A": "b"}, ["A=b"], "A=b"):
        with pytest.raises(Refused, match=f"{field}: must be a list of objects"):
            pod(wrong)


def test_a_trainer_that_ended_is_never_restarted() -> None:
    rules = [{"action": "Restart", "exitCodes": {"operator": "In", "values": [2]}}]
    again = {"restartPolicy": "Always", "restartPolicyRules": rules}
    helper = {"name": "logs", "image": "x"} | again
    pod = pod_of(with_containers({"name": "trainer", "image": "x"} | again, helper, restartPolicy="Always"))
    assert pod["spec"]["restartPolicy"] == "Never"
    assert not again.keys() & pod["spec"]["containers"][0].keys()
    assert pod["spec"]["containers"][1] == helper


@pytest.mark.parametrize(("own", "seconds"), [(None, 120), (45, 45)])
def test_a_pod_that_others_evict_has_the_time_that_a_checkpoint_may_take(own: int | None, seconds: int) -> None:
    template = with_containers({"name": "trainer", "image": "x"}, terminationGracePeriodSeconds=own)
    pod = pod_of(template.set("runPolicy.stopTimeoutSeconds", 120))
    assert pod["spec"]["terminationGracePeriodSeconds"] == seconds


@pytest.mark.parametrize(
    ("said", "policy"), [({}, "FallbackToLogsOnError"), (None, "FallbackToLogsOnError"), ("File", "File")]
)
def test_a_crashed_trainer_leaves_the_end_of_its_log_by_default(said: Any, policy: str) -> None:
    own = {} if said == {} else {"terminationMessagePolicy": said}
    pod = pod_of(with_containers({"name": "trainer", "image": "x"} | own))
    assert pod["spec"]["containers"][0]["terminationMessagePolicy"] == policy


def test_a_trainer_leaves_its_last_words_where_the_kubelet_reads_them() -> None:
    pod = pod_of(with_containers({"name": "trainer", "image": "x", "terminationMessagePath": "/tmp/words"}))
    (container,) = pod["spec"]["containers"]
    assert container["terminationMessagePath"] == environment(container)[Env.TERMINATION_LOG]


def test_what_a_quota_adds_stands_beside_what_the_template_says() -> None:
    mine, theirs = {"key": "gpu", "operator": "Exists"}, {"key": "spot", "operator": "Exists"}
    job = with_containers({"name": "trainer", "image": "x"}, nodeSelector={"zone": "a"}, tolerations=[mine])
    job.set("podTemplate.metadata", {"labels": {"a": "b"}, "annotations": {"c": "d"}})
    quota = Assignment({"e": "f"}, {"g": "h"}, {"pool": "p"}, [theirs])
    pod = render(job.job(), 3, JobStatus(), channel_url=CHANNEL, assignment=quota)
    assert {"a": "b", "e": "f"}.items() <= pod["metadata"]["labels"].items()
    assert pod["metadata"]["annotations"] == {"c": "d", "g": "h"}
    assert (pod["spec"]["nodeSelector"], pod["spec"]["tolerations"]) == ({"zone": "a", "pool": "p"}, [mine, theirs])


def test_what_a_worker_is_told_to_read_and_where_to_write_is_mounted() -> None:
    spec = pod_of(make_job())["spec"]
    (container,) = spec["containers"]
    given, volumes = environment(container), {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert volumes[mounts[given["TMPDIR"]]["name"]]["emptyDir"] == {}
    assert given["HF_HOME"].startswith(f"{given['TMPDIR']}/")
    folder, _, authority = given[Env.CHANNEL_CA_FILE].rpartition("/")
    token, config_map = volumes[mounts[folder]["name"]]["projected"]["sources"]
    assert f"{folder}/{token['serviceAccountToken']['path']}" == given[Env.CHANNEL_TOKEN_FILE]
    assert config_map["configMap"] == {"name": CA_CONFIG_MAP, "items": [{"key": CA_FILE, "path": authority}]}


def test_a_pod_has_the_metadata_of_its_template_and_our_name_and_owner() -> None:
    # As from a pod of another job.
    copied = {JOB_LABEL: "other", WORKER_LABEL: "9", CLAIMED_LABEL: "true", PLACEMENT_GROUP_LABEL: "2-7"}
    theirs = {"labels": {"a": "b"} | copied, "annotations": {"c": "d"}, "finalizers": ["example.com/logs"]}
    job = make_job().set("podTemplate.metadata", theirs | {"name": "x", "ownerReferences": [{"uid": "other"}]})
    metadata = pod_of(job)["metadata"]
    assert (metadata["labels"]["a"], metadata["annotations"]["c"]) == ("b", "d")
    assert [metadata["labels"][label] for label in copied] == ["digits", "3", "false", ""]
    assert metadata["finalizers"] == ["example.com/logs"]
    assert (metadata["name"], len(metadata["ownerReferences"])) == ("digits-w3", 1)
    assert pod_of(make_job().set("podTemplate.metadata", {"finalizers": None})) == pod_of(make_job())


def test_the_user_cannot_pretend_to_be_another_worker() -> None:
    container = {"name": "trainer", "image": "x", "env": [{"name": Env.WORKER_NAME, "value": "other"}]}
    pod = pod_of(with_containers(container))
    assert environment(pod["spec"]["containers"][0])[Env.WORKER_NAME] == "digits-w3"


def test_a_variable_of_the_template_may_refer_to_the_operators() -> None:
    """A kubelet replaces only what an earlier variable gives."""
    mine = {"name": "LOG", "value": f"/logs/$({Env.WORKER_NAME})"}
    (container,) = pod_of(with_containers({"name": "trainer", "image": "x", "env": [mine]}))["spec"]["containers"]
    names = [entry["name"] for entry in container["env"]]
    assert mine in container["env"] and names.index(Env.WORKER_NAME) < names.index("LOG")


def test_a_worker_has_no_kubernetes_token_but_one_for_the_channel() -> None:
    spec = pod_of(make_job())["spec"]
    assert spec["automountServiceAccountToken"] is False
    sources = next(volume for volume in spec["volumes"] if "projected" in volume)["projected"]["sources"]
    assert sources[0]["serviceAccountToken"]["audience"] == TOKEN_AUDIENCE


@pytest.mark.parametrize("path", ["/dev/shm", "/dev/shm/"])
def test_shared_memory_has_a_size_unless_the_template_mounts_its_own(path: str) -> None:
    volumes = {volume["name"]: volume for volume in pod_of(make_job())["spec"]["volumes"]}
    assert volumes["pipetransformer-shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    own = {"name": "trainer", "image": "x", "volumeMounts": [{"name": "mine", "mountPath": path}]}
    names = [volume["name"] for volume in pod_of(with_containers(own, volumes=[{"name": "mine"}]))["spec"]["volumes"]]
    assert "pipetransformer-shm" not in names


@pytest.mark.parametrize(
    ("location", "results", "run_dir"),
    [
        ("/mnt/out", "/mnt/out/digits", "/mnt/out/digits"),
        ("s3://bucket/out/", "s3://bucket/out/digits", "/scratch/run/digits"),
    ],
)
def test_each_job_has_its_own_folder_in_the_output(location: str, results: str, run_dir: str) -> None:
    pod = pod_of(make_job().set("output", {"location": location}))
    given = environment(pod["spec"]["containers"][0])
    assert json.loads(given[Env.JOB_SPEC])["output"]["location"] == results
    assert given[Env.RUN_DIR] == run_dir


def test_a_worker_is_wanted_near_its_group_unless_the_template_says_otherwise() -> None:
    pod = render(make_job().job(), 3, JobStatus(), channel_url=CHANNEL, group="2-1")
    assert pod["metadata"]["labels"][PLACEMENT_GROUP_LABEL] == "2-1"
    near = pod["spec"]["affinity"]["podAffinity"][PREFERRED]
    assert near[0]["podAffinityTerm"]["labelSelector"]["matchLabels"][PLACEMENT_GROUP_LABEL] == "2-1"
    keys = [(term["podAffinityTerm"]["topologyKey"], term["weight"]) for term in near]
    assert keys == [("kubernetes.io/hostname", 100), ("topology.kubernetes.io/zone", 50)]
    (far,) = pod["spec"]["affinity"]["podAntiAffinity"][PREFERRED]
    assert far["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname" and 1 <= far["weight"] < 50
    container = {"name": "trainer", "image": "x"}
    for kind in ("podAffinity", "podAntiAffinity"):
        own: dict[str, Any] = {kind: {}}
        assert pod_of(with_containers(container, affinity=own))["spec"]["affinity"] == own
    assert not pod_of(with_containers(container, topologySpreadConstraints=[]))["spec"]["affinity"]


def test_the_only_group_of_a_job_keeps_distance_only_if_the_job_asks_for_it() -> None:
    job = make_job().job()
    alone = render(job, 3, JobStatus(), channel_url=CHANNEL, group="2-0", alone=True)["spec"]["affinity"]
    beside = render(job, 3, JobStatus(), channel_url=CHANNEL, group="2-1")["spec"]["affinity"]
    assert alone.keys() == {"podAffinity"}
    assert beside.keys() == {"podAffinity", "podAntiAffinity"}
    asking = make_job().set("placement", {"spread": {"topologyKey": RACK}}).job()
    assert "podAntiAffinity" in render(asking, 3, JobStatus(), channel_url=CHANNEL, alone=True)["spec"]["affinity"]


def test_a_null_in_a_template_is_as_if_nothing_was_said() -> None:
    """Of a Helm value that was left empty, say. The API server, too, takes it for absent."""
    unsaid = ("automountServiceAccountToken", "priorityClassName", "dnsPolicy", "topologySpreadConstraints", "affinity")
    job = with_containers({"name": "trainer", "image": "x"}, hostNetwork=True, **dict.fromkeys(unsaid)).job()
    plain = with_containers({"name": "trainer", "image": "x"}, hostNetwork=True).job()
    rendered, expected = (
        render(one, 3, JobStatus(), channel_url=CHANNEL, classes=PriorityClasses("base")) for one in (job, plain)
    )
    assert rendered == expected
    assert rendered["spec"]["automountServiceAccountToken"] is False
    assert rendered["spec"]["priorityClassName"] == "base"
    near = with_containers({"name": "trainer", "image": "x"}, affinity={"podAffinity": None})
    assert pod_of(near)["spec"]["affinity"]["podAffinity"]


A100 = {"key": "gpu", "operator": "In", "values": ["a100"]}
NEAR: dict[str, Any] = {"podAffinity": {PREFERRED: []}}


@pytest.mark.parametrize("spread", [{}, {"topologySpreadConstraints": []}])
@pytest.mark.parametrize("pods", [{}, NEAR])
@pytest.mark.parametrize(
    "nodes",
    [{}, {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [A100]}]}}],
)
def test_a_templates_node_affinity_is_kept_beside_placement_and_avoidance(
    nodes: dict[str, Any], pods: dict[str, Any], spread: dict[str, Any]
) -> None:
    wishes = {"nodeAffinity": nodes, **pods} if nodes else pods
    job = with_containers({"name": "trainer", "image": "x"}, affinity=wishes, **spread)
    placed = pod_of(job)["spec"]["affinity"]
    assert placed.get("nodeAffinity", {}) == nodes
    kinds = {"podAffinity", "podAntiAffinity"} & placed.keys()
    assert kinds == (pods.keys() if pods or spread else {"podAffinity", "podAntiAffinity"})
    avoiding = render(job.job(), 3, JobStatus(), channel_url=CHANNEL, doubted=["bad", "worse"])["spec"]["affinity"]
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("bad", "worse")]
    assert avoiding == wishes | {
        "nodeAffinity": nodes | {PREFERRED: [{"weight": 100, "preference": {"matchFields": fields}}]}
    }


def test_a_templates_node_preferences_are_kept_beside_ours() -> None:
    mine = {"weight": 7, "preference": {"matchExpressions": [A100]}}
    job = with_containers({"name": "trainer", "image": "x"}, affinity={"nodeAffinity": {PREFERRED: [mine]}})
    avoiding = render(job.job(), 3, JobStatus(), channel_url=CHANNEL, doubted=["bad"])["spec"]["affinity"]
    assert [term["weight"] for term in avoiding["nodeAffinity"][PREFERRED]] == [7, 100]
    assert pod_of(job)["spec"]["affinity"]["nodeAffinity"] == {PREFERRED: [mine]}, "the template is as it was"


@pytest.mark.parametrize("wrong", [[], "x", {"nodeAffinity": []}, {"nodeAffinity": {PREFERRED: {}}}])
def test_an_affinity_that_is_none_is_refused_with_the_fields_name(wrong: Any) -> None:
    job = with_containers({"name": "trainer", "image": "x"}, affinity=wrong).job()
    with pytest.raises(Refused, match="must be a"):
        render(job, 3, JobStatus(), channel_url=CHANNEL, doubted=["bad"])


@pytest.mark.parametrize(("named", "expected"), [("autoscaled", "autoscaled"), ("", "claimed")])
def test_an_autoscaler_may_add_nodes_for_claims_of_jobs_that_ask_for_it(named: str, expected: str) -> None:
    classes = PriorityClasses("base", "claimed", named)
    status = JobStatus(num_shards=4, claimed_ids=[3])
    job = make_job().set("elasticPolicy.claimFrom", "Autoscaler").job()
    pods = [render(one, 3, status, channel_url=CHANNEL, classes=classes) for one in (make_job().job(), job)]
    assert [pod["spec"]["priorityClassName"] for pod in pods] == ["claimed", expected]


@pytest.mark.parametrize(
    ("template", "claimed", "expected"),
    [(None, False, "base"), (None, True, "claimed"), ("mine", False, "mine"), ("mine", True, "claimed")],
)
def test_claimed_workers_have_their_own_priority_class(template: str | None, claimed: bool, expected: str) -> None:
    spec = {"priorityClassName": template} if template else {}
    job = with_containers({"name": "trainer", "image": "x"}, **spec).job()
    status = JobStatus(num_shards=4, claimed_ids=[3] if claimed else [])
    classes = PriorityClasses("base", "claimed")
    pod = render(job, 3, status, channel_url=CHANNEL, classes=classes)
    assert pod["spec"]["priorityClassName"] == expected
    assert "priorityClassName" not in pod_of(make_job())["spec"]
    assert PriorityClasses().of(job, claimed=claimed) == (template or ""), "that of its pods, for their group"


@pytest.mark.parametrize("claimed", [False, True])
def test_a_templates_number_of_a_priority_does_not_contradict_the_class_that_the_operator_sets(claimed: bool) -> None:
    """As in a template that was made from a pod. The API server refuses a pod with the number of another class."""
    theirs = {"priority": 0, "preemptionPolicy": "PreemptLowerPriority"}
    job = with_containers({"name": "trainer", "image": "x"}, **theirs).job()
    status = JobStatus(num_shards=4, claimed_ids=[3] if claimed else [])
    pod = render(job, 3, status, channel_url=CHANNEL, classes=PriorityClasses("base", "claimed"))
    assert "priority" not in pod["spec"]
    assert ("preemptionPolicy" in pod["spec"]) is not claimed, "the class of claims preempts nobody"
    assert render(job, 3, status, channel_url=CHANNEL)["spec"]["priority"] == 0


def test_the_job_controls_its_pods_and_a_foreground_deletion_waits_for_them() -> None:
    job = make_job().job()
    pod = pod_of(make_job())
    assert controller_uid(pod) == job.metadata.uid
    (owner,) = pod["metadata"]["ownerReferences"]
    assert (owner["apiVersion"], owner["kind"]) == (job.api_version, job.kind) and owner["blockOwnerDeletion"] is True


def test_a_worker_shows_its_metrics_on_a_port_with_a_name() -> None:
    (container,) = pod_of(make_job())["spec"]["containers"]
    assert environment(container)[Env.METRICS_PORT] == "9464"
    assert container["ports"] == [{"name": "pt-metrics", "containerPort": 9464, "protocol": "TCP"}]


def test_a_port_of_metrics_that_the_template_names_is_not_named_twice() -> None:
    """The API server refuses two ports of one name."""
    ports = [{"name": "web", "containerPort": 80}, {"name": "pt-metrics", "containerPort": 9464}]
    for theirs, expected in ((ports, ports), (ports[:1], [ports[0], ports[1] | {"protocol": "TCP"}])):
        trainer = {"name": "trainer", "image": "x", "ports": theirs}
        (container,) = pod_of(with_containers(trainer))["spec"]["containers"]
        assert container["ports"] == expected


def test_a_worker_takes_no_port_of_its_node() -> None:
    (container,) = pod_of(with_containers({"name": "trainer", "image": "x"}, hostNetwork=True))["spec"]["containers"]
    assert "ports" not in container
    assert environment(container)[Env.METRICS_PORT] == "", "not what a Service of that name would set it to"


def test_a_worker_may_be_given_a_port_of_its_node() -> None:
    own = {"name": Env.METRICS_PORT, "value": "9000"}
    trainer = {"name": "trainer", "image": "x", "env": [own]}
    (container,) = pod_of(with_containers(trainer, hostNetwork=True))["spec"]["containers"]
    assert [one for one in container["env"] if one["name"] == Env.METRICS_PORT] == [own]


def test_a_worker_on_the_host_network_resolves_names_of_the_cluster() -> None:
    trainer = {"name": "trainer", "image": "x"}
    assert "dnsPolicy" not in pod_of(with_containers(trainer))["spec"]
    for theirs in (None, "", "ClusterFirst"):  # as charts and `kubectl run` write it
        pod = pod_of(with_containers(trainer, hostNetwork=True, dnsPolicy=theirs))
        assert pod["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    own = with_containers(trainer, hostNetwork=True, dnsPolicy="None")
    assert pod_of(own)["spec"]["dnsPolicy"] == "None"


def test_prometheus_alone_may_connect_from_outside_and_to_the_metrics_only() -> None:
    assert len(network_policy(make_job().job(), "")["spec"]["ingress"]) == 1
    _, allowed = network_policy(make_job().job(), "monitoring")["spec"]["ingress"]
    assert allowed["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert [port["port"] for port in allowed["ports"]] == [9464]


@pytest.mark.parametrize(("unready", "policy"), [(False, "AlwaysAllow"), (True, "IfHealthyBudget")])
def test_a_worker_whose_pod_is_not_ready_goes_at_once_only_where_it_is_not_kept(unready: bool, policy: str) -> None:
    budget = disruption_budget(make_job().job(), DisruptionBudget(2, claimed=False, unready=unready))
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == policy


def test_a_budget_covers_claimed_workers_only_where_they_are_needed() -> None:
    job = make_job().job()
    status = JobStatus(worker_ids=[0, 1], claimed_ids=[1], num_shards=1, initial_workers=1)
    pods = [render(job, worker, status, channel_url="https://channel")["metadata"]["labels"] for worker in (0, 1)]
    covered = []
    for claimed in (False, True):
        budget = disruption_budget(job, DisruptionBudget(1, claimed=claimed, unready=True))
        selector = budget["spec"]["selector"]["matchLabels"]
        covered.append([selector.items() <= labels.items() for labels in pods])
    assert covered == [[True, False], [True, True]]


RACK = "topology.kubernetes.io/rack"


@pytest.mark.parametrize("affinity", [None, {"podAffinity": {PREFERRED: []}}])
@pytest.mark.parametrize("required", [False, True])
def test_a_pipeline_stays_within_the_nodes_that_the_job_names(required: bool, affinity: dict[str, Any] | None) -> None:
    job = with_containers({"name": "trainer", "image": "x"}, affinity=affinity)
    job.set("placement", {"within": {"topologyKey": RACK, "required": required}})
    pod = render(job.job(), 3, JobStatus(), channel_url=CHANNEL, group="2-1", doubted=["bad"] if required else [])
    near = pod["spec"]["affinity"]["podAffinity"]
    terms = near[REQUIRED] if required else [one["podAffinityTerm"] for one in near[PREFERRED]]
    (term,) = (term for term in terms if term["topologyKey"] == RACK)
    assert term["labelSelector"]["matchLabels"] == {JOB_LABEL: "digits", PLACEMENT_GROUP_LABEL: "2-1"}
    assert (REQUIRED in near) is required
    assert {one["weight"] for one in near.get(PREFERRED, [])} <= {100, 50}


@pytest.mark.parametrize("required", [False, True])
def test_pipelines_are_spread_over_the_nodes_that_the_job_names(required: bool) -> None:
    job = make_job().set("placement", {"spread": {"topologyKey": RACK, "required": required}})
    pod = render(job.job(), 3, JobStatus(), channel_url=CHANNEL, group="2-1", unfit=["bad"] if required else [])
    far = pod["spec"]["affinity"]["podAntiAffinity"]
    (entry,) = far[REQUIRED if required else PREFERRED]
    term = entry if required else entry["podAffinityTerm"]
    assert required or entry["weight"] == 10
    assert term["topologyKey"] == RACK
    others = {"key": PLACEMENT_GROUP_LABEL, "operator": "NotIn", "values": ["2-1"]}
    assert term["labelSelector"] == {"matchLabels": {JOB_LABEL: "digits"}, "matchExpressions": [others]}
