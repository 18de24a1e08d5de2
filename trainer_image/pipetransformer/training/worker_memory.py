"""How many bytes the layers of a worker may take: a share of its GPU's memory, or of its container's free memory.

With packing `Measured` no stage may need more. A CPU without a memory limit counts as unlimited: all processes of the
machine share its memory, so a worker cannot know its part. Call `usable_bytes` before the worker holds a model: a
container's limit also covers the interpreter, torch and the dataset, and the call subtracts these.
"""

import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import torch

from pipetransformer.errors import SpecError
from pipetransformer_contract.wire import Env

#: The share of free memory that layers may take. The rest is for the CUDA context, fragmentation and buffers.
USABLE_SHARE = 0.85


def usable_bytes(device: torch.device, environment: Mapping[str, str] | None = None, root: Path = Path("/")) -> float:
    """The number of bytes that the layers of this worker may take; infinite if there is no limit.

    Args:
        device: where the worker trains.
        environment: environment variables; None for those of the process. If `Env.DEVICE_BYTES` is set, its value is
            the result for a CPU.
        root: the folder that has `proc` and `sys`.

    Raises:
        SpecError: `Env.DEVICE_BYTES` is not a number of bytes.
    """
    if device.type == "cuda":
        return USABLE_SHARE * torch.cuda.get_device_properties(device).total_memory
    declared = (os.environ if environment is None else environment).get(Env.DEVICE_BYTES)
    if declared:
        return _bytes_of(declared)
    limit = container_bytes(root)
    return USABLE_SHARE * max(0, limit - _bytes_before_model()) if limit is not None else float("inf")


def host_apart(device: torch.device, environment: Mapping[str, str] | None = None) -> bool:
    """Whether host memory does not count as part of `usable_bytes`, so that layers in host memory save some of them.

    This holds for a GPU. On a CPU it holds if `Env.DEVICE_BYTES` is set. The memory limit of a container covers both.

    Args:
        device: where the worker trains.
        environment: environment variables; None for those of the process.
    """
    declared = (os.environ if environment is None else environment).get(Env.DEVICE_BYTES)
    return device.type == "cuda" or bool(declared)


def container_bytes(root: Path = Path("/")) -> int | None:
    """The memory limit in bytes of this process's control group and of all groups above it (cgroup version 1 or 2).

    The lowest limit counts; None if there is none. A number above the machine's memory is no limit: version 1 writes a
    huge number for a group without one.
    """
    found = [int(text) for file in _limit_files(root) if (text := _content(file)) and text.isdecimal()]
    machine = _machine_bytes(root)
    return min((limit for limit in found if machine is None or limit < machine), default=None)


def _bytes_of(declared: str) -> float:
    if not declared.isdecimal() or int(declared) == 0:
        raise SpecError("spec.podTemplate", f"{Env.DEVICE_BYTES} must be a number of bytes above 0, not {declared!r}")
    return float(declared)


def _limit_files(root: Path) -> Iterator[Path]:
    """Paths of files that may hold a memory limit, from this process's group upwards.

    In a container the path of the group may be one of the host. Then the container finds its own group at the top.
    """
    for line in (_content(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            tops, name = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], "memory.max"
        elif "memory" in controllers.split(","):
            tops, name = ["sys/fs/cgroup/memory"], "memory.limit_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))
        for top in tops:
            for folder in (group, *group.parents):
                yield root / top / folder / name


def _content(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


def _machine_bytes(root: Path) -> int | None:
    for line in (_content(root / "proc/meminfo") or "").splitlines():
        if line.startswith("MemTotal:"):
            return 1024 * int(line.split()[1])
    return None


@cache
def _bytes_before_model() -> int:
    """Resident bytes of this process at the first call, which comes before it holds a model. Later calls return the
    same number, because the layers must not count."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")
