"""Checks all requirements before anything is changed, so that the user sees everything that is missing."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable

from tools.devcluster.process import CommandError


def _taken(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def check(*, ports: Iterable[int], root: bool, shortage: str) -> None:
    """Raise `CommandError` with everything that is missing: Linux, root, disk (the message `shortage`), free ports."""
    problems = []
    if sys.platform != "linux":
        problems.append("the cluster needs Linux")
    if root and os.geteuid() != 0:
        problems.append("nodes need root (mounts, cgroups, network namespaces); --control-plane-only does not")
    if shortage:
        problems.append(shortage)
    taken = [str(port) for port in ports if _taken(port)]
    if taken:
        problems.append(f"ports of 127.0.0.1 in use: {', '.join(taken)} (choose others with --port)")
    if problems:
        raise CommandError("cannot start:\n- " + "\n- ".join(problems))
