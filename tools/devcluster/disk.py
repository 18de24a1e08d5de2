"""How much disk is still missing, by part, and what gives way where there is too little.

A part's size is what `du` finds of it after the tests, with replaced builds gone. What a part holds is taken off, so a
run that was cut off asks for the rest alone.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tools.devcluster import debian, gobuild, images
from tools.devcluster.layout import Layout, cache_dir
from tools.devcluster.process import say

_GO = 6.0  # GiB, as all: modules 3.4, Go's own build cache 1.9, programs 0.7
_DEBIAN = 1.0
_BUILDAH = 7.2
_REGISTRY = 3.1
_NODE = 6.1
_PACKED = 3.1  # of each node that pulls an image whole, until it is unpacked
_WRITTEN = 1.0  # new layers of our code, what tests write
_CONTROL_PLANE = 1.0  # etcd and logs


def missing(layout: Layout, *, nodes: int) -> dict[str, float]:
    """GiB that a cluster of `nodes` nodes will still take, 0 for a control plane alone: part -> GiB."""
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
    """Says what is needed and what is free, where that is less; else empty."""
    parts = missing(layout, nodes=nodes)
    cache_dir().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache_dir()).free / (1 << 30)
    if free >= sum(parts.values()):
        return ""
    listed = ", ".join(f"{gib:.1f} for {part}" for part, gib in parts.items())
    return f"{cache_dir()} has {free:.1f} GiB free, {sum(parts.values()):.1f} are needed: {listed}"


def drop_replaced(layout: Layout) -> None:
    """Drop replaced builds, and stores that hold more than one build needs, while nothing of the cluster runs."""
    if _buildah().exists() and not debian.lacking(debian.IMAGES):
        images.unmount()
        images.prune(layout)
    for size, folder in [(_REGISTRY, _registry())] + [(_NODE, node) for node in layout.node_images(0).parent.glob("*")]:
        if _held(folder) > size:
            say(f"dropping {folder}: the disk is short, and it holds more than one build; it fills again by itself")
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
    # It ends with 1 where another build took a file away meanwhile.
    du = subprocess.run(["du", "-skx", folder], capture_output=True, check=False)
    return int(du.stdout.split()[0]) / (1 << 20)
