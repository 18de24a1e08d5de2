"""Measures one GPU in under 9 minutes, and writes `calibration.json`, whose `units` virtual devices declare.

`units`, `blocks`: a layer, an embedding and a head of three models by micro-batch. `cache`: a frozen layer's forward
against reading its outputs. `shared`: several processes on the GPU. `pause`: contexts and copies. `step`: whole steps.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import cached, pause, shared, step, units
from .models import MINILM, SHAPES, TINY, TINY_MINILM, Shape
from .timing import Clock, Effort

NAME = "calibration.json"


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        shapes: models by name.
        minilm: the model whose lower layers freeze one by one.
        micro_batches: numbers of samples of a unit's forward.
        samples: samples of the cache and of the whole steps.
        batch: samples of a step of `minilm`.
        processes: numbers of processes that share the GPU.
        shared_seconds: how long they run.
        copies: bytes of each copy.
        effort: how often each thing is measured.
    """

    shapes: dict[str, Shape]
    minilm: Shape
    micro_batches: Sequence[int]
    samples: int
    batch: int
    processes: Sequence[int]
    shared_seconds: float
    copies: Sequence[int]
    effort: Effort


WHOLE = Sizes(
    shapes=SHAPES,
    minilm=MINILM,
    micro_batches=units.MICRO_BATCHES,
    samples=8,
    batch=32,
    processes=(1, 2, 4, 8),
    shared_seconds=3.0,
    copies=(10_000_000, 100_000_000, 1_000_000_000, 2_000_000_000),
    effort=Effort(),
)
SMALL = Sizes(
    shapes=TINY,
    minilm=TINY_MINILM,
    micro_batches=(1, 2),
    samples=2,
    batch=2,
    processes=(1, 2),
    shared_seconds=0.1,
    copies=(10_000,),
    effort=Effort(warm_ups=1, repeats=3, budget_seconds=0.1),
)


def measure(sizes: Sizes, device: torch.device, folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the content of `calibration.json` after each part, so that a run that is cut off keeps what it measured.

    Args:
        sizes: how much is measured.
        device: what is measured.
        folder: on the disk that is measured.
    """
    began = time.monotonic()
    clock = Clock(device, sizes.effort)
    found: dict[str, Any] = {"about": "Measured by `python3 -m benchmarks.worth.gpu`.", "machine": machine(device)}

    def with_seconds() -> dict[str, Any]:
        return found | {"seconds": time.monotonic() - began}

    found["pause"] = pause.measure(sizes.copies, clock)
    yield with_seconds()
    found |= units.measure(sizes.shapes, sizes.micro_batches, clock)
    yield with_seconds()
    found["cache"] = cached.measure(sizes.shapes, sizes.samples, clock, folder)
    yield with_seconds()
    whole = [
        row
        for name, shape in sizes.shapes.items()
        for row in step.measure(name, shape, sizes.samples, found["units"], clock)
    ]
    trained = step.trained_layers(sizes.minilm, sizes.batch, clock)
    found["step"] = {
        "whole": whole,
        "minilm": {"weights": "random, of the shape of all-MiniLM-L6-v2", "batch": sizes.batch, "rows": trained},
    }
    yield with_seconds()
    found["shared"] = shared.measure(
        sizes.shapes["vit-base"], sizes.samples, sizes.processes, sizes.shared_seconds, device
    )
    yield with_seconds()


def machine(device: torch.device) -> dict[str, object]:
    """What was measured."""
    found: dict[str, object] = {"device": "cpu", "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.worth.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {NAME}")
    parser.add_argument("--tiny", action="store_true", help="small models, on a CPU if there is no GPU, in seconds")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.tiny:
        print("error: torch sees no GPU here; --tiny measures small models on the CPU", file=sys.stderr)
        return 2
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for found in measure(SMALL if arguments.tiny else WHOLE, device, out):
        (out / NAME).write_text(json.dumps(found, indent=2) + "\n")
        print(f"{out / NAME}: {', '.join(found)}, {found['seconds']:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
