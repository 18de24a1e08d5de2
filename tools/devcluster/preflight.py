"""What must hold before anything is changed, checked at once so that a user sees all that is missing."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterable

from tools.devcluster.layout import cache_dir
from tools.devcluster.process import CommandError

_GIB = 1 << 30


def _taken(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def check(*, ports: Iterable[int], free_gib: int, root: bool) -> None:
    """Raise `CommandError` listing everything that is missing: Linux, root, free disk in the cache, free ports."""
    problems = []
    if sys.platform != "linux":
        problems.append("the cluster needs Linux")
    if root and os.geteuid() != 0:
        problems.append("nodes need root (mounts, cgroups, network namespaces); --control-plane-only does not")
    cache_dir().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache_dir()).free
    if free < free_gib * _GIB:
        problems.append(f"{cache_dir()} has {free // _GIB} GiB free, {free_gib} are needed")
    taken = [str(port) for port in ports if _taken(port)]
    if taken:
        problems.append(f"ports of 127.0.0.1 in use: {', '.join(taken)} (choose others with --port)")
    if problems:
        raise CommandError("cannot start:\n- " + "\n- ".join(problems))
