"""Times of a layer, an embedding and a head by micro-batch, and the lines through them that virtual devices declare."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .models import Head, Layer, Shape, activations, embedding, samples_of
from .timing import PRECISIONS, Clock, line_through, products

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)


def measure(shapes: Mapping[str, Shape], counts: Sequence[int], clock: Clock) -> dict[str, Any]:
    """`units`: a profile for each model and precision; `blocks`: the seconds that they were fitted to."""
    profiles: dict[str, Any] = {}
    blocks: list[dict[str, Any]] = []
    for name, shape in shapes.items():
        for precision in PRECISIONS:
            profile = {}
            for part, unit, inputs in _parts(shape, clock.device):
                rows = [row for count in counts if (row := _row(unit, inputs(count), count, precision, clock))]
                blocks += [{"model": name, "precision": precision, "unit": part, **row} for row in rows]
                profile[part] = fitted(rows)
            profiles[f"{name}-{precision}"] = profile
            print(f"{name} {precision}: layer {profile['layer']}", flush=True)
    return {"units": profiles, "blocks": blocks}


def fitted(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What a virtual device declares of a unit: the line of its forward, and both halves of a backward as multiples."""
    fixed, per_sample = line_through([int(row["samples"]) for row in rows], [row["forward"] for row in rows])
    weights = [row["weight_gradient"] / row["forward"] for row in rows]
    inputs = [row["input_gradient"] / row["forward"] for row in rows]
    return {
        "fixed": fixed,
        "per_sample": per_sample,
        "input_gradient": statistics.median(inputs),
        "weight_gradient": statistics.median(weights),
    }


def _parts(shape: Shape, device: torch.device) -> list[tuple[str, nn.Module, Callable[[int], Tensor]]]:
    with device:
        units = embedding(shape), Layer(shape), Head(shape)
    return [
        ("embedding", units[0], lambda count: samples_of(shape, count, device)),
        ("layer", units[1], lambda count: activations(shape, count, device)),
        ("head", units[2], lambda count: activations(shape, count, device)),
    ]


def _row(unit: nn.Module, inputs: Tensor, count: int, precision: str, clock: Clock) -> dict[str, float] | None:
    """Seconds of one micro-batch; None if the device has too little memory for it.

    `frozen` is a forward without a graph. `weight_gradient` is a backward whose input wants no gradient, as in the
    first layer that trains; `input_gradient` is what a whole backward takes beyond that.
    """
    try:
        with products(precision, clock.device):
            with torch.no_grad():
                frozen = clock.median(lambda: unit(inputs))
            forward = clock.median(lambda: unit(inputs))
        weights = _backward(unit, inputs, precision, clock)
        wanted = inputs.is_floating_point() and inputs.dim() == 3  # samples themselves never want a gradient
        both = _backward(unit, inputs.clone().requires_grad_(), precision, clock) if wanted else weights
    except torch.OutOfMemoryError:
        print(f"{count} samples do not fit the device's memory", flush=True)
        torch.cuda.empty_cache()
        return None
    return {
        "samples": count,
        "frozen": frozen,
        "forward": forward,
        "weight_gradient": weights,
        "input_gradient": max(0.0, both - weights),
    }


def _backward(unit: nn.Module, inputs: Tensor, precision: str, clock: Clock) -> float:
    """Seconds of a backward through the unit. Gradients add up, as over micro-batches."""
    outputs: list[Tensor] = []

    def forward() -> None:
        outputs.clear()
        with products(precision, clock.device):
            outputs.append(unit(inputs))

    return clock.median(lambda: torch.autograd.backward(outputs, [torch.ones_like(outputs[0])]), before=forward)
