"""A job before any worker has a role: facts that every worker derives from the spec with the same result."""

import contextlib
import copy
import logging
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
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
    shards_of,
)
from pipetransformer.errors import SpecError
from pipetransformer.freeze import FreezePolicy, Limits
from pipetransformer.freeze.boundary import first_trainable
from pipetransformer.models import PipelineModel
from pipetransformer.models.metrics import Metric
from pipetransformer.multilevel import Levels, Visit, visits_of
from pipetransformer.partition import (
    AUTO,
    Candidate,
    Cut,
    MemoryBoundError,
    ModelCosts,
    Option,
    Prediction,
    StepModel,
    assumed_costs,
    make_offers,
    paper_bytes,
)
from pipetransformer.partition.slice_costs import SliceCosts, choose_slices
from pipetransformer.partition.slices import default_grain, equal_slices, in_tokens
from pipetransformer.schedules import Ahead, OwnsSpans, Schedule, TeraPipe, make_schedule
from pipetransformer.state.codec import UnitCodec
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.optimizer import learning_rate, moment_shapes
from pipetransformer_contract.choose import Packing
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Offer
from pipetransformer_contract.spec import (
    CachePolicy,
    FrozenForward,
    OffloadFrozen,
    Precision,
    ScheduleName,
    TrainerSpec,
)

from .script_parts import Overruled

logger = logging.getLogger(__name__)

_PROBE_SAMPLES = 16


