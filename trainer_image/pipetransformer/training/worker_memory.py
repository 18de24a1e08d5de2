"""How many bytes the layers of a worker may take: a share of its GPU, or of what its container leaves it.

Measured cuts and offers are bounded by it. A CPU without a limit counts as unlimited: its memory belongs to every
process of the machine, and a worker cannot know its share. A worker asks before it holds a model, because the limit of
a container also covers the interpreter, torch and the dataset.
"""

import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import torch

from pipetransformer.errors import SpecError
from pipetransformer_contract.wire import Env

#: The share of free memory to plan with. The rest is for the context, the allocator's losses and buffers.
USABLE_SHARE = 0.85


def usable_bytes(device: torch.device, environment: Mapping[str, str] | None = None, root: Path = Path("/")) -> float:
    """Bytes that the layers of this worker may take, infinite if nothing bounds them.

    Args:
        device: where the worker trains.
        environment: `Env.DEVICE_BYTES` in it is the answer for a CPU; by default the process's.
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
    """Whether host memory is apart from what `usable_bytes` counts. On a CPU it is if these bytes were declared; the
    limit of a container covers both.

    Args:
        device: where the worker trains.
        environment: by default the process's.
    """
    declared = (os.environ if environment is None else environment).get(Env.DEVICE_BYTES)
    return device.type == "cuda" or bool(declared)


def container_bytes(root: Path = Path("/")) -> int | None:
    """The memory limit of this process's control groups (version 1 or 2), the lowest on the way up; None without one.

    A limit above the machine's memory is none: version 1 writes a huge number where nothing is limited.
    """
    found = [int(text) for file in _limit_files(root) if (text := _content(file)) and text.isdecimal()]
    machine = _machine_bytes(root)
    return min((limit for limit in found if machine is None or limit < machine), default=None)


def _bytes_of(declared: str) -> float:
    if not declared.isdecimal() or int(declared) == 0:
        raise SpecError("spec.podTemplate", f"{Env.DEVICE_BYTES} must be a number of bytes above 0, not {declared!r}")
    return float(declared)


def _limit_files(root: Path) -> Iterator[Path]:
    """Files that may hold a limit. A container sees its own group at the top, even if its path names a host's."""
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
    """Resident bytes of this process when it was first asked; later ones would count layers."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")
