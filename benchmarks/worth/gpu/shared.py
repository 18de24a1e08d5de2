"""Several processes on one GPU: how much slower each gets. They take turns, so together they gain little or nothing.

Whoever takes eight processes on one GPU for eight GPUs measures turns, and not a pipeline.
"""

import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from queue import Empty
from typing import Any

import torch

from .models import Layer, Shape, activations
from .timing import products

#: How long the slowest process may take to start, and to end.
_PATIENCE_S = 120.0


def measure(
    shape: Shape, samples: int, processes: Sequence[int], seconds: float, device: torch.device
) -> dict[str, Any]:
    """Forwards and backwards of a layer a second, with so many processes at once.

    Args:
        shape: the model of the layer.
        samples: the micro-batch of each process.
        processes: numbers of processes.
        seconds: how long each group runs.
        device: the one device that all share.
    """
    rows: list[dict[str, Any]] = []
    for count in processes:
        rates = _group(shape, samples, count, seconds, device)
        if rates is None:
            rows.append({"processes": count, "failed": "not all processes ran; the device may have too little memory"})
            continue
        alone = rows[0]["each"] if rows and "each" in rows[0] else sum(rates) / count
        each = sum(rates) / count
        rows.append({"processes": count, "each": each, "slowdown": alone / each, "sum_over_one": sum(rates) / alone})
        print(f"shared {rows[-1]}", flush=True)
    return {"mps": _mps(), "samples": samples, "rows": rows}


def _mps() -> bool:
    """Whether NVIDIA's Multi-Process Service serves this machine."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()


def _group(shape: Shape, samples: int, count: int, seconds: float, device: torch.device) -> list[float] | None:
    """Steps a second of each process; None if one of them failed."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(count), context.Queue()
    made = [
        context.Process(target=_steps, args=(shape, samples, seconds, str(device), barrier, results))
        for _ in range(count)
    ]
    for process in made:
        process.start()
    rates: list[float] = []
    try:
        for _ in made:
            rates.append(results.get(timeout=_PATIENCE_S + seconds))
    except Empty:
        return None
    finally:
        for process in made:
            process.join(timeout=_PATIENCE_S if len(rates) == count else 0)
            process.kill()
    return rates


def _steps(shape: Shape, samples: int, seconds: float, device: str, barrier: Any, results: Any) -> None:
    """Runs forwards and backwards of one layer for so many seconds, from when all processes are ready."""
    torch.set_num_threads(1)
    where = torch.device(device)
    with where:
        layer = Layer(shape)
    inputs = activations(shape, samples, where)

    def step() -> None:
        with products("bf16", where):
            output = layer(inputs)
        torch.autograd.backward([output], [torch.ones_like(output)])
        if where.type == "cuda":
            torch.cuda.synchronize()

    step()
    barrier.wait(timeout=_PATIENCE_S)
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        step()
        done += 1
    results.put(done / (time.perf_counter() - began))
