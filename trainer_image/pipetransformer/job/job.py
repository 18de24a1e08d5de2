"""Facts about a job that do not depend on a worker's role. All workers derive the same facts from the same spec."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from pipetransformer.callbacks.callback import Callback
from pipetransformer.data import Dataset, Dealer, EpochOrder, digest
from pipetransformer.freeze import FreezePolicy, Limits
from pipetransformer.models import PipelineModel
from pipetransformer.models.metrics import Metric
from pipetransformer.multilevel import Levels, Visit, visits_of
from pipetransformer.schedules import Schedule
from pipetransformer.state.codec import UnitCodec
from pipetransformer.state.control import Control
from pipetransformer.state.optimizer import learning_rate
from pipetransformer_contract.spec import CachePolicy, Precision, TrainerSpec

from .layouts import Layouts
from .script_parts import Overruled


@dataclass(frozen=True)
class Job:
    """The spec, with the data, order and model that it describes.

    With `multiLevel` there is one `Job` for each level. The job of level 0 holds the jobs of the smaller levels.

    Attributes:
        spec: the trainer's spec.
        dtype: type of weights and floating-point inputs.
        dataset: training and held-out samples.
        order: the order of the training samples.
        policy: decides the frozen boundary. Nothing changes this object, because each worker uses its own copy.
        freeze_limits: smallest and largest boundary, whatever the policy decides.
        schedule: the pipeline schedule of the spec.
        model: names, shapes and loss of the model. Its units are on the meta device.
        metrics: metrics of an evaluation, by name.
        build_units: builds the units with the given indices, with initial weights, on the CPU.
        micro_batch_size: samples in a micro-batch, unless measured costs choose another size for a layout.
        total_steps: global steps of the whole job.
        unit_bytes: bytes of each unit's parameters and buffers.
        no_decay: whole-model names of the parameters without weight decay.
        callbacks: objects that the leader tells about the training.
        overruled: fields that the program sets to another value than the manifest, which wins.
        model_function: `module:function` of the program's model function; empty if it cannot be imported by a name.
        input_dtype: type of the samples' inputs.
        level: level of `multiLevel` to which `model` belongs; 0 for the job's own model.
        whole: in the job of a smaller level, the job of level 0. It answers what does not depend on the level.
        smaller: in the job of level 0, the jobs of levels 1, 2, and so on.
        from_above: how the models of this level and of the next larger one are made of each other; None for level 0.
    """

    spec: TrainerSpec
    dtype: torch.dtype
    dataset: Dataset
    order: EpochOrder
    policy: FreezePolicy
    freeze_limits: Limits
    schedule: Schedule
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
    level: int = 0
    whole: "Job | None" = None
    smaller: Sequence["Job"] = ()
    from_above: Levels | None = None

    @cached_property
    def visits(self) -> tuple[Visit, ...]:
        """The visits of the run in order. A visit is a period of training of one level. Without `multiLevel` there
        is only one."""
        return visits_of(self.spec.multi_level, self.total_steps)

    def at(self, visit: int) -> "Job":
        """The job of the level that trains in a visit. All levels have the same data and steps.

        Args:
            visit: index in `visits`.
        """
        whole, level = self.whole or self, self.visits[visit].level
        return whole.smaller[level - 1] if level else whole

    def is_last(self, visit: int) -> bool:
        """Whether `visit` (an index in `visits`) is the last one. Only in it layers freeze, the best model is kept, and
        training may end early."""
        return visit == len(self.visits) - 1

    def visit_ends(self, control: Control) -> bool:
        """Whether the next visit begins before the next step."""
        return not self.is_last(control.visit) and control.step >= self.visits[control.visit].end

    def grows_into(self, visit: int) -> "Job | None":
        """The job of the visit after `visit` if its model is larger; otherwise, or after the last visit, None."""
        if self.is_last(visit):
            return None
        following = self.at(visit + 1)
        return following if following.level < self.at(visit).level else None

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step (from 0). Each visit runs the schedule from its start, but only the first visit
        warms up."""
        training, now = self.spec.training, next((one for one in self.visits if step < one.end), self.visits[-1])
        optimizer, schedule = training.optimizer, training.learning_rate_schedule
        if now.learning_rate is not None:
            optimizer = optimizer.model_copy(update={"learning_rate": now.learning_rate})
        if now.first_step:
            schedule = schedule.model_copy(update={"warmup_steps": 0})
        return learning_rate(optimizer, schedule, step - now.first_step, now.steps)

    @cached_property
    def codec(self) -> UnitCodec:
        """Packs parameters and optimizer state of each unit of this level's model into buffers and back."""
        return UnitCodec(self.spec.training.optimizer, self.num_layers, self.model.ties, self.spec.pipeline.predicts)

    @property
    def shells(self) -> Sequence[nn.Module]:
        """The units of this level's model on the meta device, which have shapes but no values."""
        return self.model.units

    @property
    def autocast(self) -> torch.dtype | None:
        """Type for the computation of matrix products; None for the weights' type."""
        return torch.bfloat16 if self.spec.training.precision is Precision.BFLOAT16 else None

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The values, by name, that a run must share with this run to resume its checkpoint. All others may change."""
        if self.whole is not None:
            return self.whole.identity
        training, levels = self.spec.training, self.spec.multi_level
        # Targets that are drawn anew at each read, as by mixup, have no digest that a later run could compare.
        targets = {} if self.dataset.targets_change else {"trainingTargets": self.training_digest}
        return {
            "numLayers": self.num_layers,
            "numShards": self.order.num_shards,
            "freezeAlways": list(self.spec.freeze.always),  # first, because it also changes the number of parameters
            "parameters": sum(parameter.numel() for unit in self.model.units for parameter in unit.parameters()),
            "numHeads": self.spec.model.num_heads,  # no parameter's shape depends on it
            "trainingSamples": len(self.dataset.train),
            **targets,
            "globalBatchSize": training.global_batch_size,
            "seed": training.seed,
            "optimizer": training.optimizer.name.value,
            "multiLevel": None if levels is None else levels.to_wire(),
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    @cached_property
    def training_digest(self) -> str:
        """Digest of the number of training samples and of some targets."""
        return self.whole.training_digest if self.whole is not None else digest(self.dataset.train)

    @cached_property
    def data_digest(self) -> str:
        """Digest of training samples, held-out samples and the number of shards, to compare workers."""
        if self.whole is not None:
            return self.whole.data_digest
        return f"{self.order.num_shards}:{self.training_digest}:{digest(self.dataset.test)}"

    @cached_property
    def first_sums(self) -> list[float]:
        """See `PipelineModel.first_sums`; of level 0."""
        return self.whole.first_sums if self.whole is not None else self.model.first_sums()

    @property
    def may_cache(self) -> bool:
        """Whether the spec allows a cache."""
        cache = self.spec.cache
        return cache.policy is not CachePolicy.NEVER and cache.memory_bytes + cache.disk_bytes > 0

    @property
    def inputs_change(self) -> bool:
        """Whether this or another worker saw that a sample's inputs change between two reads. Then no worker has a
        cache. False if the spec allows none."""
        return self.may_cache and self.dataset.inputs_change

    def expect_changes(self) -> None:
        """From now on let `inputs_change` be true, on all levels, because another worker saw a sample change."""
        self.dataset.expect_changes()

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    def evaluates_after(self, step: int) -> bool:
        """Whether to evaluate the held-out samples after `step` committed steps: at each interval, and at the end.

        `step` may be above the total, if a run resumes a checkpoint but has fewer total steps than the run before.
        """
        if len(self.dataset.test) == 0:
            return False
        return step % self.evaluation_steps == 0 or step >= self.total_steps

    @property
    def evaluation_steps(self) -> int:
        """Steps between evaluations."""
        spec = self.spec.evaluation
        return spec.every_steps or (spec.every_epochs or 1) * self.order.steps_per_epoch

    @cached_property
    def intervals(self) -> list[int]:
        """Steps between epochs, evaluations, checkpoints and mirrors. An asynchronous round ends at each of them."""
        checkpoint, mirror = self.spec.checkpoint, self.spec.mirror
        found = [
            self.order.steps_per_epoch,
            self.evaluation_steps,
            None if checkpoint is None else checkpoint.every_steps,
            None if mirror is None else mirror.every_steps,
        ]
        return [interval for interval in found if interval is not None]

    @property
    def steps_per_round(self) -> int:
        """Largest number of steps in a round. A decision of the freeze policy may end a round earlier."""
        return min(self.spec.pipeline.most_steps, *self.intervals)

    @cached_property
    def dealer(self) -> Dealer:
        """Deals the samples to the pipelines. All levels have the same one."""
        if self.whole is not None:
            return self.whole.dealer
        return Dealer(self.dataset, self.order, total_steps=self.total_steps, steps_per_round=self.steps_per_round)

    @cached_property
    def layouts(self) -> Layouts:
        """The layouts that this level's model can run."""
        return Layouts(
            spec=self.spec,
            dtype=self.dtype,
            dataset=self.dataset,
            order=self.order,
            schedule=self.schedule,
            model=self.model,
            micro_batch_size=self.micro_batch_size,
            unit_bytes=self.unit_bytes,
            whole_unit_bytes=(self.whole or self).unit_bytes,
            steps_per_round=self.steps_per_round,
        )

    def blank_unit(self, index: int) -> nn.Module:
        """Make a copy of a unit on the meta device. The caller sets its parameters and buffers."""
        return copy.deepcopy(self.model.units[index])
