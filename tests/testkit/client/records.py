"""Makes records of runs in the leader's format."""

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

LAYERS = 12


def generation(
    time: float,
    number: int,
    stages: int,
    pipelines: int,
    *,
    frozen: int = 0,
    step: int = 0,
    reason: str = "Release",
    spans: int = 1,
    why: str = "",
) -> dict[str, Any]:
    """The event of a committed layout. The `spans` of each stage have equal numbers of layers, as far as possible."""
    count = stages * spans
    bounds = [LAYERS * number // count for number in range(count + 1)]
    held = [[low, high - 1] for low, high in pairwise(bounds)]
    roles = [
        {"worker": f"w{pipeline}{stage}", "pipeline": pipeline, "stage": stage,
         "layers": [[low, high] for low, high in held[stage::stages] if low <= high]}
        for pipeline in range(pipelines)
        for stage in range(stages)
    ]  # fmt: skip
    return {
        "time": time, "kind": "GenerationCommitted", "generation": number, "stages": stages, "pipelines": pipelines,
        "frozenLayers": frozen, "firstStep": step, "pauseSeconds": 0.5, "bytesMoved": 1234567, "roles": roles,
        "reason": "Start" if number == 1 else reason, "whySchedule": why,
        "schedule": "Interleaved" if spans > 1 else "OneForwardOneBackward",
    }  # fmt: skip


def step(
    time: float,
    loss: float | None,
    speed: float | None,
    *,
    number: int = 1,
    idle: float = 0.25,
    index: int = 0,
    level: int = 0,
) -> dict[str, Any]:
    """The line of the step `index` in generation `number`, with its samples a second and idle share."""
    return {
        "time": time,
        "step": index,
        "level": level,
        "loss": loss,
        "samplesPerSecond": speed,
        "generation": number,
        "idleShare": idle,
        "frozenAheadShare": idle / 2,
    }


def started(time: float) -> dict[str, Any]:
    """The first event of a job."""
    return {"time": time, "kind": "Started", "numLayers": LAYERS, "steps": 100}


def write_record(folder: Path, events: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> Path:
    """Writes a run's folder with these lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("events", events), ("steps", steps)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def crowded(folder: Path, seed: int) -> Path:
    """Writes a random run with many regroups, freezes and evaluations at similar times."""
    draw = random.Random(seed)
    length = 10 ** draw.uniform(0, 6)
    crowds = [draw.random() for _ in range(draw.randint(1, 4))]
    moments = sorted(
        min(max(draw.choice(crowds) + draw.gauss(0, 0.02), 0), 1) * length for _ in range(draw.randint(0, 30))
    )
    metrics = {"loss": 1.0, **dict.fromkeys(draw.sample(["accuracy", "f1", "a_metric_of_a_user_" * 4], k=2), 0.5)}
    size = 10 ** draw.uniform(-4, 7)
    events = [started(0.0), generation(0.0, 1, draw.randint(1, 8), draw.randint(1, 4))]
    for number, moment in enumerate(moments, start=2):
        frozen = draw.randint(0, LAYERS - 1)
        events += [
            {"time": moment, "kind": "Frozen", "step": number, "frozenLayers": frozen, "generation": number - 1},
            {"time": moment, "kind": "Evaluated", "step": number, "best": True,
             "metrics": {name: size * value * draw.random() for name, value in metrics.items()}},
        ]  # fmt: skip
        reason = draw.choice(["Pack", "Release", "Failure", "Drain", "Claim", "Balance"])
        layout = draw.randint(1, 12), draw.randint(1, 30)
        events.append(generation(moment, number, *layout, frozen=frozen, reason=reason))
    steps = [step(length * n / 50, size * draw.random(), size * draw.random()) for n in range(51)]
    return write_record(folder, events, steps)
