"""Several processes on one GPU: how much slower each gets. They take turns, so together they gain little or nothing.

Whoever takes eight processes on one GPU for eight GPUs measures turns, and not a pipeline.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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
        processes: numbers of processes, 1 among them.
        seconds: how long each group runs.
        device: the one device that all share.
    """
    rows = compared({count: _group(shape, samples, count, seconds, device) for count in processes})
    return {"mps": _mps(), "samples": samples, "rows": rows}


def compared(rates: Mapping[int, Sequence[float] | None]) -> list[dict[str, Any]]:
    """A row for each number of processes: steps a second of each process, and how that compares with a process alone.

    Args:
        rates: steps a second of each process, by number of processes; None where not all ran. Where no process ran
            alone, there is nothing to compare with.
    """
    alone = rates.get(1)
    rows: list[dict[str, Any]] = []
    for count, group in rates.items():
        row: dict[str, Any] = {"processes": count}
        if group is None:
            row["failed"] = "not all processes ran; the device may have too little memory"
        else:
            row["each"] = statistics.fmean(group)
            if alone is not None:
                row |= {"slowdown": alone[0] / row["each"], "sum_over_one": sum(group) / alone[0]}
        rows.append(row)
        print(f"shared {row}", flush=True)
    return rows


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
    for process in made:
        process.join(timeout=2 * _PATIENCE_S + seconds)
    ran = all(process.exitcode == 0 for process in made)
    for process in made:
        process.kill()
    return [results.get(timeout=_PATIENCE_S) for _ in made] if ran else None


def _steps(shape: Shape, samples: int, seconds: float, device: str, barrier: Any, results: Any) -> None:
    """Runs forwards and backwards of one layer for so many seconds, from when all processes are ready."""
    torch.set_num_threads(1)
    where = torch.device(device)
    try:
        step = _warm_step(shape, samples, where)
        barrier.wait(timeout=_PATIENCE_S)
    except BaseException:
        barrier.abort()  # the others need not wait for this process
        raise
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        step()
        done += 1
    results.put(done / (time.perf_counter() - began))


def _warm_step(shape: Shape, samples: int, device: torch.device) -> Callable[[], None]:
    """A forward and a backward of one layer, which the device has done once."""
    with device:
        layer = Layer(shape)
    inputs = activations(shape, samples, device)

    def step() -> None:
        with products("bf16", device):
            output = layer(inputs)
        torch.autograd.backward([output], [torch.ones_like(output)])
        if device.type == "cuda":
            torch.cuda.synchronize()

    step()
    return step
