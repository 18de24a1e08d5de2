"""Network links of a given rate between processes of this machine, for root on Linux.

Each process is in a network namespace of its own. A pair of virtual interfaces joins it to a bridge, and a token bucket
limits each direction of the pair.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

_BRIDGE, _PREFIX = "br-worth", "worth"
_NETWORK = "10.213.77"
_CLONE_NEWNET = 0x40000000
#: Seconds of a link's rate that pass at once. The kernel refills a bucket with each tick of its clock, at most 10 ms.
_BURST_SECONDS = 0.01
#: Name of a link inside its namespace.
INTERFACE = "eth0"


def missing() -> str:
    """Why links cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    absent = [program for program in ("ip", "tc") if shutil.which(program) is None]
    return f"there is no program {absent[0]} (Debian: iproute2)" if absent else ""


@contextlib.contextmanager
def shaped(count: int, bits_per_second: float) -> Iterator[None]:
    """Have `count` links of this rate meanwhile. A process gets one by `enter`.

    Raises:
        RuntimeError: a command failed.
    """
    _remove(count)  # what a killed benchmark left
    try:
        _ip("link", "add", _BRIDGE, "type", "bridge")
        _ip("link", "set", _BRIDGE, "up")
        for number in range(count):
            _add(number, bits_per_second)
        yield
    finally:
        _remove(count)


def enter(number: int) -> None:
    """Move this thread, and those that it starts, behind a link.

    Raises:
        OSError: there is no such link.
    """
    with Path(f"/var/run/netns/{_PREFIX}{number}").open() as namespace:
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot enter the namespace", namespace.name)


def address(number: int) -> str:
    """Address behind a link."""
    return f"{_NETWORK}.{number + 1}"


def _add(number: int, bits_per_second: float) -> None:
    name, outside = f"{_PREFIX}{number}", f"v-{_PREFIX}{number}"
    _ip("netns", "add", name)
    _ip("link", "add", outside, "type", "veth", "peer", "name", INTERFACE, "netns", name)
    _ip("link", "set", outside, "master", _BRIDGE, "up")
    _ip("-n", name, "address", "add", f"{address(number)}/24", "dev", INTERFACE)
    _ip("-n", name, "link", "set", INTERFACE, "up")
    _ip("-n", name, "link", "set", "lo", "up")
    burst = max(16_000, round(bits_per_second / 8 * _BURST_SECONDS))
    bucket = ["root", "tbf", "rate", f"{round(bits_per_second)}bit", "burst", str(burst), "latency", "200ms"]
    _run("tc", "qdisc", "add", "dev", outside, *bucket)
    _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, *bucket)


def _remove(count: int) -> None:
    for number in range(count):
        subprocess.run(["ip", "netns", "del", f"{_PREFIX}{number}"], check=False, capture_output=True)
    subprocess.run(["ip", "link", "del", _BRIDGE], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}: {ended.stderr.strip()}")
