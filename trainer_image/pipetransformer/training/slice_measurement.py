"""Measures the times of slices of tokens, into which TeraPipe's schedule cuts long samples.

Each worker times its own units, and an all-reduce gives all workers the times of all units. If several workers hold a
unit, the slowest counts. This happens between rounds, after a few steps have warmed up the allocators.
"""

import torch
import torch.distributed as dist

from pipetransformer.data import Split
from pipetransformer.elastic.transport.groups import GenerationGroups
from pipetransformer.job.job import Job
from pipetransformer.partition.slice_costs import PROBED_QUARTERS, SliceCosts, SliceProbe, fit
from pipetransformer.pipeline import SpanProbes, StageRunner
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout

from .cost_measurement import WARM_UP_STEPS


def slices_due(job: Job, control: Control, layout: StageLayout) -> bool:
    """Whether to measure slices now: early in a job, and after layers have thawed, whose backward was not measured.
    Never if measured times do not decide the slices, or with one stage."""
    if not job.layouts.plans_slices or layout.stages == 1:
        return False
    before = control.slice_costs
    if before is None:
        return control.step >= WARM_UP_STEPS
    return bool(control.boundary < before["boundary"])


def measure_slices(
    runner: StageRunner, layout: StageLayout, groups: GenerationGroups, split: Split, control: Control
) -> SliceCosts:
    """Measure slices of tokens for all units, and fit the costs to the times. All members call this between two
    rounds.

    Args:
        runner: runs this worker's stage.
        layout: layout of the generation.
        groups: process groups of the generation.
        split: the split that the measured samples are taken from.
        control: the control state.
    """
    quarter = max(1, runner.max_tokens // 4)
    slices = [(quarter * length, quarter * context) for length, context in PROBED_QUARTERS]
    sizes = (1, max(2, layout.micro_batch_size))
    seconds = torch.zeros(layout.cut.num_units, 2, len(sizes) * len(slices), dtype=torch.float64)
    probes = SpanProbes(runner, split)
    measured = [torch.tensor(probes.measure_slices(size, slices), dtype=torch.float64) for size in sizes]
    seconds[layout.units] = torch.cat(measured, dim=2)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=groups.world)
    places = [(size, *each) for size in sizes for each in slices]
    forward, backward = (
        [fit([SliceProbe(*place, taken) for place, taken in zip(places, unit, strict=True)]) for unit in direction]
        for direction in seconds.transpose(0, 1).tolist()
    )
    return SliceCosts(forward=forward, backward=backward, boundary=control.boundary)
