"""Facts about a job that do not depend on a worker's role. All workers derive the same facts from the same spec."""

import contextlib
import copy
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from pipetransformer.callbacks.callback import Callback
from pipetransformer.data import (
    AugmentedSplit,
    Dataset,
    Dealer,
    EpochOrder,
    digest,
    inputs_change,
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
        return UnitCodec(self.spec.training.optimizer, self.num_layers, self.model.ties, self.predicts)

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
        return {
            "numLayers": self.num_layers,
            "numShards": self.order.num_shards,
            "freezeAlways": list(self.spec.freeze.always),  # first, because it also changes the number of parameters
            "parameters": sum(parameter.numel() for unit in self.model.units for parameter in unit.parameters()),
            "numHeads": self.spec.model.num_heads,  # no parameter's shape depends on it
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
        """Digest of the number of training samples and of some targets."""
        return self.whole.training_digest if self.whole is not None else digest(self.dataset.train)

    @cached_property
    def data_digest(self) -> str:
        """Digest of training samples, held-out samples and the number of shards, to compare workers."""
        if self.whole is not None:
            return self.whole.data_digest
        return f"{self.order.num_shards}:{self.training_digest}:{digest(self.dataset.test)}"

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

    @property
    def predicts(self) -> bool:
        """Whether some layout of the job computes forwards with predicted weights (schedule PipeOptim)."""
        return self.spec.pipeline.schedule is ScheduleName.PIPE_OPTIM and self.spec.pipeline.stages > 1

    @cached_property
    def dealer(self) -> Dealer:
        """Deals the samples to the pipelines. All levels have the same one."""
        if self.whole is not None:
            return self.whole.dealer
        return Dealer(
            self.dataset, self.order, total_steps=self.total_steps, steps_per_round=self.spec.pipeline.most_steps
        )

    @cached_property
    def inputs_change(self) -> bool:
        """Whether a sample differs when it is read twice. Call this before the first step, because it reads samples."""
        return self.whole.inputs_change if self.whole is not None else inputs_change(self.dataset)

    @cached_property
    def offloads(self) -> bool:
        """Whether frozen layers leave the device once the caches hold their outputs for all samples."""
        return self.spec.cache.offload_frozen is OffloadFrozen.AUTO and self._caches_all

    @cached_property
    def _caches_all(self) -> bool:
        """Whether a cache that is large enough will hold the outputs of frozen layers for all samples.

        It may not if the split augments samples, because new variants may never end. It will not if the embedding
        shares a parameter with the head: the head never freezes, so the embedding changes at every step.
        """
        if self.spec.cache.policy is CachePolicy.NEVER or isinstance(self.dataset.train, AugmentedSplit):
            return False
        return self._last_sharing[0] <= self.num_layers and not self.inputs_change

    @cached_property
    def bytes_budget(self) -> int:
        """Bytes of the largest stage in the job's first layout with no frozen layers, by the paper's estimate."""
        return paper_bytes((self.whole or self).unit_bytes, 0, self.spec.pipeline.stages)

    @cached_property
    def stage_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state in the largest stage of the first layout. Stages of later
        layouts need no more."""
        cut = self.cut(0, self.spec.pipeline.stages, 1, None)
        return max(sum(self._trained_bytes(self.model.units[index]) for index in held) for held in cut.units_by_stage)

    def min_stages(self, boundary: int) -> int:
        """The fewest stages whose largest stage needs no more memory than that of the first layout.

        A restart with `boundary` frozen layers begins with this number.
        """
        stages = self.spec.pipeline.stages
        return next(
            (k for k in range(1, stages) if paper_bytes(self.unit_bytes, boundary, k) <= self.bytes_budget), stages
        )

    def fits(self, stages: int) -> bool:
        """Whether the model of this level fits in a pipeline of `stages` stages with no frozen layers.

        It fits if the largest stage needs no more memory than that of the job's first layout.
        """
        return paper_bytes(self.unit_bytes, 0, stages) <= self.bytes_budget

    def candidates(
        self, boundary: int, stages: int, pipelines: int, costs: ModelCosts | None, cached_layers: int = 0
    ) -> list[Candidate]:
        """The ways to run a layout: schedule, spans and micro-batches. The best by `costs` comes first; each of the
        others says why it was not chosen.

        Args:
            boundary: number of frozen layers.
            stages: workers per pipeline (K).
            pipelines: number of pipelines (R).
            costs: measured costs of the units; None for assumed costs.
            cached_layers: number of leading layers whose outputs for all samples have been in the caches.

        Raises:
            MemoryBoundError: no candidate fits the memory.
        """
        return self.step_model(costs, cached_layers).candidates(boundary, stages, pipelines)

    def cut(self, boundary: int, stages: int, pipelines: int, costs: ModelCosts | None, cached_layers: int = 0) -> Cut:
        """Cut the model into spans for a layout, and choose its schedule and micro-batches.

        Measured costs decide. Assumed costs decide if `costs` is None, or if no result by measured costs fits the
        memory. The arguments are those of `candidates`.

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
        """Make the model that cuts layouts and predicts their step times.

        Args:
            costs: measured costs of the units; None for assumed costs. Seconds are then only relative.
            cached_layers: number of leading layers whose outputs for all samples have been in the caches.
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
        """When frozen layers compute, from `frozenForward`. Until costs are measured, `Auto` means `InPlace`."""
        wanted = self.spec.pipeline.frozen_forward
        return FrozenForward.IN_PLACE if wanted is FrozenForward.AUTO and costs is None else wanted

    @cached_property
    def _last_sharing(self) -> list[int]:
        """By unit: the index of the last unit that shares a parameter with it, otherwise its own index."""
        last = list(range(self.num_layers + 2))
        for tie in self.model.ties.all:
            for unit, _ in tie.places:
                last[unit] = max(last[unit], tie.last_unit)
        return last

    def ahead(self, cut: Cut, control: Control) -> Ahead | None:
        """The schedule of a layout that computes frozen layers one round ahead; None if it computes them in place.

        All workers get the same schedule, because it depends only on the cut and on the control state.
        """
        if not cut.ahead_units:
            return None
        costs = None if control.costs is None else ModelCosts.model_validate(control.costs)
        return self.step_model(costs).ahead(control.boundary, cut)

    def _options(self, costs: ModelCosts | None) -> Sequence[Option]:
        """The schedules to choose from, simpler ones first. Until costs are measured, `Auto` allows only 1F1B."""
        pipeline = self.spec.pipeline
        if pipeline.schedule is not ScheduleName.AUTO:
            asked = self.schedule.spans if isinstance(self.schedule, OwnsSpans) else 1
            return [Option(pipeline.schedule, pipeline.num_spans or asked)]
        return AUTO[:1] if costs is None else AUTO

    def schedule_of(self, cut: Cut) -> Schedule:
        """The schedule that a layout runs. It may differ from the spec's, which not every layout can run."""
        if cut.schedule is ScheduleName.SCRIPT:
            return self.schedule
        return make_schedule(cut.schedule, spans_per_worker=len(cut.spans) // cut.stages)

    def token_slices(self, control: Control, cut: Cut, pipelines: int) -> tuple[int, ...]:
        """Lengths in tokens of the slices that TeraPipe cuts the longest samples into; empty if it cuts none."""
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
        """Whether measured costs decide the lengths of TeraPipe's slices."""
        return isinstance(self.schedule, TeraPipe) and not isinstance(self.spec.pipeline.token_slices, int)

    @property
    def cuts_by_paper(self) -> bool:
        """Whether layouts are chosen by assumed costs only, as with packing `Paper`."""
        return self.spec.pipeline.packing is Packing.PAPER

    def choice_model(self, costs: ModelCosts | None, cached_layers: int = 0) -> StepModel:
        """The step model that chooses layouts: as `step_model`, but packing `Paper` ignores measured costs."""
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
        """Make the offers: for each possible number of stages, its memory and its step times.

        The leader reports them to the operator. `pipetransformer plan` calls the same method.

        Args:
            boundary: number of frozen layers.
            costs: measured costs of the units; None before they are measured.
            scale: factor for predicted step times; None to leave them out.
            pause_seconds: expected pause of a regroup, in seconds.
            cached_layers: number of leading layers whose outputs for all samples have been in the caches.
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
        """Predict the seconds of a step in the job's first layout with no frozen layers.

        Args:
            costs: measured costs of the units; None for assumed costs.
            first: the layout at the start of the job; None if unknown. A job that resumed with frozen layers may have
                begun in a layout that fits only with them. In both cases the spec's layout is used.

        Returns:
            The seconds; None if the spec's layout does not fit the memory either.
        """
        model, stages = self.choice_model(costs), self.spec.pipeline.stages
        for layout in filter(None, (first, Layout(stages, self.spec.workers // stages))):
            with contextlib.suppress(MemoryBoundError):
                return model.step_seconds(0, model.cut(0, layout.stages, layout.pipelines), layout.pipelines)
        return None

    def blank_unit(self, index: int) -> nn.Module:
        """Make a copy of a unit on the meta device. The caller sets its parameters and buffers."""
        return copy.deepcopy(self.model.units[index])

    def _trained_bytes(self, unit: nn.Module) -> int:
        """Bytes of a unit while it trains: parameters, gradients, optimizer state, and the schedule's weight copies."""
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
        """Largest number of extra copies of a stage's weights that the schedule keeps on the device."""
        match self.spec.pipeline.schedule:
            case ScheduleName.PIPE_OPTIM:
                return 1
            case ScheduleName.PIPE_DREAM:
                return self.spec.pipeline.stages
        return 0
