"""Prints a job on virtual devices: `python3 -m benchmarks.virtual --dilate 2 | pipetransformer run - --run-dir DIR`.

`PIPETRANSFORMER_DEVICE_BYTES` declares the memory of each worker.
"""

import argparse
from typing import Any

import yaml

from .calibration import DEFAULT

_FREEZE = {"policy": "PaperSchedule", "alpha": 1 / 3, "startAfterSteps": 20, "intervalSteps": 20}
_CONTAINER = {"name": "trainer", "image": "virtual", "resources": {"limits": {"nvidia.com/gpu": 1}}}


def manifest(
    layers: int, stages: int, workers: int, dilate: float, calibration: str, kind: str, steps: int
) -> dict[str, Any]:
    """A PipeTrainingJob that freezes a third of its layers every 20 steps."""
    options = {"layers": layers, "kind": kind, "dilate": dilate, "calibration": calibration}
    return {
        "apiVersion": "training.pipetransformer.io/v1alpha1",
        "kind": "PipeTrainingJob",
        "metadata": {"name": "virtual"},
        "spec": {
            "model": {"name": "benchmarks.virtual:model", "numLayers": layers, "options": options},
            "data": {"name": "benchmarks.virtual:data"},
            "training": {"steps": steps, "globalBatchSize": 32},
            "freeze": _FREEZE,
            "pipeline": {"stages": stages, "packing": "Measured"},
            "elasticPolicy": {"workers": workers, "minWorkers": 1, "maxWorkers": workers},
            "podTemplate": {"spec": {"containers": [_CONTAINER]}},
        },
    }


def main() -> None:
    """Print the manifest."""
    parser = argparse.ArgumentParser(prog="benchmarks.virtual", description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--stages", type=int, default=4, help="stages at the start")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--dilate", type=float, default=1.0, help="makes all declared times so many times longer")
    parser.add_argument("--calibration", default=str(DEFAULT), help="file with declared times")
    parser.add_argument("--kind", default="even", help="profile in that file")
    asked = parser.parse_args()
    job = manifest(asked.layers, asked.stages, asked.workers, asked.dilate, asked.calibration, asked.kind, asked.steps)
    print(yaml.safe_dump(job, sort_keys=False), end="")


if __name__ == "__main__":
    main()