@dataclass(frozen=True)
class Job:
    """The spec with its data, order and model.

    Attributes:
        policy: decides the frozen boundary. It stays as before the first step; a worker uses a copy.
        freeze_limits: bounds of the boundary, whatever the policy decides.
        schedule: the pipeline schedule.
        model: for its names, shapes, loss and metric; its units are on the meta device.
        metrics: metrics of an evaluation, by name.
        build_units: builds the units of these indices with their initial weights, on the CPU.
        micro_batch_size: samples in a micro-batch, unless measured costs choose another size for a layout.
        total_steps: global steps of the whole job.
        unit_bytes: bytes of each unit's parameters and buffers.
        no_decay: whole-model names of the parameters without weight decay.
        overruled: fields that the program sets and the spec overrules.
        model_function: `module:function` of the program's model function; may be empty.
        input_dtype: type of the samples' inputs.
        level: which level of `multiLevel` this is; 0 for the job's own model.
        whole: the job of level 0 if this is a smaller one, which is asked for what does not depend on the level.
        smaller: the jobs of levels 1, 2, ..., which differ in what follows from the model.
        from_above: how a smaller level and the level above are made of each other; None for level 0.
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
        """The levels that train, one after the other; a single visit without `multiLevel`."""
        return visits_of(self.spec.multi_level, self.total_steps)

    def at(self, visit: int) -> "Job":
        """The job as it is in a visit: with the model of its level, and the same data and steps."""
        whole, level = self.whole or self, self.visits[visit].level
        return whole.smaller[level - 1] if level else whole

    def is_last(self, visit: int) -> bool:
        """Whether this is the last visit of level 0. Freezing, the best model and an early end belong to it alone."""
        return visit == len(self.visits) - 1

    def visit_ends(self, control: Control) -> bool:
        """Whether the next visit begins before the next step."""
        return not self.is_last(control.visit) and control.step >= self.visits[control.visit].end

    def grows_into(self, visit: int) -> "Job | None":
        """The job of the next visit if its model is larger; otherwise None."""
        if self.is_last(visit):
            return None
        following = self.at(visit + 1)
        return following if following.level < self.at(visit).level else None

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step (from 0). Each visit runs the whole schedule; only the first one warms up."""
        training, now = self.spec.training, next((one for one in self.visits if step < one.end), self.visits[-1])
        optimizer, schedule = training.optimizer, training.learning_rate_schedule
        if now.learning_rate is not None:
            optimizer = optimizer.model_copy(update={"learning_rate": now.learning_rate})
        if now.first_step:
            schedule = schedule.model_copy(update={"warmup_steps": 0})
        return learning_rate(optimizer, schedule, step - now.first_step, now.steps)

    @cached_property
    def codec(self) -> UnitCodec:
        """Packs the units of this level."""
        return UnitCodec(self.spec.training.optimizer, self.num_layers, self.model.ties, self.predicts)

    @property
    def shells(self) -> Sequence[nn.Module]:
        """The units of this level on the meta device, for their shapes."""
        return self.model.units

    @property
    def autocast(self) -> torch.dtype | None:
        """Type to compute products in; None for the weights' type."""
        return torch.bfloat16 if self.spec.training.precision is Precision.BFLOAT16 else None

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What must be equal in a run that resumes a checkpoint of this one; everything else may change."""
        if self.whole is not None:
            return self.whole.identity
        training, levels = self.spec.training, self.spec.multi_level
        return {
            "numLayers": self.num_layers,
            "numShards": self.order.num_shards,
            "freezeAlways": list(self.spec.freeze.always),  # before the number of parameters, which follows from it
            "parameters": sum(parameter.numel() for unit in self.model.units for parameter in unit.parameters()),
            "numHeads": self.spec.model.num_heads,  # no shape shows it
            "trainingSamples": len(self.dataset.train),
            "trainingTargets": self.training_digest,
            "globalBatchSize": training.global_batch_size,
            "seed": training.seed,
            "optimizer": training.optimizer.name.value,
            "multiLevel": None if levels is None else levels.to_wire(),
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    @cached_property
    def training_digest(self) -> str:
        """Digest of the training samples."""
        return self.whole.training_digest if self.whole is not None else digest(self.dataset.train)

    @cached_property
    def data_digest(self) -> str:
        """Digest of all samples and of the training order."""
        if self.whole is not None:
            return self.whole.data_digest
        return f"{self.order.num_shards}:{self.training_digest}:{digest(self.dataset.test)}"

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    def evaluates_after(self, step: int) -> bool:
        """Whether the held-out samples are evaluated after `step` committed steps. The end is included; a run that
        resumes with fewer total steps than its checkpoint is already past it."""
        if len(self.dataset.test) == 0:
            return False
        return step % self.evaluation_steps == 0 or step >= self.total_steps

    @property
    def evaluation_steps(self) -> int:
        """Steps between evaluations."""
        spec = self.spec.evaluation
        return spec.every_steps or (spec.every_epochs or 1) * self.order.steps_per_epoch

    @property
    def predicts(self) -> bool:
        """Whether forwards use predicted weights in some layout."""
        return self.spec.pipeline.schedule is ScheduleName.PIPE_OPTIM and self.spec.pipeline.stages > 1

    @cached_property
    def inputs_change(self) -> bool:
        """Whether a sample differs when it is read twice. Must be first asked before the first step."""
        return self.whole.inputs_change if self.whole is not None else inputs_change(self.dataset)

    @cached_property
    def offloads(self) -> bool:
        """Whether frozen layers leave the device once caches hold what they made of all samples."""
        return self.spec.cache.offload_frozen is OffloadFrozen.AUTO and self._caches_all

    @cached_property
    def _caches_all(self) -> bool:
        """Whether a large cache comes to hold all that frozen layers make. Random variants of samples may never end. An
        embedding that shares a parameter with the head, which never freezes, changes at every step."""
        if self.spec.cache.policy is CachePolicy.NEVER or isinstance(self.dataset.train, AugmentedSplit):
            return False
        return self._last_sharing[0] <= self.num_layers and not self.inputs_change

    @cached_property
    def bytes_budget(self) -> int:
        """Bytes of the largest stage in the job's first layout, with nothing frozen."""
        return paper_bytes((self.whole or self).unit_bytes, 0, self.spec.pipeline.stages)

    @cached_property
    def stage_bytes(self) -> int:
        """Bytes of parameters, gradients and moments in the largest stage of the first layout, which later layouts do
        not exceed."""
        cut = self.cut(0, self.spec.pipeline.stages, 1, None)
        return max(sum(self._trained_bytes(self.model.units[index]) for index in held) for held in cut.units_by_stage)

    def min_stages(self, boundary: int) -> int:
        """The fewest stages whose largest stage needs no more bytes than the first layout's; a restart begins there."""
        stages = self.spec.pipeline.stages
        return next(
            (k for k in range(1, stages) if paper_bytes(self.unit_bytes, boundary, k) <= self.bytes_budget), stages
        )

    def fits(self, stages: int) -> bool:
        """Whether a pipeline of so many stages holds this level's model with nothing frozen, by the first layout's
        memory."""
        return paper_bytes(self.unit_bytes, 0, stages) <= self.bytes_budget

    def candidates(
        self, boundary: int, stages: int, pipelines: int, costs: ModelCosts | None, cached_layers: int = 0
    ) -> list[Candidate]:
        """The ways to run a layout by these costs: the choice first, then the others with what speaks against them.

        Raises:
            MemoryBoundError: no candidate fits the memory.
        """
        return self.step_model(costs, cached_layers).candidates(boundary, stages, pipelines)

    def cut(self, boundary: int, stages: int, pipelines: int, costs: ModelCosts | None, cached_layers: int = 0) -> Cut:
        """Spans, schedule and micro-batches of a layout: by measured costs if there are any and the result fits the
        memory. The caches have had the outputs of the first `cached_layers` layers.

        Raises:
            SpecError: there are more pipelines than shards, which only an older operator asks for.
        """
        if pipelines > (shards := self.order.num_shards):
            raise SpecError(
                "spec.elasticPolicy.maxWorkers",
                f"the operator asked for {pipelines} pipelines of {stages} stages, but the data are ordered in {shards}"
                f" shards: upgrade the operator, or set maxWorkers to at most {shards * stages}",
            )
        cut, why = None, "Auto chooses once costs are measured"
        if costs is not None:
            try:
                cut, why = self.step_model(costs, cached_layers).cut(boundary, stages, pipelines), ""
            except MemoryBoundError as error:
                why = "no schedule that Auto knows fits the memory"
                logger.warning("%d stages, %d pipelines: %s; cutting by assumed costs", stages, pipelines, error)
        if stages == 1:
            why = "one stage leaves Auto nothing to choose"
        cut = cut or self.step_model(None).cut(boundary, stages, pipelines)
        automatic = self.spec.pipeline.schedule is ScheduleName.AUTO
        return replace(cut, why_schedule=why) if automatic and not cut.why_schedule else cut

    def step_model(self, costs: ModelCosts | None, cached_layers: int = 0) -> StepModel:
        """Predicts steps and cuts by measured costs, otherwise by assumed ones, whose seconds are only relative.

        Args:
            costs: measured costs of the units; None before they are measured.
            cached_layers: number of leading layers whose outputs the caches have had for all samples.
        """
        cache = self.spec.cache
        return StepModel(
            costs=assumed_costs(self.num_layers) if costs is None else costs,
            global_batch=self.order.global_batch,
            num_shards=self.order.num_shards,
            micro_batch_size=self.micro_batch_size if costs is None else self.spec.pipeline.micro_batch_size,
            unit_bytes=self.unit_bytes,
            trained_bytes=[self._trained_bytes(unit) for unit in self.model.units],
            sample_bytes=math.prod(self.model.activation_shape(1)) * self.dtype.itemsize,
            num_samples=len(self.dataset.train),
            cache_bytes=cache.memory_bytes + cache.disk_bytes if costs is not None and self._caches_all else 0,
            offloads=costs is not None and costs.host_apart and self.offloads,
            cached_layers=cached_layers,
            options=self._options(costs),
            own=self.schedule,
            frozen_forward=self._frozen_forward(costs),
            last_sharing=self._last_sharing,
            first_stages=self.spec.pipeline.stages,
            steps_per_round=self.spec.pipeline.most_steps,
        )

    def _frozen_forward(self, costs: ModelCosts | None) -> FrozenForward:
        """When frozen layers compute. Before costs are measured `Auto` runs them in place."""
        wanted = self.spec.pipeline.frozen_forward
        return FrozenForward.IN_PLACE if wanted is FrozenForward.AUTO and costs is None else wanted

    @cached_property
    def _last_sharing(self) -> list[int]:
        """Of each unit, the last unit that shares a parameter with it, or itself."""
        last = list(range(self.num_layers + 2))
        for tie in self.model.ties.all:
            for unit, _ in tie.places:
                last[unit] = max(last[unit], tie.last_unit)
        return last

    def ahead(self, cut: Cut, control: Control) -> Ahead | None:
        """The schedule of a layout that runs frozen forwards one round ahead; None if it runs them in place. All
        workers get the same, from the costs in the control state."""
        if not cut.ahead_units:
            return None
        costs = None if control.costs is None else ModelCosts.model_validate(control.costs)
        return self.step_model(costs).ahead(control.boundary, cut)

    def _options(self, costs: ModelCosts | None) -> Sequence[Option]:
        """The schedules that layouts may run, the simpler first. Before costs are measured `Auto` runs 1F1B."""
        pipeline = self.spec.pipeline
        if pipeline.schedule is not ScheduleName.AUTO:
            asked = self.schedule.spans if isinstance(self.schedule, OwnsSpans) else 1
            return [Option(pipeline.schedule, pipeline.num_spans or asked)]
        return AUTO[:1] if costs is None else AUTO

    def schedule_of(self, cut: Cut) -> Schedule:
        """The schedule that a layout runs, which may be another than the spec's."""
        if cut.schedule is ScheduleName.SCRIPT:
            return self.schedule
        return make_schedule(cut.schedule, spans_per_worker=len(cut.spans) // cut.stages)

    def token_slices(self, control: Control, cut: Cut, pipelines: int) -> tuple[int, ...]:
        """Lengths of the slices that the longest samples are cut into, in tokens; empty if samples stay whole."""
        if cut.stages == 1 or not isinstance(self.schedule_of(cut), TeraPipe):
            return ()
        pipeline, total = self.spec.pipeline, self.model.activation_shape(1)[1]
        if isinstance(pipeline.token_slices, int):
            grain = pipeline.slice_multiple or 1
            return in_tokens(equal_slices(-(-total // grain), pipeline.token_slices), grain, total)
        shards = len(shards_of(0, pipelines, self.order.num_shards))
        samples = -(-self.order.global_batch * shards // self.order.num_shards)
        return choose_slices(
            None if control.slice_costs is None else SliceCosts.model_validate(control.slice_costs),
            cut.spans,
            first_trainable(control.boundary),
            samples=cut.micro_batch_size,
            micro_batches=-(-samples // cut.micro_batch_size),
            total=total,
            grain=pipeline.slice_multiple or default_grain(total),
        )

    @property
    def plans_slices(self) -> bool:
        """Whether slices are planned by measured costs."""
        return isinstance(self.schedule, TeraPipe) and not isinstance(self.spec.pipeline.token_slices, int)

    @property
    def cuts_by_paper(self) -> bool:
        """Whether layouts and cuts ignore measured costs."""
        return self.spec.pipeline.packing is Packing.PAPER

    def choice_model(self, costs: ModelCosts | None, cached_layers: int = 0) -> StepModel:
        """The model that predicts steps for the choice of a layout; with packing `Paper` by assumed costs."""
        return self.step_model(None if self.cuts_by_paper else costs, cached_layers)

    def offers(
        self,
        boundary: int,
        costs: ModelCosts | None,
        *,
        scale: float | None,
        pause_seconds: float,
        cached_layers: int = 0,
    ) -> list[Offer]:
        """What the job can do with `boundary` frozen layers, for each number of stages.

        The leader reports it; a plan made before training asks the same job.

        Args:
            boundary: number of frozen layers.
            costs: measured costs of the units; None before they are measured.
            scale: factor for predicted seconds; None to offer no seconds.
            pause_seconds: expected seconds of one regroup.
            cached_layers: number of leading layers whose outputs the caches have had for all samples.
        """
        model = self.choice_model(costs, cached_layers)

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

    def starting_step_seconds(self, costs: ModelCosts | None, first: Layout | None) -> float | None:
        """Predicted seconds of a step at the job's start with no frozen layers.

        It is that of the layout in which the job began (`first`). The spec's layout takes its place if `first` is
        unknown, or fits only with frozen layers because the job resumed with some. None if the spec's does not fit now.
        """
        model, stages = self.choice_model(costs), self.spec.pipeline.stages
        for layout in filter(None, (first, Layout(stages, self.spec.workers // stages))):
            with contextlib.suppress(MemoryBoundError):
                return model.step_seconds(0, model.cut(0, layout.stages, layout.pipelines), layout.pipelines)
        return None

    def blank_unit(self, index: int) -> nn.Module:
        """A unit on the meta device, whose state the caller replaces."""
        return copy.deepcopy(self.model.units[index])

    def _trained_bytes(self, unit: nn.Module) -> int:
        """Bytes of a unit's parameters, gradients and moments, and of copies of the weights."""
        optimizer, copies = self.spec.training.optimizer, self._weight_copies
        return sum(
            (2 + copies) * parameter.nbytes
            + sum(
                shape.numel() * dtype.itemsize
                for shape, dtype in moment_shapes(optimizer, parameter, predicts=self.predicts).values()
            )
            for parameter in unit.parameters()
        )

    @property
    def _weight_copies(self) -> int:
        """Copies of a stage's weights that its schedule keeps on the device, at most."""
        match self.spec.pipeline.schedule:
            case ScheduleName.PIPE_OPTIM:
                return 1
            case ScheduleName.PIPE_DREAM:
                return self.spec.pipeline.stages
        return 0

    def training_micro_batches(self, step: int, pipelines: int, micro_batch_size: int) -> list[list[MicroBatch]]:
        """Micro-batches of each pipeline at one global step."""
        return self._deal(step, pipelines, micro_batch_size)

    @cached_property
    def _deal(self) -> Callable[[int, int, int], list[list[MicroBatch]]]:
        lengths = padded_lengths(self.dataset.train, self.dataset.info)

        # A round trains them, the ledger notes them, and the next two are read ahead.
        @lru_cache(maxsize=3 + self.spec.pipeline.most_steps)
        def dealt(step: int, pipelines: int, micro_batch_size: int) -> list[list[MicroBatch]]:
            return deal(self.order.batch(step), pipelines, micro_batch_size, lengths)

        return dealt

    def training_share(self, step: int, layout: StageLayout) -> list[MicroBatch]:
        """Micro-batches of this worker's pipeline at a global step; none after the last step."""
        if step >= self.total_steps:
            return []
        return self.training_micro_batches(step, layout.pipelines, layout.micro_batch_size)[layout.pipeline]

    def test_micro_batches(self, pipelines: int, micro_batch_size: int) -> list[list[MicroBatch]]:
        """Micro-batches of each pipeline for the whole held-out split."""
        count = len(self.dataset.test)
        shards = [list(range(p * count // pipelines, (p + 1) * count // pipelines)) for p in range(pipelines)]
        return deal(shards, pipelines, micro_batch_size, padded_lengths(self.dataset.test, self.dataset.info))

    def user(self, split: str, sample_id: int, pipelines: int) -> int:
        """The pipeline that uses a sample of a split (`train` or `test`)."""
        if split == "train":
            return pipelines_of(pipelines, self.order.num_shards)[self.order.shard(sample_id)]
        # Held-out samples are dealt as one shard for each pipeline.
        ends = range(1, pipelines + 1)
        part = bisect_right(ends, sample_id, key=lambda end: end * len(self.dataset.test) // pipelines)
        return pipelines_of(pipelines, pipelines)[part]

    def probe_micro_batches(self, micro_batch_size: int) -> list[MicroBatch]:
        """A few fixed training samples, by which a freeze policy compares a layer with its earlier self."""
        count = len(self.dataset.train)
        ids = random.Random(self.spec.training.seed).sample(range(count), min(count, _PROBE_SAMPLES))
        return deal([ids], 1, micro_batch_size, padded_lengths(self.dataset.train, self.dataset.info))[0]
