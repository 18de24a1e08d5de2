"""The chart as Helm renders it."""

import json
import subprocess
from collections.abc import Sequence
from typing import Any

import yaml

from pipetransformer_contract.api.requests import Object
from tools.devcluster import gobuild
from tools.devcluster.layout import REPOSITORY

from .operating import SYSTEM

CHART = REPOSITORY / "charts" / "pipetransformer"
MONITORING = "monitoring.coreos.com/v1"
MONITORS = ("ServiceMonitor", "PodMonitor", "PrometheusRule")


def template(release: str, kinds: Sequence[str] = (), **values: Any) -> subprocess.CompletedProcess[str]:
    """Helm's answer, without the CRD. The cluster has these kinds, by default of the Prometheus Operator; values are
    JSON."""
    settings = [part for key, value in values.items() for part in ("--set-json", f"{key}={value}")]
    known = [part for kind in kinds for part in ("--api-versions", kind if "/" in kind else f"{MONITORING}/{kind}")]
    command = [str(gobuild.helm()), "template", release, str(CHART), "--namespace", SYSTEM]
    return subprocess.run(
        [*command, "--set", "crds.install=false", *known, *settings], capture_output=True, text=True, check=False
    )


def render(release: str, kinds: Sequence[str] = (), **values: Any) -> list[Object]:
    """What Helm would install, as `template`."""
    done = template(release, kinds, **values)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def monitoring_values(**labels: str) -> str:
    """Everything of `monitoring` switched on."""
    on = {"enabled": True, "labels": labels}
    pods = {**on, "prometheusNamespace": "monitoring"}
    return json.dumps({"serviceMonitor": on, "podMonitor": pods, "prometheusRule": on, "dashboards": on})


def monitors() -> dict[str, Object]:
    """The objects of the Prometheus Operator, by kind."""
    documents = render("x", MONITORS, monitoring=monitoring_values())
    return {document["kind"]: document for document in documents if document["apiVersion"] == MONITORING}
