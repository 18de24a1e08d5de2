"""Runs the real Kueue, as a pod from its unchanged chart, or as a process if the cluster has no nodes.

The process serves webhooks on loopback, so objects of the chart get its address instead of its Service.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from typing import Any

import yaml

from tools.devcluster import controlplane, gobuild, images
from tools.devcluster.layout import Layout
from tools.devcluster.process import Daemon, answers, run, succeeds, wait_until

Object = dict[str, Any]
NAMESPACE = "kueue-system"
_OF_A_POD = ("APIService", "Deployment", "Service")
_CONFIGURATION = """\
apiVersion: config.kueue.x-k8s.io/v1beta2
kind: Configuration
health: {{healthProbeBindAddress: "127.0.0.1:{health}"}}
metrics: {{bindAddress: "0"}}
webhook: {{host: 127.0.0.1, port: {webhook}, certDir: {certificates}}}
leaderElection: {{leaderElect: false}}
internalCertManagement: {{enable: false}}
integrations: {{frameworks: [batch/job]}}
"""
_SECRET = "kueue-webhook-server-cert"


def daemon(layout: Layout) -> Daemon:
    """Kueue as a process."""
    return Daemon("kueue", layout.run)


def start(layout: Layout) -> None:
    """Apply Kueue's objects, start it as a process, and return once it admits."""
    folder = layout.state / "kueue"
    certificates = folder / "etc/kueue/metrics/certs"  # the only place where Kueue looks for the metrics' certificates
    certificates.mkdir(parents=True, exist_ok=True)
    for name, source in (("tls.crt", "apiserver.crt"), ("tls.key", "apiserver.key")):
        shutil.copy(layout.pki / source, certificates / name)  # valid for loopback, signed by this cluster's authority
    if not (folder / "applied").exists():
        namespace = json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        controlplane.kubectl(layout, "apply", "-f", "-", stdin=namespace)
        definitions = json.dumps({"apiVersion": "v1", "kind": "List", "items": _objects(layout)})
        controlplane.kubectl(layout, "apply", "--server-side", "-f", "-", stdin=definitions)
        # Kueue exits if the API server does not serve its kinds yet.
        list_workloads = [
            *controlplane.kubectl_command(layout),
            "get",
            "workloads.v1beta2.kueue.x-k8s.io",
            "--all-namespaces",
        ]
        wait_until(lambda: succeeds(list_workloads), "Workloads are served")
        (folder / "applied").touch()
    configuration = folder / "configuration.yaml"
    configuration.write_text(
        _CONFIGURATION.format(health=layout.kueue_health_port, webhook=layout.kueue_port, certificates=certificates)
    )
    process = daemon(layout)
    process.start(
        [
            "unshare",
            *(() if os.geteuid() == 0 else ("--user", "--map-root-user")),
            "--mount",
            "sh",
            "-c",
            'mount --bind "$0" /etc && exec "$@"',
            folder / "etc",
            gobuild.kueue(),
            f"--config={configuration}",
            f"--kubeconfig={layout.kubeconfig}",
            "--feature-gates=VisibilityOnDemand=false",
        ]
    )
    process.wait_ready(lambda: answers(f"http://127.0.0.1:{layout.kueue_health_port}/readyz"), seconds=120)


def stop(layout: Layout) -> None:
    """Stop the process. Its objects stay."""
    daemon(layout).stop()


def install(layout: Layout, helm: tuple[str, ...]) -> None:
    """Install Kueue's chart on a cluster with nodes, and return once it is ready."""
    reference = images.push_program(layout, gobuild.kueue(), entry="/manager")
    repository, _, tag = reference.rpartition(":")
    manager = {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "IfNotPresent"},
        "podSecurityContext": {"runAsUser": 65532, "runAsGroup": 65532},
        "resources": {"requests": {"cpu": "100m"}},
    }
    sets = ["--set-json", f"controllerManager={json.dumps({'manager': manager})}"]
    chart = gobuild.kueue_chart()
    run([*helm, "upgrade", "--install", "kueue", chart, "--namespace", NAMESPACE, "--create-namespace", *sets])
    for version in ("v1beta1", "v1beta2"):  # they need request headers, for which this API server has no certificate
        controlplane.kubectl(
            layout, "delete", "--ignore-not-found", "apiservice", f"{version}.visibility.kueue.x-k8s.io"
        )
    wait_until(lambda: _has_certificate(layout), f"Secret {_SECRET} has a certificate", seconds=60)
    # A kubelet reads the Secrets of a running pod every minute or two, but at once if the pod changes.
    controlplane.kubectl(layout, "-n", NAMESPACE, "annotate", "pod", "--all", "--overwrite", "look=now")
    rollout = ("rollout", "status", "deployment/kueue-controller-manager", "--timeout=180s")
    controlplane.kubectl(layout, "-n", NAMESPACE, *rollout)


def uninstall(layout: Layout, helm: tuple[str, ...]) -> None:
    """Remove the chart, its definitions, and all objects of these kinds."""
    run([*helm, "uninstall", "kueue", "--namespace", NAMESPACE, "--wait"])


def _objects(layout: Layout) -> list[Object]:
    rendered = run([gobuild.helm(), "template", "kueue", gobuild.kueue_chart(), "--namespace", NAMESPACE])
    found = [one for one in yaml.safe_load_all(rendered) if one and one["kind"] not in _OF_A_POD]
    authority = base64.b64encode((layout.pki / "ca.crt").read_bytes()).decode()
    for one in found:
        for client in _clients(one):
            path = client.pop("service")["path"]
            client |= {"url": f"https://127.0.0.1:{layout.kueue_port}{path}", "caBundle": authority}
    return found


def _clients(one: Object) -> list[Object]:
    """The parts of an object that say how the API server reaches a webhook."""
    if one["kind"] == "CustomResourceDefinition":
        conversion = one["spec"].get("conversion", {}).get("webhook")
        return [conversion["clientConfig"]] if conversion else []
    return [webhook["clientConfig"] for webhook in one.get("webhooks", [])]


def _has_certificate(layout: Layout) -> bool:
    path = "-o=jsonpath={.data.ca\\.crt}"
    return bool(controlplane.kubectl(layout, "-n", NAMESPACE, "get", "secret", _SECRET, path))
