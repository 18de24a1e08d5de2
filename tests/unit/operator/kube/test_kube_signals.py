"""Taints and conditions of nodes: which mean that workers have to move, and which nodes get none for an hour."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml

from pipetransformer_contract.api import JobStatus
from pipetransformer_operator.kube.node_health.health import NodeHealth
from pipetransformer_operator.kube.node_health.signals import DEFAULT_DRAIN, DEFAULT_UNHEALTHY, Signals
from pipetransformer_operator.kube.workers.placement import PREFERRED, REQUIRED
from pipetransformer_operator.kube.workers.pods import observe
from pipetransformer_operator.kube.workers.rendering import render
from pipetransformer_operator.settings import Settings
from tests.testkit.operator.builders import make_job
from tools.docs.values import CHART

pytestmark = pytest.mark.timeout(60)
NO = {"key": "metadata.name", "operator": "NotIn", "values": ["node-1"]}
ENVIRONMENT = {"PIPETRANSFORMER_CHANNEL_URL": "https://pipetransformer.ops.svc:8443", "POD_NAMESPACE": "ops"}


def node(*taints: dict[str, str], **conditions: str) -> dict[str, Any]:
    shown = [{"type": kind, "status": status} for kind, status in {"Ready": "True", **conditions}.items()]
    return {"metadata": {"name": "node-1"}, "spec": {"taints": list(taints)}, "status": {"conditions": shown}}


def taint(key: str, value: str = "", effect: str = "NoSchedule") -> dict[str, str]:
    return {"key": key, "value": value, "effect": effect}


@pytest.mark.parametrize(
    ("shown", "why", "unhealthy"),
    [
        (node(), "", False),
        (node(taint("nvidia.com/gpu", "present")), "", False),
        (node(taint("karpenter.sh/disrupted")), "taint karpenter.sh/disrupted", False),
        (node(taint("cloud.google.com/impending-node-termination")), "taint cloud.google.com/impending-no", False),
        (
            node(taint("aws-node-termination-handler/spot-itn", "1700")),
            "taint aws-node-termination-handler/spot",
            False,
        ),
        (node(taint("ToBeDeletedByClusterAutoscaler", effect="PreferNoSchedule")), "", False),
        (node(VMEventScheduled="True"), "condition VMEventScheduled=True", False),
        (node(VMEventScheduled="False"), "", False),
        (node(taint("AggregatedNodeHealth", "False")), "taint AggregatedNodeHealth", True),
        (node(taint("AggregatedNodeHealth", "True")), "", False),
        (node(AcceleratedHardwareReady="False"), "condition AcceleratedHardwareReady=False", True),
        (node(AcceleratedHardwareReady="True"), "", False),
        (node(AcceleratedHardwareReady="Unknown"), "", False),
        (node(GPUMissing="True", KernelDeadlock="False"), "condition GPUMissing=True", True),
    ],
)
def test_workers_move_off_a_node_by_the_marks_of_the_clouds(shown: dict[str, Any], why: str, unhealthy: bool) -> None:
    nodes = NodeHealth()
    assert nodes.note(shown, deleted=False) == bool(why)
    pod = {
        "metadata": {"name": "w", "uid": "u", "labels": {"training.pipetransformer.io/worker-id": "0"}},
        "spec": {"nodeName": "node-1"},
    }
    worker = observe(pod, "trainer", nodes)
    assert worker is not None
    assert worker.draining == bool(why) and worker.drain_reason.startswith(why)
    assert nodes.unfit("any job") == (["node-1"] if unhealthy else [])
    nodes.note(node(), deleted=False)
    assert (nodes.draining, nodes.unhealthy, nodes.why_draining) == (set(), set(), {})


def test_the_chart_can_name_other_marks() -> None:
    value = {"drain": {"taints": ["ours/leave=soon:PreferNoSchedule"]}, "unhealthy": {"conditions": ["RackHot"]}}
    nodes = NodeHealth(signals=Signals.parse(value))
    for shown, why in (
        (node(taint("karpenter.sh/disrupted")), ""),
        (node(taint("ours/leave", "soon", "PreferNoSchedule")), "taint ours/leave"),
        (node(taint("ours/leave", "later", "PreferNoSchedule")), ""),
        (node(RackHot="True"), "condition RackHot=True"),
    ):
        nodes.note(shown, deleted=False)
        assert nodes.why_draining.get("node-1", "") == why


def test_the_charts_values_are_the_defaults_and_reach_the_operator_as_they_are() -> None:
    value = yaml.safe_load((CHART / "values.yaml").read_text())["nodes"]
    assert value == {"drain": DEFAULT_DRAIN, "unhealthy": DEFAULT_UNHEALTHY}
    told = {**ENVIRONMENT, "PIPETRANSFORMER_NODE_SIGNALS": json.dumps(value)}
    assert Settings.from_environment(told).signals == Settings.from_environment(ENVIRONMENT).signals == Signals()


@pytest.mark.parametrize(
    "value", ['{"drain": {"taints": ["=x"]}}', '{"drain": {"conditions": ["A=maybe"]}}', "[]", "{", '{"drain": 1}']
)
def test_marks_that_are_none_are_refused_by_the_name_of_their_variable(value: str) -> None:
    with pytest.raises(ValueError, match="PIPETRANSFORMER_NODE_SIGNALS"):
        Settings.from_environment({**ENVIRONMENT, "PIPETRANSFORMER_NODE_SIGNALS": value})


def test_a_node_on_which_a_second_accelerator_fails_is_avoided_for_an_hour() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    nodes = NodeHealth(lambda: now)
    nodes.blame({"uid-1": "node-1", "uid-9": "node-2"})
    nodes.blame({"uid-1": "node-1"})
    assert (nodes.failures, nodes.avoided) == ({"node-1": 1, "node-2": 1}, {}), "the same worker counts once"
    now += timedelta(hours=23)
    nodes.blame({"uid-2": "node-1"})
    assert (nodes.failures["node-1"], nodes.avoided) == (2, {"node-1": now + timedelta(hours=1)})
    now += timedelta(hours=1)
    assert (nodes.avoided, nodes.failures) == ({}, {"node-1": 1}), "the first is a day old"
    now += timedelta(hours=25)
    nodes.blame({"uid-3": "node-1"})
    assert nodes.avoided == {}


def test_an_avoided_node_gets_no_pod_whatever_the_template_requires() -> None:
    job, status = make_job(), JobStatus(num_shards=4)

    def affinity(of: Any) -> Any:
        return render(of.job(), 3, status, channel_url="https://channel", avoided={"node-1": None})["spec"]["affinity"]

    terms = affinity(job)["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert terms == [{"matchFields": [NO]}]
    zones = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in "ab"]
    job.set("podTemplate.spec.affinity.nodeAffinity", {REQUIRED: {"nodeSelectorTerms": zones}, PREFERRED: []})
    terms = affinity(job)["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert terms == [{**zone, "matchFields": [NO]} for zone in zones], "they are alternatives"
    assert REQUIRED not in render(make_job().job(), 3, status, channel_url="https://channel")["spec"]["affinity"].get(
        "nodeAffinity", {}
    )
