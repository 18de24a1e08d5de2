"""A job with `schedule: Auto` that releases workers as its layers freeze, on layers of declared times.

A layer's backward takes five times its forward, so frozen layers cost a sixth. On 4 workers a step takes at least 18
forwards of a layer and sample. With 8 frozen layers 2 workers take 16 and one takes 32; with 11 one takes 17.
"""

from __future__ import annotations

from itertools import groupby

from tests.testkit.cluster.kube import Object

LAYERS = 12
FORWARD_SECONDS = 0.001
#: Far apart, so that a loaded machine has measured and released between two freezes.
FREEZES = [{"step": 32, "boundary": 8}, {"step": 200, "boundary": 11}]
STEPS = 288
SAMPLES, BATCH = 256, 16
EPOCHS = STEPS * BATCH // SAMPLES


def with_auto(job: Object, module: str) -> Object:
    """The job with the model and the data of `module`, and all that lets its measured layouts go from 4 to 2 to 1."""
    spec: Object = job["spec"]
    options = {"layers": LAYERS, "forward": FORWARD_SECONDS, "backward": 5 * FORWARD_SECONDS}
    spec["model"] = {"name": f"{module}:model", "numLayers": LAYERS, "options": options}
    spec["data"] = {"name": f"{module}:data", "options": {"samples": SAMPLES}}
    spec["training"] = {"epochs": EPOCHS, "globalBatchSize": BATCH, "seed": 0}
    spec["freeze"] = {"policy": "Explicit", "boundaries": FREEZES}
    spec["pipeline"] = {"stages": 4, "packing": "Measured", "schedule": "Auto"}
    spec["elasticPolicy"] = {
        "workers": 4, "minWorkers": 1, "maxWorkers": 4, "onPack": "Release", "releaseDownTo": "StartingStep",
    }  # fmt: skip
    return job


def untold(generations: list[Object], messages: list[str]) -> list[Object]:
    """Generations of a record whose schedule, with the reason for it, no message names."""
    return [
        one
        for one in generations
        if not any(
            message.startswith(f"Generation {one['generation']} trains: ") and message.endswith(_schedule(one))
            for message in messages
        )
    ]


def _schedule(generation: Object) -> str:
    why = generation["why_schedule"]
    return f", {generation['schedule']}{f' ({why})' if why else ''}"


def layouts(generations: list[Object]) -> list[tuple[int, int]]:
    """(stages, pipelines) of the generations. A generation that only cuts its stages again is left out."""
    return [layout for layout, _ in groupby((one["stages"], one["pipelines"]) for one in generations)]
