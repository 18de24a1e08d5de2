"""What a job is before any worker has a role: the facts that every worker derives alike from the spec."""

import copy
import logging
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn

from pipetransformer.callbacks.callback import Callback
from pipetransformer.data import (
    AugmentedSplit,
    Dataset,
    EpochOrder,
    MicroBatch,
    deal,
    digest,
    inputs_change,
    padded_lengths,
    pipelines_of,
)
from pipetransformer.errors import SpecError
from pipetransformer.freeze import FreezePolicy
from pipetransformer.models import PipelineModel
from pipetransformer.models.metrics import Metric
from pipetransformer.partition import (
    Cut,
    MemoryBoundError,
    ModelCosts,
    Prediction,
    StepModel,
    assumed_costs,
    make_offers,
    paper_bytes,
    spans,
)
from pipetransformer.pipeline import ScheduleClass, one_forward_one_backward
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.optimizer import moment_shapes
from pipetransformer_contract.choose import Packing
from pipetransformer_contract.messages import Offer
from pipetransformer_contract.spec import CachePolicy, Precision, TrainerSpec

from .script_parts import Overruled

logger = logging.getLogger(__name__)

_PROBE_SAMPLES = 16


@dataclass(frozen=True)
class Job:
    """The spec with its data, order and model.

    Attributes:
        policy: decides the frozen boundary; as it is before the first step, so a worker asks a copy.
        schedule: of every pipeline.
        model: for its names, shapes, loss and metric; its units are on the meta device.
        metrics: of an evaluation, by name.
        build_units: the units of these indices as training starts from them, on the CPU.
        micro_batch_size: samples of every micro-batch, at every layout whose cut is not measured.
        total_steps: global steps of the whole job.
        unit_bytes: of the parameters and buffers of each unit.
        no_decay: whole-model names of the parameters that weight decay leaves alone.
        overruled: what the program says of the job and the spec has otherwise.
        model_function: where the program's own function that builds the model is, as `module:function`; may be empty.
        input_dtype: of the samples' inputs.
    """

    spec: TrainerSpec
    dtype: torch.dtype
    dataset: Dataset
    order: EpochOrder
    policy: FreezePolicy
    schedule: ScheduleClass
    model: PipelineModel
    metrics: Mapping[str, Metric]
    build_units: Callable[[Collection[int]], dict[int, nn.Module]]
    micro_batch_size: int
    total_steps: int
    unit_bytes: Sequence[int]
    no_decay: Collection[str]
    callbacks: Sequence[Callback] = ()
    overruled: Sequence[Overruled] = ()
    model_function: str = ""
    input_dtype: torch.dtype = torch.float32

    @property
    def autocast(self) -> torch.dtype | None:
        """Type to compute products in, where it is not that of the weights."""
        return torch.bfloat16 if self.spec.training.precision is Precision.BFLOAT16 else None

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a run that goes on from a checkpoint of this one has in common with it: the rest may change."""
        training = self.spec.training
        return {
            "numLayers": self.num_layers,
            "numShards": self.order.num_shards,
            "parameters": sum(parameter.numel() for unit in self.model.units for parameter in unit.parameters()),
            "numHeads": self.spec.model.num_heads,  # which no shape shows
            "trainingSamples": len(self.dataset.train),
            "trainingTargets": self.training_digest,
            "globalBatchSize": training.global_batch_size,
            "seed": training.seed,
            "optimizer": training.optimizer.name.value,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    @cached_property
    def training_digest(self) -> str:
        """Of the training samples."""
        return digest(self.dataset.train)

    @cached_property
    def data_digest(self) -> str:
        """Of all samples, and of the order that those for training are in."""
        return f"{self.order.num_shards}:{self.training_digest}:{digest(self.dataset.test)}"

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    def evaluates_after(self, step: int) -> bool:
        """Whether the held-out samples are scored after `step` committed steps: at the end, too, beyond which a run is
        that goes on with fewer steps than its checkpoint has."""
        spec = self.spec.evaluation
        if len(self.dataset.test) == 0:
            return False
        every = spec.every_steps or (spec.every_epochs or 1) * self.order.steps_per_epoch
        return step % every == 0 or step >= self.total_steps

    @cached_property
    def inputs_change(self) -> bool:
        """Whether samples that are read twice differ. They are read once, and before the first step."""
        return inputs_change(self.dataset)

    @cached_property
    def bytes_budget(self) -> int:
        """What the largest stage of the job's first layout needs, nothing frozen."""
        return paper_bytes(self.unit_bytes, 0, self.spec.pipeline.stages)

    @cached_property
    def stage_bytes(self) -> int:
        """Parameters, gradients and moments of the largest stage of the job's first layout; later ones need no more."""
        spans = self.cut(0, self.spec.pipeline.stages, 1, None).spans
        return max(sum(self._trained_bytes(self.model.units[index]) for index in span) for span in spans)

    def min_stages(self, boundary: int) -> int:
        """The shortest pipeline whose largest stage needs no more than the first layout's; a restart begins with it."""
        stages = self.spec.pipeline.stages
        return next(
            (k for k in range(1, stages) if paper_bytes(self.unit_bytes, boundary, k) <= self.bytes_budget), stages
        )

    def cut(self, boundary: int, stages: int, pipelines: int, costs: ModelCosts | None) -> Cut:
        """Stages and micro-batches of a layout: by measured costs, if there are any, and if it then seems to fit.

        Raises:
            SpecError: there are more pipelines than shards, as an operator older than this trainer may ask for.
        """
        if pipelines > (shards := self.order.num_shards):
            raise SpecError(
                "spec.elasticPolicy.maxWorkers",
                f"{pipelines} pipelines of {stages} were asked for, but the data are in order of {shards}: upgrade the"
                f" operator, or set it to at most {shards * stages}",
            )
        if costs is not None:
            try:
                return self.step_model(costs).cut(boundary, stages, pipelines)
            except MemoryBoundError as error:
                logger.warning("%d stages, %d pipelines: %s; cut as if nothing was measured", stages, pipelines, error)
        return Cut(spans(self.num_layers, boundary, stages), self.micro_batch_size)

    def step_model(self, costs: ModelCosts | None) -> StepModel:
        """Predicts steps and cuts; without measured costs by assumed ones, whose seconds are only relative."""
        cache = self.spec.cache
        asked = costs is not None and cache.policy is not CachePolicy.NEVER
        cached = asked and not isinstance(self.dataset.train, AugmentedSplit) and not self.inputs_change
        return StepModel(
            costs=assumed_costs(self.num_layers) if costs is None else costs,
            global_batch=self.order.global_batch,
            num_shards=self.order.num_shards,
            micro_batch_size=self.micro_batch_size if costs is None else self.spec.pipeline.micro_batch_size,
            one_forward_one_backward=one_forward_one_backward(self.schedule),
            unit_bytes=self.unit_bytes,
            trained_bytes=[self._trained_bytes(unit) for unit in self.model.units],
            sample_bytes=math.prod(self.model.activation_shape(1)) * self.dtype.itemsize,
            num_samples=len(self.dataset.train),
            cache_bytes=cache.memory_bytes + cache.disk_bytes if cached else 0,
        )

    @property
    def cuts_by_paper(self) -> bool:
        """Whether nothing that was measured decides about layouts and cuts."""
        return self.spec.pipeline.packing is Packing.PAPER

    def choice_model(self, costs: ModelCosts | None) -> StepModel:
        """The model that predicts steps for a choice of layout: with packing Paper by assumed costs alone."""
        return self.step_model(None if self.cuts_by_paper else costs)

    def offers(
        self, boundary: int, costs: ModelCosts | None, *, scale: float | None, pause_seconds: float
    ) -> list[Offer]:
        """What the job could do with `boundary` blocks frozen, at each number of stages: the leader reports it, and a
        plan made before the training asks it of the same job.

        Args:
            boundary: frozen blocks.
            costs: of the units, once they are measured.
            scale: what predicted seconds are multiplied by; None to offer none.
            pause_seconds: expected cost of one regroup.
        """
        model = self.choice_model(costs)

        def predict(stages: int, pipelines: int) -> Prediction:
            cut = model.cut(boundary, stages, pipelines)
            if self.cuts_by_paper:
                needed = paper_bytes(self.unit_bytes, boundary, stages)
            else:
                needed = model.bytes_per_worker(boundary, cut, pipelines)
            return Prediction(needed, None if scale is None else scale * model.step_seconds(boundary, cut, pipelines))

        return make_offers(
            predict,
            initial_stages=self.spec.pipeline.stages,
            max_workers=max(self.spec.workers, self.spec.num_shards * self.spec.pipeline.stages),
            max_pipelines=self.spec.num_shards,
            pause_seconds=pause_seconds,
        )

    def blank_unit(self, index: int) -> nn.Module:
        """A unit whose state is to be replaced: that is on the meta device."""
        return copy.deepcopy(self.model.units[index])

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
        return self._deal(step, pipelines, micro_batch_size)

    @cached_property
    def _deal(self) -> Callable[[int, int, int], list[list[MicroBatch]]]:
        lengths = padded_lengths(self.dataset.train, self.dataset.info)

        @lru_cache(maxsize=2)  # a round trains them, and the ledger notes them
        def dealt(step: int, pipelines: int, micro_batch_size: int) -> list[list[MicroBatch]]:
            return deal(self.order.batch(step), pipelines, micro_batch_size, lengths)

        return dealt

    def training_samples(self, step: int, layout: StageLayout) -> list[int]:
        """Samples of the layout's own pipeline at a global step, in their order, padding included."""
        dealt = self.training_micro_batches(step, layout.pipelines, layout.micro_batch_size)[layout.pipeline]
        return [sample_id for micro_batch in dealt for sample_id in micro_batch.sample_ids]

    def test_micro_batches(self, pipelines: int, micro_batch_size: int) -> list[list[MicroBatch]]:
        """Micro-batches of each pipeline over the whole held-out split."""
        count = len(self.dataset.test)
        shards = [list(range(p * count // pipelines, (p + 1) * count // pipelines)) for p in range(pipelines)]
        return deal(shards, pipelines, micro_batch_size, padded_lengths(self.dataset.test, self.dataset.info))

    def users(self, pipelines: int) -> Callable[[str, int], int]:
        """Which of so many pipelines uses a sample, told its split (`train` or `test`) and its id."""
        # Held-out samples are dealt as one shard for each pipeline.
        by_shard, by_part = pipelines_of(pipelines, self.order.num_shards), pipelines_of(pipelines, pipelines)
        ends = [(p + 1) * len(self.dataset.test) // pipelines for p in range(pipelines)]

        def pipeline(split: str, sample_id: int) -> int:
            if split == "train":
                return by_shard[self.order.shard(sample_id)]
            return by_part[bisect_right(ends, sample_id)]

        return pipeline

    def probe_micro_batches(self, micro_batch_size: int) -> list[MicroBatch]:
        """The few training samples by which a freeze policy may compare a block with what it was: always the same."""
        count = len(self.dataset.train)
        ids = random.Random(self.spec.training.seed).sample(range(count), min(count, _PROBE_SAMPLES))
        return deal([ids], 1, micro_batch_size, padded_lengths(self.dataset.train, self.dataset.info))[0]
