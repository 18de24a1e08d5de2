"""Runners of a model's spans."""

import torch
import torch.distributed as dist

from pipetransformer.models import PipelineModel
from pipetransformer.pipeline import StageRunner, StageSpec
from pipetransformer.schedules import OneForwardOneBackward, Schedule


def make_runner(
    group: dist.ProcessGroup,
    model: PipelineModel,
    schedule: Schedule | None = None,
    *,
    boundary: int = 0,
    dtype: torch.dtype = torch.float32,
    owners: tuple[int, ...] = (),
    autocast: torch.dtype | None = None,
    recompute: bool = False,
) -> StageRunner:
    """This rank's runner; the group is the pipeline. 1F1B by default, and one span a worker. Its units are
    `runner.spec.units`."""
    owners = owners or tuple(range(group.size()))
    count = len(model.units)
    spans = [range(span * count // len(owners), (span + 1) * count // len(owners)) for span in range(len(owners))]
    made = schedule or OneForwardOneBackward()
    spec = StageSpec(
        group.rank(), spans, owners, boundary, made, group, torch.device("cpu"), dtype, autocast, recompute
    )
    return StageRunner(spec, model, [model.units[unit] for unit in spec.units])
