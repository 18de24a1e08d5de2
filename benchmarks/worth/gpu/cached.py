"""A frozen layer's forward against reading what it made before: from pinned or pageable memory, or from a file."""

import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .models import Layer, Shape, activations
from .timing import PRECISIONS, Clock, products

_READS = 5


def measure(shapes: Mapping[str, Shape], samples: int, clock: Clock, folder: Path) -> list[dict[str, Any]]:
    """Seconds for the activations of so many samples, by model and precision.

    Args:
        shapes: models by name.
        samples: number of samples.
        clock: measures.
        folder: where the file is written. It decides which disk is measured.
    """
    rows = []
    for name, shape in shapes.items():
        with clock.device:
            layer = Layer(shape)
        inputs = activations(shape, samples, clock.device)
        for precision in PRECISIONS:
            with products(precision, clock.device), torch.no_grad():
                forward = clock.median(lambda layer=layer, inputs=inputs: layer(inputs))  # type: ignore[misc]
            kept = inputs.to(torch.bfloat16 if precision == "bf16" else torch.float32).cpu()
            row = {"model": name, "precision": precision, "samples": samples, "bytes": kept.nbytes, "forward": forward}
            rows.append(row | _reads(kept, clock, folder))
            print(f"cache {rows[-1]}", flush=True)
    return rows


def _reads(kept: Tensor, clock: Clock, folder: Path) -> dict[str, float]:
    pinned = kept.pin_memory() if clock.device.type == "cuda" else kept
    return {
        "pinned": clock.wall(lambda: pinned.to(clock.device, non_blocking=True, copy=True)),
        "pageable": clock.wall(lambda: kept.to(clock.device, copy=True)),
        "file": _from_file(kept, clock, folder),
    }


def _from_file(kept: Tensor, clock: Clock, folder: Path) -> float:
    """Median seconds from a file to the device, without the operating system's copy of the file where it can be
    dropped."""
    found = []
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        torch.save(kept, file)
        file.flush()
        os.fsync(file.fileno())
        for _ in range(_READS):
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            torch.load(file.name).to(clock.device)
            clock.wait()
            found.append(time.perf_counter() - began)
    return statistics.median(found)
