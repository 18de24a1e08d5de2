"""Paths and ports of the development cluster."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

CONTEXT = "pipetransformer-dev"
"""Name of the context in every kubeconfig that this tool writes; tests refuse any other unless told."""

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).resolve().parent

SERVICE_CIDR = "10.96.0.0/16"
API_SERVICE_IP = "10.96.0.1"
DNS_SERVICE_IP = "10.96.0.10"
POD_CIDR = "10.244.0.0/16"
MAX_NODES = 4
NODES = 2
"""Nodes of a cluster that is not told otherwise."""


def cache_dir() -> Path:
    """Folder outside the checkout for programs, images and cluster state."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipetransformer"


@dataclass(frozen=True)
class Layout:
    """Paths and ports of one cluster. Two clusters can run if their names and `port` (the first of 20) differ."""

    name: str = "dev"
    port: int = 16443

    @property
    def state(self) -> Path:
        """Folder that is deleted with the cluster."""
        return cache_dir() / "cluster" / self.name

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def run(self) -> Path:
        """Folder of the control plane's pid files and logs."""
        return self.state / "run"

    @property
    def shared(self) -> Path:
        """Folder that pods on every node can mount by hostPath, as ReadWriteMany storage."""
        return self.state / "shared"

    @property
    def kubeconfig(self) -> Path:
        return self.user_kubeconfig("admin")

    def user_kubeconfig(self, user: str) -> Path:
        return self.state / f"{user}.kubeconfig"

    def node(self, index: int) -> Path:
        return self.state / f"node{index}"

    def node_images(self, index: int) -> Path:
        """A node's image store. It outlives the cluster, because the trainer's image takes a minute to pull."""
        return cache_dir() / "node-images" / self.name / f"node{index}"

    @property
    def snapshot(self) -> Path:
        """The host's earlier state, which `down` restores."""
        return self.state / "host.json"

    @property
    def etcd_port(self) -> int:
        return self.port + 1

    @property
    def etcd_peer_port(self) -> int:
        return self.port + 2

    @property
    def controller_manager_port(self) -> int:
        return self.port + 3

    @property
    def scheduler_port(self) -> int:
        return self.port + 4

    @property
    def registry_port(self) -> int:
        return self.port + 5

    @property
    def proxy_health_port(self) -> int:
        return self.port + 6

    @property
    def proxy_metrics_port(self) -> int:
        return self.port + 7

    @property
    def kueue_port(self) -> int:
        return self.port + 14

    @property
    def kueue_health_port(self) -> int:
        return self.port + 15

    @property
    def volcano_port(self) -> int:
        """The health port of Volcano's scheduler; the next one is that of its controllers."""
        return self.port + 16

    def kubelet_port(self, index: int) -> int:
        return self.port + 10 + index

    @property
    def registry(self) -> str:
        return f"127.0.0.1:{self.registry_port}"

    def control_plane_ports(self) -> list[int]:
        # Kueue and Volcano are processes if there are no nodes.
        added = [self.kueue_port, self.kueue_health_port, self.volcano_port, self.volcano_port + 1]
        return [self.port + offset for offset in range(5)] + added

    def all_ports(self) -> list[int]:
        others = [self.registry_port, self.proxy_health_port, self.proxy_metrics_port]
        return self.control_plane_ports() + others + [self.kubelet_port(i) for i in range(MAX_NODES)]
