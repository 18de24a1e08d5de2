"""A real node: a containerd and a kubelet with their own cgroup, bridge and pod subnet. One machine runs several nodes.

kube-proxy runs once, because the nodes share the host's network. GPUs are counted but not real: a patch of the node's
status sets the capacity, and scheduler and kubelet count the requests of pods.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

from tools.devcluster import debian, gobuild, host, images
from tools.devcluster.controlplane import kubectl
from tools.devcluster.layout import API_SERVICE_IP, DNS_SERVICE_IP, POD_CIDR, Layout
from tools.devcluster.process import CommandError, Daemon, run, succeeds, wait_until

_CONTAINERD_CONFIG = """\
version = 2
root = "{images}"
state = "{node}/containerd"
[grpc]
  address = "{node}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  stream_server_address = "127.0.0.1"
  disable_apparmor = true
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    discard_unpacked_layers = true
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni_plugins}"
    conf_dir = "{node}/cni"
"""


def _subnet(index: int) -> str:
    return f"10.244.{index}"


def _containerd(layout: Layout, index: int) -> Daemon:
    return Daemon("containerd", layout.node(index))


def _kubelet(layout: Layout, index: int) -> Daemon:
    return Daemon("kubelet", layout.node(index))


def _proxy(layout: Layout) -> Daemon:
    return Daemon("kube-proxy", layout.run)


def _ctr(layout: Layout, index: int) -> list[str]:
    return [str(debian.program("ctr")), "--address", f"{layout.node(index)}/containerd.sock", "--namespace", "k8s.io"]


def indices(layout: Layout) -> list[int]:
    """Nodes that were started and not removed."""
    return sorted(int(folder.name.removeprefix("node")) for folder in layout.state.glob("node[0-9]"))


def _write_configs(layout: Layout, index: int, pause_image: str) -> None:
    node = layout.node(index)
    (node / "cni").mkdir(parents=True, exist_ok=True)
    (node / "containerd.toml").write_text(
        _CONTAINERD_CONFIG.format(
            images=layout.node_images(index), node=node, pause=pause_image, cni_plugins=debian.cni_plugins()
        )
    )
    ipam = {
        "type": "host-local",
        "dataDir": f"{node}/ipam",
        "ranges": [[{"subnet": f"{_subnet(index)}.0/24"}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    plugin = {
        "type": "bridge",
        "bridge": host.bridge(index),
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": ipam,
    }
    network = {"cniVersion": "0.4.0", "name": host.node_name(index), "plugins": [plugin]}
    (node / "cni" / "10-bridge.conflist").write_text(json.dumps(network))
    (node / "resolv.conf").touch()  # pods must not use the host's name servers
    kubelet = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "127.0.0.1",
        "port": layout.kubelet_port(index),
        "healthzPort": 0,
        "readOnlyPort": 0,
        "failCgroupV1": False,
        "failSwapOn": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{host.node_name(index)}",
        "enforceNodeAllocatable": [],
        "resolvConf": f"{node}/resolv.conf",
        "clusterDNS": [DNS_SERVICE_IP],
        "clusterDomain": "cluster.local",
        "podLogsDir": f"{node}/pod-logs",
        "volumePluginDir": f"{node}/volume-plugins",
        "containerRuntimeEndpoint": f"unix://{node}/containerd.sock",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{layout.pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
        "imageGCHighThresholdPercent": 100,
        "makeIPTablesUtilChains": False,
        "nodeStatusUpdateFrequency": "4s",
        "serializeImagePulls": False,
    }
    (node / "kubelet.yaml").write_text(json.dumps(kubelet, indent=1))


def start(layout: Layout, index: int, *, pause_image: str, gpus: int) -> None:
    """Start node `index` with `gpus` counted accelerators, and return once it is Ready."""
    binaries, env, node, name = gobuild.kubernetes(), debian.environment(), layout.node(index), host.node_name(index)
    host.remember(layout)
    _write_configs(layout, index, pause_image)
    containerd = _containerd(layout, index)
    containerd.start([debian.program("containerd"), "--config", node / "containerd.toml"], env=env)
    containerd.wait_ready(lambda: succeeds([*_ctr(layout, index), "version"], env=env))
    kubelet = _kubelet(layout, index)
    if kubelet.pid is None:  # an earlier, killed cluster may have left entries in the image store
        _remove_containers(layout, index)
    host.name_node(index)
    host.make_cgroups(index)
    host.make_bridge(layout, index, f"{_subnet(index)}.1/24", API_SERVICE_IP)
    kubelet.start(
        [
            binaries / "kubelet",
            f"--config={node}/kubelet.yaml",
            f"--kubeconfig={layout.user_kubeconfig(name)}",
            f"--hostname-override={name}",
            f"--root-dir={node}/kubelet",
            f"--cert-dir={node}/kubelet-pki",
        ],
        env=env,
    )
    _proxy(layout).start(
        [
            binaries / "kube-proxy",
            f"--kubeconfig={layout.user_kubeconfig('proxy')}",
            "--proxy-mode=nftables",
            f"--cluster-cidr={POD_CIDR}",
            f"--hostname-override={name}",
            "--nodeport-addresses=127.0.0.0/8",
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0s",
            "--conntrack-tcp-timeout-close-wait=0s",
            f"--healthz-bind-address=127.0.0.1:{layout.proxy_health_port}",
            f"--metrics-bind-address=127.0.0.1:{layout.proxy_metrics_port}",
        ],
        env=env,
    )
    kubelet.wait_ready(lambda: _is_ready(layout, name))
    capacity = {"status": {"capacity": {"nvidia.com/gpu": str(gpus)}, "allocatable": {"nvidia.com/gpu": str(gpus)}}}
    kubectl(layout, "patch", "node", name, "--subresource=status", "--type=merge", "-p", json.dumps(capacity))


def _is_ready(layout: Layout, name: str) -> bool:
    query = '{.status.conditions[?(@.type=="Ready")].status}'
    try:
        return kubectl(layout, "get", "node", name, "-o", f"jsonpath={query}") == "True"
    except CommandError:  # not registered yet
        return False


def _remove_containers(layout: Layout, index: int) -> None:
    ctr, env = _ctr(layout, index), debian.environment()
    for container in run([*ctr, "containers", "list", "--quiet"], env=env).split():
        succeeds([*ctr, "tasks", "delete", "--force", container], env=env)  # fails if the container has no task
        run([*ctr, "containers", "delete", container], env=env)


def _remove_old_builds(layout: Layout, index: int) -> None:
    """Remove images of replaced builds from the image store. containerd deletes their layers."""
    last = images.published(layout).values()
    if not last:
        return
    ctr, env = _ctr(layout, index), debian.environment()
    rows = [line.split()[:3] for line in run([*ctr, "images", "list"], env=env).splitlines()[1:]]
    ours = tuple(f"{layout.registry}/{images.short_name(target)}" for target in images.TARGETS)
    kept = {digest for name, _, digest in rows if name in last or not name.startswith((*ours, "sha256:"))}
    old = {digest for name, _, digest in rows if name.startswith(ours)} - kept
    if gone := [name for name, _, digest in rows if digest in old]:
        succeeds(
            [*ctr, "images", "remove", "--sync", *gone], env=env
        )  # a failure is retried next time; the node must stop anyway


def _kill_strays(layout: Layout, index: int) -> None:
    """Kill processes that survived containerd. Return once they have ended, because until then their cgroups stay."""

    def ended() -> bool:
        strays = _strays(layout, index)
        for pid in strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not strays

    wait_until(ended, f"all processes of {host.node_name(index)} ended")


def _strays(layout: Layout, index: int) -> set[int]:
    """Shims with the path of containerd's socket, and processes in the node's cgroups."""
    socket = f"{layout.node(index)}/containerd.sock".encode()
    strays = {int(p.parent.name) for p in Path("/proc").glob("[0-9]*/cmdline") if socket in _read(p).split(b"\0")}
    for group in [host.CGROUPS / host.node_name(index), *host.CGROUPS.glob(f"*/{host.node_name(index)}")]:
        for procs in group.rglob("cgroup.procs"):
            strays |= {int(pid) for pid in _read(procs).split()}
    return strays - {0}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process ended meanwhile, or the cgroup went
        return b""


def stop(layout: Layout, index: int) -> None:
    """Stop the node and its pods, and clean the host."""
    _kubelet(layout, index).stop()
    if index == 0:
        _proxy(layout).stop()
    containerd = _containerd(layout, index)
    if containerd.pid is not None:
        _remove_containers(layout, index)
        _remove_old_builds(layout, index)
    containerd.stop()
    _kill_strays(layout, index)
    host.remove_node(layout, index)


def alive(layout: Layout) -> dict[str, int | None]:
    """Process id of each part of each node; None if it does not run."""
    parts = {f"node{i}/{d.name}": d.pid for i in indices(layout) for d in (_containerd(layout, i), _kubelet(layout, i))}
    return {**parts, "kube-proxy": _proxy(layout).pid} if parts else {}
