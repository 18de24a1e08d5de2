"""Stages of torch's pipeline runtime, `torch.distributed.pipelining`, and the schedules that run them.

They are static: shapes and what needs a gradient are given, never inferred, so a frozen prefix sends and receives no
gradients, and a unit that branches on values runs on real ones only.
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

#: Stages that are kept with their buffers: those of a round whose samples come in a few lengths, and of an evaluation.
_KEPT = 8


class _Stage(PipelineStage):
    """torch's, which says of no error whose it is."""

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with _BACKWARD:
            return super().backward_maybe_with_nosync(*args, **kwargs)


class _Scheduled(NamedTuple):
    stage: PipelineStage
    schedule: PipelineScheduleSingle


class StaticStages:
    """One worker's stage, for every shape that it runs in. All workers of the pipeline make the same ones."""

    def __init__(self, spec: StageSpec, model: PipelineModel, module: StageModule, target: Target) -> None:
        """
        Args:
            spec: see there.
            model: for shapes.
            module: that all stages run.
            target: what a last stage gives its outputs to.
        """
        self._spec = spec
        self._model = model
        self._module = module
        self._target = target
        self._scheduled: OrderedDict[tuple[bool, int, int | None], _Scheduled] = OrderedDict()

    def run(self, batch: Batch) -> list[Tensor]:
        """Forward, and backward where it trains, of all micro-batches; on the last stage their losses."""
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
        stage.clear_runtime_states()  # what it keeps of the outputs, else until it runs again
        return losses

    def _schedule(self, batch: Batch) -> _Scheduled:
        """One stage and schedule for each (mode, M, length): a stage's receive buffers belong to the mode that prepared
        them. Those that were used last are kept, the same ones on all workers of the pipeline, which meet to make one.
        """
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
            # The gradients are divided once, by the global weight, after they are reduced.
            loss = self._target.loss if batch.training else self._target.score
            schedule = schedule_class(stage, num_micro_batches, loss_fn=loss, scale_grads=False)
            self._scheduled[key] = _Scheduled(stage, schedule)
        self._scheduled.move_to_end(key)
        return self._scheduled[key]

    def _example_input(self, batch: Batch) -> Tensor:
        """The first stage is given row numbers, as the loss is: its prefix knows the samples."""
        spec = self._spec
        if spec.is_first:
            return torch.arange(batch.micro_batch_size, device=spec.device)
        needs_gradient = spec.span.start > first_trainable(spec.boundary)
        return torch.zeros(
            self._activation_shape(batch), dtype=spec.dtype, device=spec.device, requires_grad=needs_gradient
        )

    def _example_output(self, batch: Batch) -> Tensor:
        """A last stage sends its output to no worker, so the schedule asks for no shape: a head need not run for it."""
        spec = self._spec
        shape = () if spec.is_last else self._activation_shape(batch)
        needs_gradient = spec.span.stop > first_trainable(spec.boundary)
        return torch.zeros(shape, dtype=spec.dtype, device=spec.device, requires_grad=needs_gradient)

    def _activation_shape(self, batch: Batch) -> tuple[int, ...]:
        return self._model.activation_shape(batch.micro_batch_size, batch.length)
