"""What the operator reads from its environment."""

import pytest

from pipetransformer_operator.settings import Settings

ENVIRONMENT = {"POD_NAMESPACE": "system", "PIPETRANSFORMER_CHANNEL_URL": "https://operator.system.svc:8443"}


def read(**variables: str) -> Settings:
    own = {f"PIPETRANSFORMER_{name}": value for name, value in variables.items()}
    return Settings.from_environment(ENVIRONMENT | own)


def test_operators_of_all_namespaces_share_a_lease_unless_told_otherwise() -> None:
    assert read().lease_namespace == "default"
    assert read(NAMESPACES="a,b").lease_namespace == "system"
    assert read(LEASE_NAMESPACE="leases").lease_namespace == "leases"
    assert read(LEASE_NAMESPACE="leases", NAMESPACES="a").lease_namespace == "leases"


def test_requests_are_limited_only_with_a_rate() -> None:
    assert read().api_limiter() is None
    for qps, burst, limit in (("0.2", "", (1, 5)), ("20", "", (40, 2)), ("20", "10", (10, 0.5))):
        found = read(API_QPS=qps, **({"API_BURST": burst} if burst else {})).api_limiter()
        assert found is not None and (found.max_rate, found.time_period) == limit


@pytest.mark.parametrize(
    ("name", "value"), [("API_QPS", "fast"), ("API_QPS", "-1"), ("API_QPS", "nan"), ("API_BURST", "inf")]
)
def test_a_rate_that_is_no_number_is_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"PIPETRANSFORMER_{name}: expected a number from 0, found '{value}'"):
        read(**{name: value})


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"CHANNEL_URL": "http://operator:8443"}, "CHANNEL_URL: expected an https URL, found 'http://operator:8443'"),
        ({"CHANNEL_URL": "https://"}, "CHANNEL_URL: expected an https URL"),
        ({"CHANNEL_URL": "https://[::1"}, r"CHANNEL_URL: expected an https URL, found 'https://\[::1'"),
        ({"LOG_LEVEL": "chatty"}, "LOG_LEVEL: expected one of .*INFO, DEBUG.*, found 'chatty'"),
        ({"LEASE_SECONDS": "0"}, "LEASE_SECONDS: expected a positive number of seconds, found '0'"),
        ({"LEASE_SECONDS": "1.5"}, "LEASE_SECONDS: expected a positive number"),
        ({"METRICS_PORT": "65536"}, "METRICS_PORT: expected a port, found '65536'"),
        ({"METRICS_PORT": "tcp://10.0.0.1:8080"}, "METRICS_PORT: expected a port"),
        ({"GANG_SCHEDULING": "Always"}, "GANG_SCHEDULING: expected one of None, PodGroup, Volcano, found 'Always'"),
        ({"NODE_SIGNALS": "[]"}, "NODE_SIGNALS"),
        ({"NODE_SIGNALS": '{"drain": {"taints": [":NoSchedule"]}}'}, "NODE_SIGNALS: invalid taint"),
        ({"SECURE_METRICS": "True"}, "SECURE_METRICS: expected true or false, found 'True'"),
        ({"KUEUE": "yes"}, "KUEUE: expected true or false, found 'yes'"),
        ({"RELEASE_FOR_OTHERS": "1"}, "RELEASE_FOR_OTHERS: expected true or false, found '1'"),
        ({"WEIGHTS": "cluster"}, "WEIGHTS: expected one of Namespace, Cluster, found 'cluster'"),
        ({"API_BURST": "9"}, r"API_BURST: needs PIPETRANSFORMER_API_QPS, which is 0 \(no limit\)"),
        ({"RELEASE_FOR_OTHERS": "true", "NAMESPACES": "a"}, "RELEASE_FOR_OTHERS: only an operator of all namespaces"),
    ],
)
def test_a_wrong_variable_is_named(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=f"PIPETRANSFORMER_{words}"):
        read(**variables)


def test_the_bounds_themselves_are_allowed() -> None:
    found = read(LEASE_SECONDS="1", CHANNEL_PORT="0", METRICS_PORT="65535", GANG_SCHEDULING="None", NAMESPACES="a,,b")
    assert (found.lease_seconds, found.channel_port, found.metrics_port) == (1, 0, 65535)
    assert (found.gang_scheduling, found.namespaces) == ("", ("a", "b"))
    assert read(RELEASE_FOR_OTHERS="true").release_for_others
    for text, on in (("true", True), ("false", False), ("", False)):
        assert (read(SECURE_METRICS=text).secure_metrics, read(KUEUE=text).kueue) == (on, on)
    assert (read(WEIGHTS="Cluster").weigh_namespaces, read(WEIGHTS="Namespace").weigh_namespaces) == (True, False)
    with pytest.raises(ValueError, match="POD_NAMESPACE is missing"):
        Settings.from_environment(ENVIRONMENT | {"POD_NAMESPACE": ""})
