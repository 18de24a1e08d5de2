"""What a regroup waits for on a GPU: a new process's context and first product, and copies of a worker's state."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch

from .timing import Clock

#: A new process times its first use of the device. It prints seconds.
_FIRST_USE = """
import json, sys, time
import torch
def since(began):
    if sys.argv[1] != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began
began = time.perf_counter()
one = torch.ones(256, 256, device=sys.argv[1])
context = since(began)
began = time.perf_counter()
one @ one
print(json.dumps({"context": context, "first_product": since(began)}))
"""


def measure(sizes: Sequence[int], clock: Clock) -> dict[str, Any]:
    """Seconds of a new process's context and first product, and of copies of so many bytes."""
    command = [sys.executable, "-c", _FIRST_USE, str(clock.device)]
    first_use = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"pause {first_use}", flush=True)
    return {**first_use, "copies": [row for size in sizes if (row := _copies(size, clock))]}


def _copies(size: int, clock: Clock) -> dict[str, float] | None:
    """Seconds of copies from and to the device; None if there is too little memory."""
    cuda = clock.device.type == "cuda"
    try:
        there, other = (torch.empty(size, dtype=torch.uint8, device=clock.device) for _ in range(2))
        pageable = torch.empty(size, dtype=torch.uint8)
        pinned = pageable.pin_memory() if cuda else torch.empty_like(pageable)
    except RuntimeError as error:  # of the device or of the host
        print(f"copies of {size:,} bytes were not measured: {error}", flush=True)
        return None
    row = {
        "bytes": size,
        "on_device": clock.wall(lambda: other.copy_(there)),
        "to_host_pinned": clock.wall(lambda: pinned.copy_(there, non_blocking=True)),
        "to_device_pinned": clock.wall(lambda: there.copy_(pinned, non_blocking=True)),
        "to_host_pageable": clock.wall(lambda: pageable.copy_(there)),
        "to_device_pageable": clock.wall(lambda: there.copy_(pageable)),
    }
    print(f"copy {row}", flush=True)
    return row
