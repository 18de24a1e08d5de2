"""Starts and stops the parts of the cluster in the order of their dependencies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import string
from collections.abc import Iterable, Iterator

from tools.devcluster import (
    controlplane,
    debian,
    disk,
    gobuild,
    host,
    images,
    kueue,
    node,
    preflight,
    registry,
    volcano,
)
from tools.devcluster.layout import DNS_SERVICE_IP, MAX_NODES, NODES, SOURCES, Layout, cache_dir
from tools.devcluster.process import CommandError, say

_NOTICE = """\
this machine keeps, until `down`: processes and listeners on loopback, cgroups and host names node0.., bridges
{bridges}, nft tables kube-proxy and {table}, mounts below {state}"""


def is_up(layout: Layout) -> bool:
    """Whether the API server runs."""
    return controlplane.alive(layout)["kube-apiserver"] is not None


def obtain(layout: Layout, *, nodes: bool) -> None:
    """Build or unpack every program that the tests use. Takes minutes on a fresh machine.

    Fails early if the machine lacks anything else that the tests need, such as disk for images.

    Args:
        layout: the cluster that will use the programs.
        nodes: whether to include programs of nodes.
    """
    if not is_up(layout):
        _check(layout, ports=(), nodes=NODES if nodes else 0)
    debian.obtain(debian.tested(nodes=nodes))
    if nodes or not os.environ.get("KUBEBUILDER_ASSETS"):
        gobuild.kubernetes(nodes=nodes)
    gobuild.helm()
    gobuild.kueue()
    gobuild.prometheus_operator_crds()
    if nodes:
        gobuild.coredns()
        gobuild.pause()


def up_control_plane(
    layout: Layout, *, controllers: bool = True, fake_nodes: bool = False, version: str = gobuild.KUBERNETES
) -> None:
    """Start only the control plane unless it runs. Needs no root. See `controlplane.start`."""
    if not is_up(layout):
        _stop(layout)
        _check(layout, ports=layout.control_plane_ports(), nodes=0)
    controlplane.start(layout, controllers=controllers, fake_nodes=fake_nodes, version=version)


def up(layout: Layout, *, nodes: int = NODES, gpus: int = 8) -> None:
    """Start the control plane, the registry, `nodes` nodes and DNS, or those that an earlier `up` did not start."""
    if not 1 <= nodes <= MAX_NODES:
        raise CommandError(f"--nodes must be from 1 to {MAX_NODES}")
    if not is_up(layout):
        _stop(layout)
        _check(layout, ports=layout.all_ports(), nodes=nodes)
    say(_NOTICE.format(bridges=f"{host.bridge(0)}..", table=host.NFT_TABLE, state=layout.state))
    debian.obtain(debian.CONTROL_PLANE + debian.NODE + debian.IMAGES)
    gobuild.kubernetes()
    controlplane.start(layout)
    registry.start(layout)
    layout.shared.mkdir(exist_ok=True)
    layout.shared.chmod(0o1777)  # pods of any user write there
    for index in range(nodes):
        node.start(layout, index, pause_image=images.pause_reference(layout), gpus=gpus)
    _start_dns(layout)


def _check(layout: Layout, *, ports: Iterable[int], nodes: int) -> None:
    """Check that nothing is missing. If the disk is too full, first delete what can be rebuilt."""
    shortage = disk.shortage(layout, nodes=nodes)
    if shortage and nodes and os.geteuid() == 0:
        _stop(layout)
        disk.drop_replaced(layout)
        shortage = disk.shortage(layout, nodes=nodes)
    preflight.check(ports=ports, root=nodes > 0, shortage=shortage)


def _stop(layout: Layout) -> None:
    """Stop all processes. If the API server does not run, the others are left over from a crash and hold ports."""
    for index in reversed(node.indices(layout)):
        node.stop(layout, index)
    registry.daemon(layout).stop()
    kueue.stop(layout)
    volcano.stop(layout)
    controlplane.stop(layout)


def _start_dns(layout: Layout) -> None:
    manifest = string.Template((SOURCES / "coredns.yaml").read_text())
    filled = manifest.substitute(image=images.coredns_reference(layout), address=DNS_SERVICE_IP)
    controlplane.kubectl(layout, "apply", "-f", "-", stdin=filled)
    controlplane.kubectl(layout, "-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=90s")


@contextlib.contextmanager
def held(layout: Layout) -> Iterator[None]:
    """Hold the cluster for a block, so that no other run stops it or takes it for its own.

    Raises:
        CommandError: another run holds it.
    """
    lock = layout.state.with_suffix(".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(
                f"another run uses the cluster {layout.name} ({lock} is locked): wait until it ends. Tests without"
                " nodes can run beside it with another PIPETRANSFORMER_TEST_PORT"
            ) from None
        yield


@contextlib.contextmanager
def started() -> Iterator[Layout]:
    """Start the cluster for a block, and stop it afterwards.

    It stays if it was up before, or with PIPETRANSFORMER_KEEP_CLUSTER=1. A cluster that a killed block left is stopped
    first, because its objects may be in any state.

    Raises:
        CommandError: another block holds the cluster.
    """
    layout = Layout()
    left = layout.state / "started-for-a-block"
    keep = os.environ.get("PIPETRANSFORMER_KEEP_CLUSTER") == "1"
    with held(layout):
        if left.exists() and not keep:
            down(layout)
        stays = keep or is_up(layout)
        try:
            if not stays:
                left.parent.mkdir(parents=True, exist_ok=True)
                left.touch()
            up(layout)
            yield layout
        finally:
            if not stays:
                down(layout)


def add_node(layout: Layout, *, gpus: int = 8) -> int:
    """Start another node and return its index."""
    index = max(node.indices(layout), default=-1) + 1
    if index >= MAX_NODES:
        raise CommandError(f"the cluster already has the maximum of {MAX_NODES} nodes")
    node.start(layout, index, pause_image=images.pause_reference(layout), gpus=gpus)
    return index


def down(layout: Layout, *, purge: bool = False) -> None:
    """Stop everything and clean the host. `purge` also deletes the image stores of nodes and registry."""
    _stop(layout)
    if layout.snapshot.exists():  # it had nodes
        images.unmount()
        host.restore(layout)
    left = host.leftovers(layout)
    if left:
        raise CommandError("still on the host:\n- " + "\n- ".join(left))
    if layout.state.exists():
        shutil.rmtree(layout.state)
    if purge:
        for folder in (layout.node_images(0).parent, cache_dir() / "registry"):
            shutil.rmtree(folder, ignore_errors=True)


def status(layout: Layout) -> str:
    """A summary for users: processes, nodes, and leftovers on the host."""
    parts = {**controlplane.alive(layout), "registry": registry.daemon(layout).pid, **node.alive(layout)}
    lines = [f"{name:24} {'pid ' + str(pid) if pid else '-'}" for name, pid in parts.items()]
    if is_up(layout):
        lines += [
            f"kubeconfig               {layout.kubeconfig}",
            controlplane.kubectl(layout, "get", "nodes", "-o", "wide"),
        ]
    else:
        lines += [f"left on the host: {what}" for what in host.leftovers(layout)]
    return "\n".join(lines)
