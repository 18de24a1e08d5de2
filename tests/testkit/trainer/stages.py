"""Runners of a model's spans, one span a worker."""

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
) -> StageRunner:
    """This rank's runner; the group is the pipeline. 1F1B by default. Its units are `runner.spec.units`."""
    workers, count = group.size(), len(model.units)
    spans = [range(rank * count // workers, (rank + 1) * count // workers) for rank in range(workers)]
    owners = tuple(range(workers))
    made = schedule or OneForwardOneBackward()
    spec = StageSpec(group.rank(), spans, owners, boundary, made, group, torch.device("cpu"), dtype)
    return StageRunner(spec, model, [model.units[unit] for unit in spec.units])
