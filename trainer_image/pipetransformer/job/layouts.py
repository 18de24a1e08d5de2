"""The layouts that a model can run: how each is cut into spans, which schedule runs it, and what it costs.

All workers get the same answers, because they depend only on the spec, the model, the data and measured costs.
"""

import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from pipetransformer.data import AugmentedSplit, Dataset, EpochOrder, shards_of
from pipetransformer.errors import SpecError
from pipetransformer.freeze.boundary import first_trainable
from pipetransformer.models import PipelineModel
from pipetransformer.partition import (
    AUTO,
    Candidate,
    Cut,
    MemoryBoundError,
    ModelCosts,
    Option,
    PredictedLayout,
    StepModel,
    assumed_costs,
    make_offers,
    paper_bytes,
)
from pipetransformer.partition.slice_costs import SliceCosts, choose_slices
from pipetransformer.partition.slices import equal_slices, grain_of, in_tokens
from pipetransformer.schedules import Ahead, OwnsSpans, Schedule, TeraPipe, make_schedule
from pipetransformer.state.control import Control
from pipetransformer.state.optimizer import moment_shapes
from pipetransformer_contract.choose import Packing
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Offer
from pipetransformer_contract.spec import CachePolicy, FrozenForward, OffloadFrozen, ScheduleName, TrainerSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layouts:
    """The layouts that the model of one level can run.

    Attributes:
        spec: the trainer's spec.
        dtype: type of weights and floating-point inputs.
        dataset: training and held-out samples.
        order: the order of the training samples.
        schedule: the pipeline schedule of the spec.
        model: names and shapes of the model. Its units are on the meta device.
        micro_batch_size: samples in a micro-batch, unless measured costs choose another size for a layout.
        unit_bytes: bytes of each unit's parameters and buffers.
        whole_unit_bytes: the same of the job's own model, which is that of level 0.
        steps_per_round: largest number of steps in a round, which is 1 for a synchronous schedule.
    """

    spec: TrainerSpec
    dtype: torch.dtype
    dataset: Dataset
    order: EpochOrder
    schedule: Schedule
    model: PipelineModel
    micro_batch_size: int
    unit_bytes: Sequence[int]
    whole_unit_bytes: Sequence[int]
    steps_per_round: int

    @property
    def offloads(self) -> bool:
        """Whether frozen layers leave the device once the caches hold their outputs for all samples."""
        return self.spec.cache.offload_frozen is OffloadFrozen.AUTO and self._caches_all

    @property
    def _caches_all(self) -> bool:
        """Whether a cache that is large enough will hold the outputs of frozen layers for all samples.

        It may not if the split augments samples, because new variants may never end. It will not if the embedding
        shares a parameter with the head: the head never freezes, so the embedding changes at every step.
        """
        if self.spec.cache.policy is CachePolicy.NEVER or isinstance(self.dataset.train, AugmentedSplit):
            return False
        return self._last_sharing[0] <= self.model.num_layers and not self.dataset.inputs_change

    @cached_property
    def bytes_budget(self) -> int:
        """Bytes of the largest stage in the job's first layout with no frozen layers, by the paper's estimate."""
        return paper_bytes(self.whole_unit_bytes, 0, self.spec.pipeline.stages)

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
                f"the operator asked for {Layout(stages, pipelines).words}, but the order of the data allows at most"
                f" {shards}: upgrade the operator, or set maxWorkers to at most {shards * stages}",
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
            costs=assumed_costs(self.model.num_layers) if costs is None else costs,
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
            script_schedule=self.schedule,
            frozen_forward=self._frozen_forward(costs),
            last_sharing=self._last_sharing,
            first_stages=self.spec.pipeline.stages,
            steps_per_round=self.steps_per_round,
            recompute=self.spec.training.activation_checkpointing,
        )

    def _frozen_forward(self, costs: ModelCosts | None) -> FrozenForward:
        """When frozen layers compute, from `frozenForward`. Until costs are measured, `Auto` means `InPlace`."""
        wanted = self.spec.pipeline.frozen_forward
        return FrozenForward.IN_PLACE if wanted is FrozenForward.AUTO and costs is None else wanted

    @cached_property
    def _last_sharing(self) -> list[int]:
        """By unit: the index of the last unit that shares a parameter with it, otherwise its own index."""
        last = list(range(self.model.num_layers + 2))
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
            grain=grain_of(total, pipeline.slice_multiple),
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

        def predict(stages: int, pipelines: int) -> PredictedLayout:
            cut = model.cut(boundary, stages, pipelines)
            if self.cuts_by_paper:
                needed = paper_bytes(self.unit_bytes, boundary, stages)
            else:
                needed = model.bytes_per_worker(boundary, cut, pipelines)
            seconds = None if scale is None else scale * model.step_seconds(boundary, cut, pipelines)
            return PredictedLayout(needed, seconds)

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

    def _trained_bytes(self, unit: nn.Module) -> int:
        """Bytes of a unit while it trains: parameters, gradients, optimizer state, and the schedule's weight copies."""
        optimizer, copies = self.spec.training.optimizer, self._weight_copies
        return sum(
            (2 + copies) * parameter.nbytes
            + sum(
                shape.numel() * dtype.itemsize
                for shape, dtype in moment_shapes(optimizer, parameter, predicts=self.spec.pipeline.predicts).values()
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
