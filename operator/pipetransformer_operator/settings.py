"""The operator's settings, from its environment."""

import json
import logging
import os
import platform
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from aiolimiter import AsyncLimiter

from pipetransformer_contract.logs import LogFormat

from .kube.node_health.signals import Signals
from .kube.workers.pod_groups import SCHEDULERS

EVERY_CLUSTERS_NAMESPACE = "default"


@dataclass(frozen=True)
class Settings:
    """See `from_environment` for the variables."""

    namespace: str
    identity: str
    channel_url: str
    lease_seconds: int = 15
    own_lease_namespace: str = ""
    api_qps: float = 0
    api_burst: int = 0
    channel_port: int = 8443
    metrics_port: int = 8080
    health_port: int = 8081
    host: str = ""
    namespaces: tuple[str, ...] = ()
    certificate_dir: str = ""
    base_priority_class: str = ""
    claim_priority_class: str = ""
    autoscaled_priority_class: str = ""
    weigh_namespaces: bool = False
    scraper_namespace: str = ""
    kueue: bool = False
    release_for_others: bool = False
    signals: Signals = field(default_factory=Signals)
    gang_scheduling: str = ""
    secure_metrics: bool = False
    log_level: str = "INFO"
    log_format: LogFormat = LogFormat.TEXT

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Settings":
        """Reads the environment.

        `POD_NAMESPACE`: the operator's own namespace.
        `POD_ID`: its pod's UID, which becomes the holder of the lease.
        `PIPETRANSFORMER_LEASE_SECONDS`: how long an operator may be silent before another takes over.
        `PIPETRANSFORMER_LEASE_NAMESPACE`: namespace of the lease, see `lease_namespace`.
        `PIPETRANSFORMER_API_QPS`: requests a second to the API server, over time; 0 for no limit.
        `PIPETRANSFORMER_API_BURST`: number of requests that need not wait for this rate; 0 for twice the rate.
        `PIPETRANSFORMER_CHANNEL_URL`: URL of the channel for pods.
        `PIPETRANSFORMER_{CHANNEL,METRICS,HEALTH}_PORT`: ports to listen on.
        `PIPETRANSFORMER_HOST`: address to listen on; all when empty.
        `PIPETRANSFORMER_NAMESPACES`: namespaces to serve, separated by commas; all when empty.
        `PIPETRANSFORMER_SECURE_METRICS`: `true` if metrics have TLS and the API server decides who may read them.
        `PIPETRANSFORMER_LOG_LEVEL`: lowest level of log lines.
        `PIPETRANSFORMER_LOG_FORMAT`: `Text` or `Json`, see `pipetransformer_contract.logs`.
        `PIPETRANSFORMER_CERTIFICATE_DIR`: folder with the channel's tls.crt, tls.key and ca.crt. When empty, the
        operator makes its own.
        `PIPETRANSFORMER_{BASE,CLAIM}_PRIORITY_CLASS`: for workers up to a job's starting size, and for those beyond.
        `PIPETRANSFORMER_AUTOSCALED_PRIORITY_CLASS`: for those beyond with `claimFrom: Autoscaler`; empty: as of others.
        `PIPETRANSFORMER_WEIGHTS`: `Cluster` if weights of jobs also count between namespaces, otherwise `Namespace`.
        `PIPETRANSFORMER_SCRAPER_NAMESPACE`: namespace of Prometheus, which may read the workers' metrics; empty: none.
        `PIPETRANSFORMER_KUEUE`: `true` if jobs that name a queue request workers from Kueue.
        `PIPETRANSFORMER_NODE_SIGNALS`: the chart's value `nodes` as JSON: taints and conditions of nodes that are
        drained or unhealthy. `kube.node_health.signals` has the defaults.
        `PIPETRANSFORMER_GANG_SCHEDULING`: how the scheduler knows pods that need nodes all at once: `PodGroup`,
        `Volcano`, or `None`.
        `PIPETRANSFORMER_RELEASE_FOR_OTHERS`: `true` if jobs release claimed workers for pods of other owners with
        higher priority.

        Raises:
            ValueError: a variable is missing or invalid; the message names it.
        """
        url = _channel_url(environment.get("PIPETRANSFORMER_CHANNEL_URL", ""))
        if not environment.get("POD_NAMESPACE"):
            raise ValueError("POD_NAMESPACE is missing: set it to the operator's own namespace")
        release_for_others = _switch(environment, "RELEASE_FOR_OTHERS")
        if release_for_others and environment.get("PIPETRANSFORMER_NAMESPACES"):
            raise ValueError(
                "PIPETRANSFORMER_RELEASE_FOR_OTHERS: only an operator of all namespaces sees pods of other owners"
            )
        return cls(
            namespace=environment["POD_NAMESPACE"],
            identity=environment.get("POD_ID") or f"{platform.node()}-{secrets.token_hex(4)}",
            channel_url=url,
            lease_seconds=_seconds(environment, "LEASE", cls.lease_seconds),
            own_lease_namespace=environment.get("PIPETRANSFORMER_LEASE_NAMESPACE", ""),
            api_qps=_number(environment, "API_QPS"),
            api_burst=_burst(environment),
            channel_port=_port(environment, "CHANNEL", cls.channel_port),
            metrics_port=_port(environment, "METRICS", cls.metrics_port),
            health_port=_port(environment, "HEALTH", cls.health_port),
            host=environment.get("PIPETRANSFORMER_HOST", cls.host),
            namespaces=served_namespaces(environment),
            certificate_dir=environment.get("PIPETRANSFORMER_CERTIFICATE_DIR", ""),
            base_priority_class=environment.get("PIPETRANSFORMER_BASE_PRIORITY_CLASS", ""),
            claim_priority_class=environment.get("PIPETRANSFORMER_CLAIM_PRIORITY_CLASS", ""),
            autoscaled_priority_class=environment.get("PIPETRANSFORMER_AUTOSCALED_PRIORITY_CLASS", ""),
            weigh_namespaces=_weigh_namespaces(environment.get("PIPETRANSFORMER_WEIGHTS", "Namespace")),
            scraper_namespace=environment.get("PIPETRANSFORMER_SCRAPER_NAMESPACE", ""),
            kueue=_switch(environment, "KUEUE"),
            release_for_others=release_for_others,
            signals=_signals(environment.get("PIPETRANSFORMER_NODE_SIGNALS", "")),
            gang_scheduling=_gang_scheduling(environment.get("PIPETRANSFORMER_GANG_SCHEDULING", "None")),
            secure_metrics=_switch(environment, "SECURE_METRICS"),
            log_level=_log_level(environment.get("PIPETRANSFORMER_LOG_LEVEL", cls.log_level)),
            log_format=LogFormat.from_environment(environment),
        )

    @property
    def lease_namespace(self) -> str:
        """Namespace of the lease. By default, operators that serve the same jobs share it, whatever Helm release they
        belong to."""
        return self.own_lease_namespace or (self.namespace if self.namespaces else EVERY_CLUSTERS_NAMESPACE)

    def api_limiter(self) -> AsyncLimiter | None:
        """The limit of requests to the API server; None for none."""
        if not self.api_qps:
            return None
        burst = self.api_burst or max(1, round(2 * self.api_qps))
        return AsyncLimiter(burst, burst / self.api_qps)

    @property
    def channel_hosts(self) -> tuple[str, ...]:
        """Host names in the channel's certificate."""
        return (urlsplit(self.channel_url).hostname or "",)


