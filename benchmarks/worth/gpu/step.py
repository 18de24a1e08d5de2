"""Whole steps: by events against the clock, against the sum of the units, and MiniLM with fewer trained layers."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .models import Shape, samples_of, whole
from .timing import PRECISIONS, Clock, products


def measure(name: str, shape: Shape, samples: int, units: Mapping[str, Any], clock: Clock) -> list[dict[str, Any]]:
    """A training step of a whole model, by precision.

    Args:
        name: of the model in `units`.
        shape: its shape.
        samples: the batch.
        units: the profiles that were fitted.
        clock: measures.

    Returns:
        `events`: seconds between CUDA events around the step (on a CPU the clock's). `wall`: seconds by the clock.
        `launch`: seconds until the host has launched everything. `units_over_wall`: what the profile says of forward
        and backward, relative to the wall. The optimizer is in the step and not in the profile.
    """
    rows = []
    for precision in PRECISIONS:
        try:
            row = _whole_step(shape, samples, precision, units[f"{name}-{precision}"], clock)
        except torch.OutOfMemoryError:
            print(f"a step of {name} in {precision} does not fit the device's memory", flush=True)
            torch.cuda.empty_cache()
            continue
        rows.append({"model": name, "precision": precision, "samples": samples, **row})
        print(f"step {rows[-1]}", flush=True)
    return rows


def _whole_step(
    shape: Shape, samples: int, precision: str, profile: Mapping[str, Any], clock: Clock
) -> dict[str, float]:
    step = training_step(shape, samples, shape.layers, precision, clock)
    wall = clock.wall(step)
    said = _seconds(profile["embedding"], samples) + _seconds(profile["head"], samples)
    said += shape.layers * _seconds(profile["layer"], samples)
    return {"events": clock.median(step), "wall": wall, "launch": clock.launch(step), "units_over_wall": said / wall}


def trained_layers(shape: Shape, samples: int, clock: Clock) -> list[dict[str, Any]]:
    """A step of a model by the number of layers that train, from all to none but the head.

    `cached` is the step without the frozen units, as if what they made were read for nothing. `bytes` is the most
    memory of the whole step, None on a CPU.
    """
    rows = []
    for trained in range(shape.layers, -1, -1):
        seconds = clock.wall(training_step(shape, samples, trained, "bf16", clock))
        most = _most_bytes(training_step(shape, samples, trained, "bf16", clock), clock)
        row = {"trained_layers": trained, "seconds": seconds, "bytes": most, "cached": None}
        if trained < shape.layers:
            row["cached"] = clock.wall(training_step(shape, samples, trained, "bf16", clock, cached=True))
        rows.append(row)
        print(f"trained layers {row}", flush=True)
    return rows


def training_step(
    shape: Shape, samples: int, trained: int, precision: str, clock: Clock, *, cached: bool = False
) -> Callable[[], None]:
    """A step of AdamW that trains the head and the `trained` last layers, and the embedding if it trains all layers.

    Args:
        shape: the model.
        samples: the batch.
        trained: number of layers that train.
        precision: one of `PRECISIONS`.
        clock: its device.
        cached: start from random outputs of the frozen units instead of computing them.
    """
    units = whole(shape, clock.device)
    boundary = 0 if trained == shape.layers else 1 + shape.layers - trained
    frozen, active = nn.Sequential(*units[:boundary]), nn.Sequential(*units[boundary:])
    frozen.requires_grad_(False)
    optimizer = torch.optim.AdamW(active.parameters(), lr=1e-5)
    inputs = samples_of(shape, samples, clock.device)
    with torch.no_grad():
        kept = frozen(inputs)
        outputs = active(kept)
    targets = torch.randint(shape.classes, outputs.shape[:-1], device=clock.device)

    def step() -> None:
        with products(precision, clock.device):
            with torch.no_grad():
                reached: Tensor = kept if cached else frozen(inputs)
            out = active(reached)
            loss = functional.cross_entropy(out.flatten(0, -2), targets.flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _seconds(unit: Mapping[str, float], samples: int) -> float:
    """Forward and backward of a unit, as a virtual device takes them."""
    return (unit["fixed"] + samples * unit["per_sample"]) * (1 + unit["weight_gradient"] + unit["input_gradient"])


def _most_bytes(step: Callable[[], None], clock: Clock) -> int | None:
    if clock.device.type != "cuda":
        return None
    step()  # the first makes the optimizer's state
    torch.cuda.reset_peak_memory_stats(clock.device)
    step()
    clock.wait()
    return torch.cuda.max_memory_allocated(clock.device)
