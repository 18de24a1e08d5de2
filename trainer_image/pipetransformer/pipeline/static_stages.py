"""Stages of torch's pipeline runtime, `torch.distributed.pipelining`, and the schedules that run them.

They are static: shapes and `requires_grad` are given, not inferred. So a frozen prefix sends and receives no gradients,
and units run on real values only.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from pipetransformer.errors import RunningModel
from pipetransformer.freeze.boundary import first_trainable
from pipetransformer.models import PipelineModel

from .batch import Batch
from .stage import StageModule, StageSpec
from .target import Target

_BACKWARD = RunningModel("backward")

#: Stages to keep with their buffers: enough for a round with a few sample lengths and an evaluation.
_KEPT = 8


class _Stage(PipelineStage):
    """torch's stage, whose backward reports errors as the model's."""

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with _BACKWARD:
            return super().backward_maybe_with_nosync(*args, **kwargs)


class _Scheduled(NamedTuple):
    stage: PipelineStage
    schedule: PipelineScheduleSingle


class StaticStages:
    """One worker's stage for every input shape. All workers of the pipeline create the same stages."""

    def __init__(self, spec: StageSpec, model: PipelineModel, module: StageModule, target: Target) -> None:
        """
        Args:
            spec: the stage.
            model: for shapes.
            module: the module that all stages run.
            target: computes losses and metrics from a last stage's outputs.
        """
        self._spec = spec
        self._model = model
        self._module = module
        self._target = target
        self._scheduled: OrderedDict[tuple[bool, int, int | None], _Scheduled] = OrderedDict()

    def run(self, batch: Batch) -> list[Tensor]:
        """Run the forward, and in training the backward, of all micro-batches. Returns losses on the last stage."""
        spec = self._spec
        rows = torch.arange(len(batch.sample_ids), device=spec.device)
        stage, schedule = self._schedule(batch)
        losses: list[Tensor] = []
        (schedule.step if batch.training else schedule.eval)(
            *((rows,) if spec.is_first else ()),
            target=rows if spec.is_last else None,
            losses=losses if spec.is_last else None,
            return_outputs=False,
        )
        stage.clear_runtime_states()  # otherwise it keeps outputs until it runs again
        return losses

    def _schedule(self, batch: Batch) -> _Scheduled:
        """The stage and schedule of a (mode, M, length), because receive buffers depend on all three. Keeps the latest
        ones. All workers of the pipeline keep the same, because they meet to create one."""
        num_micro_batches = len(batch.micro_batches)
        key = (batch.training, num_micro_batches, batch.length)
        if key not in self._scheduled:
            if len(self._scheduled) == _KEPT:
                self._scheduled.popitem(last=False)
            spec = self._spec
            stage = _Stage(
                self._module,
                spec.stage,
                spec.stages,
                spec.device,
                input_args=self._example_input(batch),
                output_args=self._example_output(batch),
                group=spec.group,
            )
            in_turns = batch.training and num_micro_batches >= spec.stages
            schedule_class = spec.schedule if in_turns else ScheduleGPipe
            # Gradients are divided once, by the global weight, after the reduction.
            loss = self._target.loss if batch.training else self._target.score
            schedule = schedule_class(stage, num_micro_batches, loss_fn=loss, scale_grads=False)
            self._scheduled[key] = _Scheduled(stage, schedule)
        self._scheduled.move_to_end(key)
        return self._scheduled[key]

    def _example_input(self, batch: Batch) -> Tensor:
        """An example of the stage's input. The first stage gets row numbers, because its prefix reads the samples."""
        spec = self._spec
        if spec.is_first:
            return torch.arange(batch.micro_batch_size, device=spec.device)
        needs_gradient = spec.span.start > first_trainable(spec.boundary)
        return torch.zeros(
            self._activation_shape(batch), dtype=spec.dtype, device=spec.device, requires_grad=needs_gradient
        )

    def _example_output(self, batch: Batch) -> Tensor:
        """An example of the stage's output. A last stage sends nothing, so its shape does not matter."""
        spec = self._spec
        shape = () if spec.is_last else self._activation_shape(batch)
        needs_gradient = spec.span.stop > first_trainable(spec.boundary)
        return torch.zeros(shape, dtype=spec.dtype, device=spec.device, requires_grad=needs_gradient)

    def _activation_shape(self, batch: Batch) -> tuple[int, ...]:
        return self._model.activation_shape(batch.micro_batch_size, batch.length)
