"""What freezing, elastic layouts and the cache can save at best, computed from declared times, and its check.

Twelve equal layers freeze by thirds of what is left, once an epoch, from the second of ten epochs; the last one trains
on. Links are free. In the epoch after a freeze the cache advances samples from the earlier boundary.
The check compares the ideal with brute force, which tries every layout, micro-batch size and cut of random jobs.
"""

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from benchmarks.virtual import UnitTimes, profile
from pipetransformer.partition import ModelCosts, StepModel, UnitCost
from pipetransformer.partition.ideal import Course, Ideal, Segment, segments
from pipetransformer_contract.choose import Bounds, Packing
from pipetransformer_contract.layout import Layout
from tests.testkit import ROOT
from tests.testkit.results import print_table, write_result
from tests.testkit.trainer.ideal_cases import draw

#: How far the ideal may be from brute force, relative.
LARGEST_DIFFERENCE = 1e-9
_CASES = 300
_LAYERS = 12
_STEPS_PER_EPOCH, _EPOCHS = 64, 10
#: Frozen layers after the first epoch, the second, and so on.
_BOUNDARIES = (4, 7, 9, 10, 11)
_SAMPLES_PER_GPU = 16
#: Bytes of a layer's parameters. With a gradient and two moments it takes four times that.
_LAYER_BYTES = 1_000_000
_TRAINED = 4


@dataclass(frozen=True)
class Device:
    """GPUs, and for how many layers that train each has memory; None for any number."""

    gpus: int
    layers: int | None

    @property
    def name(self) -> str:
        return f"{self.gpus} GPUs of {self.layers} layers"


def worst_ratio(seeds: Iterable[int], most_layers: int) -> tuple[float, int]:
    """The largest ratio of the ideal's step to that of brute force, or its inverse, of all layouts of random jobs; and
    the number of layouts. Infinite if one of them finds a layout that the other does not."""
    worst, layouts = 1.0, 0
    for seed in seeds:
        case = draw(seed, most_layers)
        situation = case.with_missing()
        brute = situation.by_layout()
        found = case.ideal().layouts(situation.frozen, case.cached, case.off)
        ours = {(layout.stages, layout.pipelines): best.seconds for layout, best in found.items()}
        if ours.keys() != brute.keys():
            return math.inf, layouts
        layouts += len(ours)
        worst = max([worst, *(max(ours[key] / brute[key], brute[key] / ours[key]) for key in ours)])
    return worst, layouts


def ideal_of(device: Device, *, cached: bool = True, offloaded: bool = False) -> Ideal:
    """The job on such GPUs, with or without a cache that holds all samples, and with frozen layers off the GPU once the
    cache has their outputs."""
    times = profile().units(_LAYERS)
    samples = _SAMPLES_PER_GPU * device.gpus
    model = StepModel(
        costs=ModelCosts(
            micro_batch_sizes=(1, 8),
            small=_costs(times, 1),
            large=_costs(times, 8),
            worker_bytes=None if device.layers is None else device.layers * _TRAINED * _LAYER_BYTES,
        ),
        global_batch=samples,
        num_shards=samples,
        micro_batch_size=None,
        unit_bytes=[0, *[_LAYER_BYTES] * _LAYERS, 0],
        trained_bytes=[0, *[_TRAINED * _LAYER_BYTES] * _LAYERS, 0],
        sample_bytes=1,
        num_samples=samples * _STEPS_PER_EPOCH,
        cache_bytes=samples * _STEPS_PER_EPOCH if cached else 0,
        offloads=offloaded,
    )
    bounds = Bounds(Layout(1, 1), 1, device.gpus, 1, samples, bytes_budget=0)
    return Ideal(model, bounds, Packing.MEASURED)


def paper_run() -> list[Segment]:
    """Ten epochs in which a third of the layers left freezes after each, but never the last one."""
    return segments(
        [(epoch * _STEPS_PER_EPOCH, boundary) for epoch, boundary in enumerate(_BOUNDARIES, start=1)],
        _EPOCHS * _STEPS_PER_EPOCH,
        _STEPS_PER_EPOCH,
    )


def courses(device: Device) -> Iterator[tuple[str, float, float, Course | None]]:
    """(run, its seconds, its GPU-seconds, its layouts), first the one that the others are compared with."""
    ideal, run = ideal_of(device), paper_run()
    without, off = ideal_of(device, cached=False), ideal_of(device, offloaded=True)
    lone = replace(device, layers=None)
    ddp, ddp_without = ideal_of(lone), ideal_of(lone, cached=False)
    spread = Layout(1, device.gpus)
    steps = sum(segment.steps for segment in run)
    named = {
        "static": ideal.unfrozen(steps),
        "frozen_recut": without.kept(ideal.static(), run),
        "frozen_recut_cache": ideal.kept(ideal.static(), run),
        "elastic": without.elastic(run),
        "elastic_cache": ideal.elastic(run),
        "elastic_cache_released": ideal.released(run),
        "elastic_cache_offload": off.elastic(run),
        "elastic_cache_offload_released": off.released(run),
        "ddp_if_it_fitted": ddp.kept(spread, [Segment(0, steps, 0, 0, 0)]),
        "ddp_frozen_if_it_fitted": ddp_without.kept(spread, run),
        "ddp_frozen_cache_if_it_fitted": ddp.kept(spread, run),
    }
    for name, course in named.items():
        yield name, course.seconds, course.gpu_seconds, course
    for name, bound in (("bound", without), ("bound_cache", ideal)):
        seconds = bound.work_seconds(run)
        yield name, seconds, seconds * device.gpus, None


def _costs(times: list[UnitTimes], size: int) -> list[UnitCost]:
    return [
        UnitCost(once, once * (unit.input_gradient + unit.weight_gradient), once * unit.weight_gradient)
        for unit, once in ((unit, unit.forward(size)) for unit in times)
    ]


def main() -> int:
    worst, layouts = worst_ratio(range(_CASES), most_layers=8)
    print(f"{_CASES} random jobs, {layouts} layouts: the ideal is brute force's times {worst:.12f}")
    tables = {}
    for device in (Device(4, 3), Device(8, 3), Device(16, 3), Device(16, 2)):
        found = list(courses(device))
        _, static, static_gpu, _ = found[0]
        rows = [
            (
                name,
                seconds,
                static / seconds,
                gpu_seconds / static_gpu,
                "" if course is None else ", ".join(f"{one.stages}x{one.pipelines}" for one in course.layouts),
            )
            for name, seconds, gpu_seconds, course in found
        ]
        print_table(device.name, ["run", "seconds", "speed-up", "GPU time", "layouts"], rows)
        tables[device.name] = {
            name: {"seconds": seconds, "speedup": speedup, "gpu_time": gpu_time, "layouts": layouts_of_run.split(", ")}
            for name, seconds, speedup, gpu_time, layouts_of_run in rows
        }
    path = write_result(
        "worth-ideal",
        {
            "ideal": {"brute_force_worst_ratio": worst, "brute_force_jobs": _CASES, "brute_force_layouts": layouts},
            "cases": tables,
        },
    )
    print(f"written to {path.relative_to(ROOT)}")
    return 0 if worst <= 1 + LARGEST_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
