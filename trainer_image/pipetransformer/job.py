"""What a job is before any worker has a role: the facts that every worker derives alike from the spec."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pipetransformer_contract.spec import Precision, ScheduleName, TrainerSpec

from .checks import check_spec
from .data import Dataset, EpochOrder, MicroBatch, deal, default_micro_batch_size, load_dataset
from .errors import SpecError
from .models import PipelineModel, build_model, build_unit
from .optimizer import moment_shapes
from .partition import Cut, MemoryBoundError, ModelCosts, StepModel, assumed_costs, paper_bytes, spans

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """The spec with its data, order and model.

    Attributes:
        model: for its names, shapes, loss and metric; its units are on the meta device.
        micro_batch_size: samples of every micro-batch, at every layout whose cut is not measured.
        total_steps: global steps of the whole job.
        unit_bytes: parameter bytes of each unit.
    """

    spec: TrainerSpec
    dtype: torch.dtype
    dataset: Dataset
    order: EpochOrder
    model: PipelineModel
    micro_batch_size: int
    total_steps: int
    unit_bytes: Sequence[int]

    @classmethod
    def load(cls, spec: TrainerSpec) -> "Job":
        """Check the spec, read the data and shape the model.

        Raises:
            SpecError: what the user asked for cannot be trained.
        """
        check_spec(spec)
        training = spec.training
        dtype = torch.float64 if training.precision is Precision.FLOAT64 else torch.float32
        dataset = load_dataset(spec.data, dtype=dtype)
        try:
            order = EpochOrder(
                seed=training.seed,
                num_samples=len(dataset.train),
                global_batch=training.global_batch_size,
                num_shards=spec.num_shards,
            )
        except ValueError as error:
            raise SpecError("spec.training.globalBatchSize", str(error)) from error
        model = build_model(spec.model, dataset.info, seed=training.seed, dtype=dtype, units=())
        stages = spec.pipeline.stages
        return cls(
            spec=spec,
            dtype=dtype,
            dataset=dataset,
            order=order,
            model=model,
            micro_batch_size=spec.pipeline.micro_batch_size
            or default_micro_batch_size(training.global_batch_size, stages, max(1, spec.workers // stages)),
            total_steps=training.steps or (training.epochs or 1) * order.steps_per_epoch,
            unit_bytes=[
                sum(parameter.numel() * parameter.element_size() for parameter in unit.parameters())
                for unit in model.units
            ],
        )

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @property
    def bytes_budget(self) -> int:
        """What the largest stage of the job's first layout needs, nothing frozen."""
        return paper_bytes(self.unit_bytes, 0, self.spec.pipeline.stages)

    def build_unit(self, index: int) -> nn.Module:
        """A freshly initialised unit on the CPU."""
        return build_unit(self.spec.model, self.dataset.info, index, seed=self.spec.training.seed, dtype=self.dtype)

    def cut(self, boundary: int, stages: int, pipelines: int, costs: ModelCosts | None) -> Cut:
        """Stages and micro-batches of a layout: by measured costs, if there are any, and if it then seems to fit."""
        if costs is not None:
            try:
                return self.step_model(costs).cut(boundary, stages, pipelines)
            except MemoryBoundError as error:
                logger.warning("%d stages, %d pipelines: %s; cut as if nothing was measured", stages, pipelines, error)
        return Cut(spans(self.num_layers, boundary, stages), self.micro_batch_size)

    def step_model(self, costs: ModelCosts | None) -> StepModel:
        """Predicts steps and cuts; without measured costs by assumed ones, whose seconds are only relative."""
        schedule = self.spec.pipeline.schedule
        return StepModel(
            costs=assumed_costs(self.num_layers) if costs is None else costs,
            global_batch=self.order.global_batch,
            micro_batch_size=self.micro_batch_size if costs is None else self.spec.pipeline.micro_batch_size,
            one_forward_one_backward=schedule is ScheduleName.ONE_FORWARD_ONE_BACKWARD,
            unit_bytes=self.unit_bytes,
            trained_bytes=[self._trained_bytes(unit) for unit in self.model.units],
            sample_bytes=math.prod(self.model.activation_shape(1)) * self.dtype.itemsize,
        )

    def _trained_bytes(self, unit: nn.Module) -> int:
        """Of a unit's parameters, their gradients and moments."""
        return sum(
            2 * parameter.nbytes
            + sum(
                shape.numel() * dtype.itemsize
                for shape, dtype in moment_shapes(self.spec.training.optimizer, parameter).values()
            )
            for parameter in unit.parameters()
        )

    def training_micro_batches(self, step: int, pipelines: int, micro_batch_size: int) -> list[list[MicroBatch]]:
        """Micro-batches of each pipeline at a global step."""
        return deal(self.order.batch(step), pipelines, micro_batch_size)

    def test_micro_batches(self, pipelines: int, micro_batch_size: int) -> list[list[MicroBatch]]:
        """Micro-batches of each pipeline over the whole held-out split."""
        count = len(self.dataset.test)
        shards = [list(range(p * count // pipelines, (p + 1) * count // pipelines)) for p in range(pipelines)]
        return deal(shards, pipelines, micro_batch_size)
