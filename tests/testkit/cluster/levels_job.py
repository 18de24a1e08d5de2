"""A job whose model becomes smaller for a while, on layers of declared times: it needs two workers, then one, then two.

The small level lasts longer than the time in which a job asks for workers ahead, so that its second worker goes first.
"""

from __future__ import annotations

from tests.testkit.cluster.kube import Object

LAYERS = 8
FORWARD_SECONDS = 0.008
DESCENT, ASCENT, STEPS = 8, 288, 304
BATCH, SAMPLES = 16, 256
EPOCHS = STEPS * BATCH // SAMPLES


def sections(module: str, forward_seconds: float) -> Object:
    """The spec's sections that say what is trained. `forward_seconds` are of one sample in one layer."""
    options = {"layers": LAYERS, "forward": forward_seconds, "backward": 2 * forward_seconds}
    return {
        "model": {"name": f"{module}:model", "numLayers": LAYERS, "options": options},
        "data": {"name": f"{module}:data", "options": {"samples": SAMPLES}},
        "training": {"steps": STEPS, "globalBatchSize": BATCH, "precision": "Float64", "seed": 0},
        "pipeline": {"stages": 2, "microBatchSize": 4, "packing": "Paper"},
        "multiLevel": {
            "levels": 2, "depthFactor": 4, "widthFactor": 1, "descentSteps": DESCENT, "ascentSteps": ASCENT,
        },
        "evaluation": {"everyEpochs": EPOCHS},
    }  # fmt: skip


def with_levels(job: Object, module: str) -> Object:
    """The job with these sections, on two workers or one."""
    spec: Object = job["spec"]
    spec.pop("freeze")
    spec |= sections(module, FORWARD_SECONDS)
    spec["elasticPolicy"] = {"workers": 2, "minWorkers": 1, "maxWorkers": 2, "onPack": "Release"}
    return job