def served_namespaces(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The namespaces in `PIPETRANSFORMER_NAMESPACES`; empty: all."""
    return tuple(filter(None, environment.get("PIPETRANSFORMER_NAMESPACES", "").split(",")))


def _channel_url(url: str) -> str:
    with suppress(ValueError):  # such as an IPv6 address without its closing bracket
        parts = urlsplit(url)
        if parts.scheme == "https" and parts.hostname:
            return url
    raise ValueError(f"PIPETRANSFORMER_CHANNEL_URL: expected an https URL, found {url!r}")


def _signals(text: str) -> Signals:
    try:
        return Signals.parse(json.loads(text)) if text else Signals()
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"PIPETRANSFORMER_NODE_SIGNALS: {error}") from error


def _gang_scheduling(value: str) -> str:
    if value != "None" and value not in SCHEDULERS:
        known = ", ".join(["None", *SCHEDULERS])
        raise ValueError(f"PIPETRANSFORMER_GANG_SCHEDULING: expected one of {known}, found {value!r}")
    return "" if value == "None" else value


def _weigh_namespaces(value: str) -> bool:
    if value not in ("Namespace", "Cluster"):
        raise ValueError(f"PIPETRANSFORMER_WEIGHTS: expected one of Namespace, Cluster, found {value!r}")
    return value == "Cluster"


def _log_level(value: str) -> str:
    known = logging.getLevelNamesMapping()
    if value.upper() not in known:
        raise ValueError(f"PIPETRANSFORMER_LOG_LEVEL: expected one of {', '.join(known)}, found {value!r}")
    return value.upper()


def _switch(environment: Mapping[str, str], name: str) -> bool:
    variable = f"PIPETRANSFORMER_{name}"
    text = environment.get(variable, "")
    if text not in ("", "true", "false"):
        raise ValueError(f"{variable}: expected true or false, found {text!r}")
    return text == "true"


def _seconds(environment: Mapping[str, str], name: str, default: int) -> int:
    variable = f"PIPETRANSFORMER_{name}_SECONDS"
    text = environment.get(variable, str(default))
    if not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise ValueError(f"{variable}: expected a positive number of seconds, found {text!r}")
    return int(text)


def _number(environment: Mapping[str, str], name: str) -> float:
    variable = f"PIPETRANSFORMER_{name}"
    text = environment.get(variable, "0")
    try:
        number = float(text)
    except ValueError:
        number = -1
    if not 0 <= number < 2**31:
        raise ValueError(f"{variable}: expected a number from 0, found {text!r}")
    return number


def _burst(environment: Mapping[str, str]) -> int:
    burst = int(_number(environment, "API_BURST"))
    if burst and not _number(environment, "API_QPS"):
        raise ValueError("PIPETRANSFORMER_API_BURST: needs PIPETRANSFORMER_API_QPS, which is 0 (no limit)")
    return burst


def _port(environment: Mapping[str, str], name: str, default: int) -> int:
    variable = f"PIPETRANSFORMER_{name}_PORT"
    text = environment.get(variable, str(default))
    if not text.isdecimal() or not 0 <= int(text) < 65536:
        raise ValueError(f"{variable}: expected a port, found {text!r}")
    return int(text)
