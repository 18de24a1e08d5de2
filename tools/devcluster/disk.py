"""Estimates the disk space that the cluster still needs, and frees space if there is too little.

The size of a part was measured with `du` after the tests, without replaced builds. The space that a part already takes
is subtracted.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tools.devcluster import debian, gobuild, images
from tools.devcluster.layout import Layout, cache_dir
from tools.devcluster.process import say

_GO = 6.0  # all sizes in GiB; modules 3.4, Go's own build cache 1.9, programs 0.7
_DEBIAN = 1.0
_BUILDAH = 7.2
_REGISTRY = 3.1
_NODE = 6.1
_PACKED = 3.1  # for each node, until a pulled image is unpacked
_WRITTEN = 1.0  # new image layers of our code, and files of tests
_CONTROL_PLANE = 1.0  # etcd and logs


def missing(layout: Layout, *, nodes: int) -> dict[str, float]:
    """GiB that each part of a cluster will still take. `nodes` is 0 for a control plane alone."""
    programs = debian.tested(nodes=nodes > 0)
    built = gobuild.has_kubernetes(nodes=nodes > 0)
    parts = {
        "programs from Go modules": 0 if built else _rest(_GO, *gobuild.written_folders()),
        "programs from Debian": _rest(_DEBIAN, cache_dir() / "debian") if debian.lacking(programs) else 0,
        "the control plane": _CONTROL_PLANE,
    }
    if nodes:
        parts["buildah's store"] = _rest(_BUILDAH, _buildah())
        parts["the registry"] = _rest(_REGISTRY, _registry())
        stores = [_rest(_NODE, layout.node_images(index)) for index in range(nodes)]
        parts["the nodes' stores"] = sum(store + (_PACKED if store > _NODE / 2 else 0) for store in stores)
        parts["what builds and tests write"] = _WRITTEN
    return {part: gib for part, gib in parts.items() if gib}


def shortage(layout: Layout, *, nodes: int) -> str:
    """A message with the needed and the free space if there is too little; empty otherwise."""
    parts = missing(layout, nodes=nodes)
    cache_dir().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache_dir()).free / (1 << 30)
    if free >= sum(parts.values()):
        return ""
    listed = ", ".join(f"{gib:.1f} for {part}" for part, gib in parts.items())
    return f"{cache_dir()} has {free:.1f} GiB free, {sum(parts.values()):.1f} are needed: {listed}"


def drop_replaced(layout: Layout) -> None:
    """Delete replaced builds, and stores that are larger than one build needs. The cluster must not run."""
    if _buildah().exists() and not debian.lacking(debian.IMAGES):
        images.unmount()
        images.prune(layout)
    for size, folder in [(_REGISTRY, _registry())] + [(_NODE, node) for node in layout.node_images(0).parent.glob("*")]:
        if _held(folder) > size:
            say(f"the disk is almost full: deleting {folder}, which holds more than one build needs")
            shutil.rmtree(folder)


def _buildah() -> Path:
    return cache_dir() / "buildah"


def _registry() -> Path:
    return cache_dir() / "registry"


def _rest(size: float, *folders: Path) -> float:
    return max(0.0, size - sum(map(_held, folders)))


def _held(folder: Path) -> float:
    if not folder.exists():
        return 0
    # du exits with 1 if another build deleted a file meanwhile.
    du = subprocess.run(["du", "-skx", folder], capture_output=True, check=False)
    return int(du.stdout.split()[0]) / (1 << 20)
