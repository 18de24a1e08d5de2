"""The job of all whole runs, on virtual devices of a declared memory, and what it could take at best.

Twelve equal layers train for ten epochs. After the first five epochs a third of the layers left freezes, but never the
last layer. A stage's turn takes about 20 ms where a pipeline has four stages.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.virtual import UnitTimes, profile
from pipetransformer.library.forecast import Forecast, measure_here
from pipetransformer.partition import ModelCosts, UnitCost
from pipetransformer.partition.ideal import Course, Ideal
from pipetransformer_contract.api import JobSpec, PipeTrainingJob, trainer_spec
from pipetransformer_contract.api.manifest import Document, local_job, local_manifest
from pipetransformer_contract.choose import Bounds, Packing
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.wire import Env

from .way import Shape, Way

LAYERS, WIDTH = 12, 128
STEPS_PER_EPOCH, EPOCHS = 12, 10
STEPS = STEPS_PER_EPOCH * EPOCHS
SAMPLES_PER_GPU = 16
#: The folder of a job that does not run.
_NOWHERE = Path("/nowhere")
#: Memory besides the trained layers, in layers: for what layers keep for their backwards, and for the model's ends.
SLACK_LAYERS = 0.6


@dataclass(frozen=True)
class Case:
    """Devices.

    Attributes:
        gpus: the most that a run may hold.
        layers: number of layers that train for which each has memory.
        dilate: makes all declared times so many times longer. Software then weighs as much less.
    """

    gpus: int
    layers: int
    dilate: float = 1.0

    @property
    def name(self) -> str:
        """Key in the result."""
        name = f"n{self.gpus}" if self.layers == 3 else f"n{self.gpus}_{self.layers}_layers"
        return name if self.dilate == 1 else f"{name}_dilated_{self.dilate:g}"

    @property
    def device_bytes(self) -> int:
        """Memory of a device."""
        trained = self.forecast(_LONE).job.layouts.step_model(None).trained_bytes[1]
        return round((self.layers + SLACK_LAYERS) * trained)

    def static(self) -> Layout:
        """The best static layout that fits: the fastest of all by declared times."""
        return self._ideal(_LONE, self.gpus, self.device_bytes).static()

    def ideal(self, way: Way) -> Course | None:
        """What the way could take at best, without pauses; None for a way that has no such bound."""
        if way.shape is Shape.AS_CUT or way.packing is Packing.PAPER:
            return None
        forecast = self.forecast(way)
        kept = self.start(way)
        run = forecast.segments()
        assert run is not None, "the freeze policy knows its steps"
        pipelines = self.gpus if way.shape is Shape.ELASTIC else kept.pipelines
        ideal = self._ideal(way, pipelines, None if way.fits else self.device_bytes)
        return ideal.elastic(run) if way.shape.is_elastic else ideal.kept(kept, run)

    def start(self, way: Way) -> Layout:
        """The way's first layout."""
        return Layout(1, self.gpus) if way.fits else self.static()

    def forecast(self, way: Way, device_bytes: int | None = None) -> Forecast:
        """The way's job with declared times."""
        start = Layout(1, self.gpus)  # no forecast depends on it
        job = local_job(local_manifest(Document(way.name, self.manifest(way, start, None))), _NOWHERE)
        return Forecast.of(trainer_spec(job.spec), _declared_costs(device_bytes, self.dilate))

    def spec(self, way: Way) -> JobSpec:
        """The way's job, which no folder matters for."""
        return self.job(way, _NOWHERE).spec

    def job(self, way: Way, run_dir: Path) -> PipeTrainingJob:
        """The way's job, for a local run in a folder."""
        memory = None if way.fits else self.device_bytes
        return local_job(local_manifest(Document(way.name, self.manifest(way, self.start(way), memory))), run_dir)

    def manifest(self, way: Way, start: Layout, device_bytes: int | None) -> dict[str, Any]:
        """The way's job.

        Args:
            way: what it does.
            start: its first layout, which a way that is not elastic keeps.
            device_bytes: memory of a device; None if nothing bounds it.
        """
        batch = SAMPLES_PER_GPU * self.gpus
        policy: dict[str, Any] = {"workers": start.workers, "maxWorkers": self.gpus, "maxPipelines": self.gpus}
        if way.shape is not Shape.ELASTIC:
            policy["maxPipelines"] = start.pipelines
        if not way.shape.is_elastic:
            policy |= {"minWorkers": start.workers, "maxWorkers": start.workers}
        memory = {} if device_bytes is None else {Env.DEVICE_BYTES: str(device_bytes)}
        return {
            "apiVersion": "training.pipetransformer.io/v1alpha1",
            "kind": "PipeTrainingJob",
            "metadata": {"name": way.name.replace("_", "-")},
            "spec": {
                "model": {
                    "name": "benchmarks.virtual:model",
                    "numLayers": LAYERS,
                    "options": {"layers": LAYERS, "width": WIDTH, "dilate": self.dilate},
                },
                "data": {"name": "benchmarks.virtual:data", "options": {"samples": batch * STEPS_PER_EPOCH}},
                "training": {"steps": STEPS, "globalBatchSize": batch, "precision": "Float64"},
                "freeze": way.freezing.spec(LAYERS, STEPS_PER_EPOCH),
                "pipeline": {
                    "stages": start.stages,
                    "packing": way.packing.value,
                    "schedule": way.schedule.value,
                },
                "cache": cache_spec(way),
                "evaluation": {"everySteps": STEPS},
                "checkpoint": {"location": str(_NOWHERE)},  # a local run has its own place for it
                "elasticPolicy": policy | {"onPack": way.on_pack.value},
                "podTemplate": {"spec": {"containers": [_container(memory)]}},
            },
        }

    def _ideal(self, way: Way, pipelines: int, device_bytes: int | None) -> Ideal:
        bounds = Bounds(Layout(1, 1), 1, self.gpus, 1, pipelines, bytes_budget=0)
        return self.forecast(way, device_bytes).ideal(bounds)


