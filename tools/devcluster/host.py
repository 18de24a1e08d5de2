"""Changes that nodes make to the host, and their removal.

`remember` saves the host's state before the first node starts. `restore` needs nothing else, so it also cleans up after
a killed run. Both touch only names that contain the cluster's state folder, its nodes or its nft tables.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from tools.devcluster import debian
from tools.devcluster.layout import MAX_NODES, Layout
from tools.devcluster.process import run, succeeds, write_whole

NFT_TABLE = "pipetransformer-dev"
CGROUPS = Path("/sys/fs/cgroup")

_NFT_TABLES = (("ip", "kube-proxy"), ("ip6", "kube-proxy"), ("ip", NFT_TABLE))
_HOSTS = Path("/etc/hosts")
_SYSCTLS = (
    "net/ipv4/ip_forward",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
_FOLDERS = (
    "/etc/cni",
    "/opt/cni",
    "/run/containerd",
    "/run/netns",
    "/usr/libexec/kubernetes",
    "/var/lib/cni",
    "/var/lib/containerd",
    "/var/lib/kubelet",
    "/var/log/containers",
    "/var/log/pods",
)


def bridge(index: int) -> str:
    """Name of a node's bridge."""
    return f"ptdev{index}"


def node_name(index: int) -> str:
    return f"node{index}"


def _hosts_line(index: int) -> str:
    return f"127.0.0.1 {node_name(index)} # {NFT_TABLE}"


def _set_sysctl(name: str, value: str) -> None:
    (Path("/proc/sys") / name).write_text(value)


def remember(layout: Layout) -> None:
    """Save sysctls and existing folders. An earlier snapshot is kept."""
    if layout.snapshot.exists():
        return
    sysctls = {name: (Path("/proc/sys") / name).read_text().strip() for name in _SYSCTLS}
    folders = [folder for folder in _FOLDERS if Path(folder).exists()]
    layout.snapshot.parent.mkdir(parents=True, exist_ok=True)
    write_whole(layout.snapshot, json.dumps({"sysctls": sysctls, "folders": folders}))


def name_node(index: int) -> None:
    """Add the node's name to the hosts file, so that the API server finds its kubelet on loopback."""
    text = _HOSTS.read_text()
    if _hosts_line(index) not in text.splitlines():
        with _HOSTS.open("a") as file:  # a full disk must not leave the file empty
            file.write("\n" * (not text.endswith("\n")) + f"{_hosts_line(index)}\n")


def make_cgroups(index: int) -> None:
    """Make the parent cgroup of the node's pods, with either version of cgroups."""
    if (CGROUPS / "cgroup.controllers").exists():
        available = (CGROUPS / "cgroup.controllers").read_text().split()
        (CGROUPS / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in available))
        (CGROUPS / node_name(index)).mkdir(exist_ok=True)
        return
    for controller in ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "systemd"):
        if (CGROUPS / controller).is_dir():
            (CGROUPS / controller / node_name(index)).mkdir(exist_ok=True)
    for setting in ("cpuset.cpus", "cpuset.mems"):
        (CGROUPS / "cpuset" / node_name(index) / setting).write_text((CGROUPS / "cpuset" / setting).read_text())


def _cgroups(index: int) -> list[Path]:
    """The cgroups of a node that exist: one in version 2, one a controller in version 1."""
    groups = [CGROUPS / node_name(index), *CGROUPS.glob(f"*/{node_name(index)}")]
    return [group for group in groups if group.exists()]


def make_bridge(layout: Layout, index: int, address: str, api_service_ip: str) -> None:
    """Make the node's bridge, and redirect pods' traffic to the `kubernetes` Service to the API server."""
    env = debian.environment()
    _set_sysctl("net/ipv4/ip_forward", "1")
    if not Path(f"/sys/class/net/{bridge(index)}").exists():
        run(["ip", "link", "add", bridge(index), "type", "bridge"], env=env)
        run(["ip", "addr", "add", address, "dev", bridge(index)], env=env)
        run(["ip", "link", "set", bridge(index), "up"], env=env)
    _set_sysctl(f"net/ipv4/conf/{bridge(index)}/route_localnet", "1")
    rules = f"""
table ip {NFT_TABLE}
delete table ip {NFT_TABLE}
table ip {NFT_TABLE} {{
  chain pre {{
    type nat hook prerouting priority dstnat - 20;
    iifname "{bridge(0)[:-1]}*" ip daddr {api_service_ip} tcp dport 443 dnat to 127.0.0.1:{layout.port};
  }}
}}
"""
    run(["nft", "-f", "-"], stdin=rules, env=env)


def unmount_below(folder: Path) -> None:
    """Unmount everything below `folder`, innermost first."""
    prefix = f"{folder}/"
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((m for m in mounts if m.startswith(prefix)), reverse=True):
        run(["umount", "--lazy", mount])


def remove_node(layout: Layout, index: int) -> None:
    """Remove the mounts, bridge, cgroups and host name of a stopped node."""
    env = debian.environment()
    unmount_below(layout.node(index))
    if Path(f"/sys/class/net/{bridge(index)}").exists():
        run(["ip", "link", "del", bridge(index)], env=env)
    for group in _cgroups(index):
        for folder, _, _ in os.walk(group, topdown=False):
            Path(folder).rmdir()
    lines = _HOSTS.read_text().splitlines()
    if _hosts_line(index) in lines:
        _HOSTS.write_text("".join(f"{line}\n" for line in lines if line != _hosts_line(index)))


def restore(layout: Layout) -> None:
    """Restore sysctls, and remove tables and folders that did not exist before. All nodes must be removed."""
    before = json.loads(layout.snapshot.read_text())
    env = debian.environment()
    for family, table in _NFT_TABLES:
        if succeeds(["nft", "list", "table", family, table], env=env):
            run(["nft", "delete", "table", family, table], env=env)
    for name, value in before["sysctls"].items():
        _set_sysctl(name, value)
    for folder in _FOLDERS:
        if folder not in before["folders"] and Path(folder).exists():
            unmount_below(Path(folder))
            shutil.rmtree(folder)


def leftovers(layout: Layout) -> list[str]:
    """Descriptions of what nodes left on the host; empty after a complete `down`."""
    if not layout.snapshot.exists():
        return []
    found = [f"bridge {bridge(i)}" for i in range(MAX_NODES) if Path(f"/sys/class/net/{bridge(i)}").exists()]
    found += [f"cgroup {group}" for i in range(MAX_NODES) for group in _cgroups(i)]
    names = _HOSTS.read_text().splitlines()
    found += [f"the line `{_hosts_line(i)}` of {_HOSTS}" for i in range(MAX_NODES) if _hosts_line(i) in names]
    found += [
        f"mount {line.split()[1]}"
        for line in Path("/proc/mounts").read_text().splitlines()
        if line.split()[1].startswith(f"{layout.state}/")
    ]
    if os.geteuid() == 0:
        env = debian.environment()
        found += [
            f"nft table {family} {table}"
            for family, table in _NFT_TABLES
            if succeeds(["nft", "list", "table", family, table], env=env)
        ]
    return found
