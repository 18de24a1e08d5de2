"""Runs etcd, API server, controller manager and scheduler as processes on loopback, without root.

A control plane without nodes uses `etcd`, `kube-apiserver` and `kubectl` from the folder `KUBEBUILDER_ASSETS`, if set.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from tools.devcluster import debian, gobuild, pki
from tools.devcluster.layout import POD_CIDR, SERVICE_CIDR, Layout
from tools.devcluster.process import Daemon, answers, run, succeeds

_NAMES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
_QPS = ("--kube-api-qps=1000", "--kube-api-burst=1000")


def kubectl_command(layout: Layout) -> list[str]:
    """kubectl with the kubeconfig of this cluster."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    folder = Path(assets) if assets else gobuild.kubernetes(nodes=False)
    return [str(folder / "kubectl"), "--kubeconfig", str(layout.kubeconfig), "--cache-dir", str(layout.run / "kubectl")]


def kubectl(layout: Layout, *arguments: str, stdin: str | None = None) -> str:
    """Run kubectl as the cluster's admin and return its output."""
    return run([*kubectl_command(layout), *arguments], stdin=stdin)


def _answers(layout: Layout, port: int, path: str, *, verify: bool = True) -> bool:
    context = ssl.create_default_context(cafile=str(layout.pki / "ca.crt"))
    if not verify:  # the scheduler signs its own certificate at each start
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return answers(f"https://127.0.0.1:{port}{path}", context)


def start(
    layout: Layout, *, controllers: bool = True, fake_nodes: bool = False, version: str = gobuild.KUBERNETES
) -> None:
    """Start the control plane and return once it serves. `controllers=False` starts only etcd and the API server.

    With `fake_nodes`, nodes are objects without a kubelet, so their leases are not checked. If `version` is
    `KUBERNETES_WITH_GANGS`, the scheduler knows gangs.
    """
    assets = os.environ.get("KUBEBUILDER_ASSETS") if not controllers else None
    debian.obtain(("openssl",) if assets else debian.CONTROL_PLANE)
    binaries = Path(assets) if assets else gobuild.kubernetes(nodes=False, version=version)
    gates = ["--feature-gates=GenericWorkload=true"] if version == gobuild.KUBERNETES_WITH_GANGS else []
    etcd = binaries / "etcd" if assets else debian.program("etcd")
    pki.make(layout)
    certificates = layout.pki
    client, peer = (f"http://127.0.0.1:{port}" for port in (layout.etcd_port, layout.etcd_peer_port))
    Daemon("etcd", layout.run).start(
        [
            etcd,
            "--data-dir",
            layout.state / "etcd",
            "--unsafe-no-fsync",
            "--listen-client-urls",
            client,
            "--advertise-client-urls",
            client,
            "--listen-peer-urls",
            peer,
            "--initial-advertise-peer-urls",
            peer,
            "--initial-cluster",
            f"default={peer}",
        ],
        env=debian.environment(),
    )
    apiserver = Daemon("kube-apiserver", layout.run)
    apiserver.start(
        [
            binaries / "kube-apiserver",
            f"--etcd-servers={client}",
            "--bind-address=127.0.0.1",
            f"--secure-port={layout.port}",
            f"--cert-dir={certificates}",
            f"--tls-cert-file={certificates}/apiserver.crt",
            f"--tls-private-key-file={certificates}/apiserver.key",
            f"--client-ca-file={certificates}/ca.crt",
            f"--token-auth-file={certificates}/tokens.csv",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={certificates}/sa.pub",
            f"--service-account-signing-key-file={certificates}/sa.key",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            "--endpoint-reconciler-type=none",
            f"--kubelet-client-certificate={certificates}/kubelet-client.crt",
            f"--kubelet-client-key={certificates}/kubelet-client.key",
            "--kubelet-preferred-address-types=Hostname,InternalIP",
            *gates,
            *(["--runtime-config=scheduling.k8s.io/v1beta1=true"] if gates else []),
        ]
    )
    apiserver.wait_ready(lambda: _answers(layout, layout.port, "/readyz"))
    if controllers:
        _start_controllers(layout, binaries, gates, fake_nodes=fake_nodes)


def _start_controllers(layout: Layout, binaries: Path, gates: list[str], *, fake_nodes: bool) -> None:
    certificates = layout.pki
    manager = Daemon("kube-controller-manager", layout.run)
    manager.start(
        [
            binaries / "kube-controller-manager",
            f"--kubeconfig={layout.user_kubeconfig('controller-manager')}",
            "--bind-address=127.0.0.1",
            f"--secure-port={layout.controller_manager_port}",
            "--leader-elect=false",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={certificates}/sa.key",
            f"--root-ca-file={certificates}/ca.crt",
            "--allocate-node-cidrs=false",
            f"--cluster-cidr={POD_CIDR}",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            f"--flex-volume-plugin-dir={layout.state}/volume-plugins",
            "--node-monitor-period=1s",
            "--node-monitor-grace-period=8s",
            f"--controllers=*{',-node-lifecycle-controller' if fake_nodes else ''}",
            *gates,
            *_QPS,
        ]
    )
    scheduler = Daemon("kube-scheduler", layout.run)
    scheduler.start(
        [
            binaries / "kube-scheduler",
            f"--kubeconfig={layout.user_kubeconfig('scheduler')}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={layout.scheduler_port}",
            *gates,
            *_QPS,
        ]
    )
    account = [*kubectl_command(layout), "get", "serviceaccount", "default", "--namespace", "default"]
    manager.wait_ready(lambda: succeeds(account))
    scheduler.wait_ready(lambda: _answers(layout, layout.scheduler_port, "/healthz", verify=False))


def stop(layout: Layout) -> None:
    """Stop all processes, clients before servers."""
    for name in reversed(_NAMES):
        Daemon(name, layout.run).stop()


def alive(layout: Layout) -> dict[str, int | None]:
    """Process id of each part; None if it does not run."""
    return {name: Daemon(name, layout.run).pid for name in _NAMES}