#: A job whose layers and times are those of all ways, and nothing freezes.
_LONE = Way("forecast", "")


def cache_spec(way: Way) -> dict[str, str]:
    """The way's `spec.cache`."""
    return {"policy": "Auto" if way.cache else "Never", "offloadFrozen": "Auto" if way.offload else "Never"}


def _container(environment: Mapping[str, str]) -> dict[str, Any]:
    return {"name": "trainer", "env": [{"name": name, "value": value} for name, value in environment.items()]}


@cache
def _declared_costs(device_bytes: int | None, dilate: float) -> ModelCosts:
    """Declared seconds of the units, with the bytes that they keep, which are measured."""
    kept = _kept_bytes()
    times = profile().units(LAYERS, dilate)
    sizes = kept.micro_batch_sizes
    small, large = ([_cost(*each, size) for each in zip(times, units, strict=True)]
                    for units, size in zip((kept.small, kept.large), sizes, strict=True))  # fmt: skip
    return ModelCosts(
        micro_batch_sizes=sizes,
        small=small,
        large=large,
        worker_bytes=device_bytes,
        host_apart=device_bytes is not None,
    )


def _cost(times: UnitTimes, measured: UnitCost, samples: int) -> UnitCost:
    forward = times.forward(samples)
    weights = forward * times.weight_gradient
    return UnitCost(forward, weights + forward * times.input_gradient, weights, measured.saved_bytes)


@cache
def _kept_bytes() -> ModelCosts:
    """Costs of the units on devices that take no time, for the bytes that they keep for their backwards."""
    manifest = Case(4, 3, dilate=1e-9).manifest(_LONE, Layout(1, 4), None)
    spec: JobSpec = local_job(local_manifest(Document(_LONE.name, manifest)), _NOWHERE).spec
    return measure_here(Forecast.of(trainer_spec(spec)).job)
