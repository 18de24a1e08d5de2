"""Predicts a layout: how it is cut, its schedule, its micro-batches and its step time."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from pipetransformer.freeze.boundary import first_trainable
from pipetransformer.schedules import Ahead, Schedule, ScheduleError, fallback, make_schedule
from pipetransformer_contract.spec import FrozenForward

from .candidates import ONE_FORWARD_ONE_BACKWARD, Candidate, Kept, Option, Search
from .contiguous import MemoryBoundError
from .costs import ModelCosts
from .cut import Cut
from .predict import Predicted, Step, UnitWork

#: Numbers of micro-batches to try for each stage: PipeTransformer, section 3.2, searches from K to 6 K.
_MICRO_BATCHES_PER_STAGE = range(1, 7)


@dataclass(frozen=True)
class StepModel:
    """Predicts steps of a job in any layout, from the facts of the job.

    Attributes:
        costs: costs of the units, and facts about the workers.
        global_batch: samples in a step.
        num_shards: number of shards (C) of the data.
        micro_batch_size: samples in a micro-batch, at most; None to choose the size for each layout.
        unit_bytes: parameter bytes of each unit.
        trained_bytes: bytes of each unit while it trains: parameters, gradients, moments.
        sample_bytes: bytes of one sample's activation between stages, or in a cache.
        num_samples: samples in an epoch.
        cache_bytes: cache size of the first worker of a pipeline.
        options: schedules to choose from, the simplest first. A layout that can run none of them runs 1F1B.
        script_schedule: the schedule of the user's program, for `Script`.
        offloads: whether frozen layers move to host memory once a cache has their outputs.
        cached_layers: the caches have had the outputs of the first `cached_layers` layers for all samples.
        cold_share: share of the frozen forwards that cached samples still need, because their entries are of fewer
            frozen layers. It is 0 one epoch after the last freeze.
        frozen_forward: when frozen layers compute. A layout that cannot run them ahead runs them in place.
        last_sharing: for each unit, the last unit that shares a parameter with it, or the unit itself.
        first_stages: number of stages of the job's first layout (K).
        steps_per_round: steps of a round, if the schedule is asynchronous.
        recompute: whether units run their forward again for their backward (activation checkpointing).
    """

    costs: ModelCosts
    global_batch: int
    num_shards: int
    micro_batch_size: int | None
    unit_bytes: Sequence[int]
    trained_bytes: Sequence[int]
    sample_bytes: int
    num_samples: int = 0
    cache_bytes: int = 0
    options: Sequence[Option] = (ONE_FORWARD_ONE_BACKWARD,)
    script_schedule: Schedule | None = None
    offloads: bool = False
    cached_layers: int = 0
    cold_share: float = 0.0
    frozen_forward: FrozenForward = FrozenForward.IN_PLACE
    last_sharing: Sequence[int] = ()
    first_stages: int = 1
    steps_per_round: int = 1
    recompute: bool = False
    _schedules: dict[Option, Schedule] = field(default_factory=dict, init=False, repr=False)
    _units: dict[tuple[int, int, float], UnitWork] = field(default_factory=dict, init=False, repr=False)
    _kept: dict[object, list[Kept]] = field(default_factory=dict, init=False, repr=False)

    def cut(self, boundary: int, stages: int, pipelines: int) -> Cut:
        """The fastest cut of a layout that fits the workers' memory, with its schedule.

        Raises:
            MemoryBoundError: no cut fits.
            ValueError: there are fewer layers than stages.
        """
        cut = self.candidates(boundary, stages, pipelines)[0].cut
        assert cut is not None
        return cut

    def candidates(self, boundary: int, stages: int, pipelines: int) -> list[Candidate]:
        """The ways to run a layout: the choice first, then the others, each with its `why_not`.

        Raises:
            MemoryBoundError: no candidate fits the memory.
            ValueError: there are fewer layers than stages.
        """
        steps = {size: self.step(boundary, size, pipelines) for size in self.sizes(stages, pipelines)}
        schedules = {option: self.schedule(option) for option in (ONE_FORWARD_ONE_BACKWARD, *self.options)}
        # Among several schedules, better cuts would favor more spans, whose messages cost more than predicted.
        by_worker = len(self.options) == 1
        search = Search(stages, steps, schedules, self.costs.worker_bytes, by_worker=by_worker, kept=self._kept)
        if self.frozen_forward is FrozenForward.IN_PLACE or not boundary:
            return self._best_first(search, stages)
        reason = self._why_in_place(boundary, stages)
        if not reason:
            in_place = self.frozen_forward is FrozenForward.AUTO
            limit = self._first_bytes if self.costs.worker_bytes is None else None
            try:
                return self._best_first(replace(search, ahead=True, in_place=in_place, copies_limit=limit), stages)
            except (MemoryBoundError, ScheduleError) as error:
                reason = str(error)
        choice, *others = self._best_first(search, stages)
        assert choice.cut is not None
        why = reason if self.frozen_forward is FrozenForward.AHEAD else ""  # `Auto` has no preference
        return [replace(choice, cut=replace(choice.cut, why_in_place=why)), *others]

    def ahead(self, boundary: int, cut: Cut) -> Ahead | None:
        """The schedule of a cut that runs frozen forwards one round ahead, for `boundary` frozen layers; None if the
        cut runs them in place."""
        if not (holders := self._holders(boundary, cut)):
            return None
        work = self._unit_work(boundary, cut.micro_batch_size, 1.0).of_spans(cut.owners, cut.spans, holders)
        return work.ahead(self.schedule(Option(cut.schedule, len(cut.spans) // cut.stages)))

    def _holders(self, boundary: int, cut: Cut) -> int:
        """Number of workers that run frozen forwards ahead in a cut. 0 if the forwards run in place with this boundary:
        the cut may have been made for another one."""
        frozen = first_trainable(boundary)
        if not 0 < frozen <= cut.ahead_units or self._why_in_place(boundary, cut.stages):
            return 0
        return len(cut.holders)

    def _why_in_place(self, boundary: int, stages: int) -> str:
        """Why frozen forwards cannot run ahead with this number of stages; empty if they can in some layout."""
        if stages == 1:
            return "a lone stage is never idle"
        if boundary > len(self.unit_bytes) - 2 - stages:
            return f"fewer layers train than there are stages ({stages})"
        if self._changes(boundary):
            return "a frozen layer shares a parameter with one that trains"
        return ""

    def _changes(self, boundary: int) -> bool:
        """Whether the outputs of frozen layers change, because one shares a parameter with a unit that trains."""
        return max(self.last_sharing[: boundary + 1], default=0) > boundary

    @cached_property
    def _first_bytes(self) -> int:
        """Bytes of the largest stage in the job's first layout. Before the memory of workers is known, a worker with
        copies of frozen layers may use at most these."""
        first = self.candidates(0, self.first_stages, 1)[0].cut
        assert first is not None
        return self.bytes_per_worker(0, first, 1)

    def _best_first(self, search: Search, stages: int) -> list[Candidate]:
        """The search's candidates. If none of the options can run, the candidates with 1F1B.

        Raises:
            MemoryBoundError: no candidate fits the memory.
            ScheduleError: not even 1F1B can run.
            ValueError: there are fewer layers than stages.
        """
        if stages == 1 and len(self.options) > 1:  # with one stage, all schedules take the same time
            return search.best_first([ONE_FORWARD_ONE_BACKWARD])
        try:
            return search.best_first(self.options)
        except MemoryBoundError as error:
            if ONE_FORWARD_ONE_BACKWARD in self.options:
                raise
            reason = f"{self.options[0].schedule} needs more memory than a worker has ({error})"
        except ScheduleError as error:
            reason = str(error)
        choice, *others = search.best_first([ONE_FORWARD_ONE_BACKWARD])
        assert choice.cut is not None
        return [replace(choice, cut=replace(choice.cut, why_schedule=reason)), *others]

    def predict(self, boundary: int, cut: Cut, pipelines: int) -> Predicted:
        """Predict a step of a cut, by simulating its schedule.

        A program's own schedule may refuse rounds with more frozen spans than it was chosen for. Then the plain
        schedule that runs them is simulated.
        """
        step, holders = self.step(boundary, cut.micro_batch_size, pipelines), self._holders(boundary, cut)
        schedule = self.schedule(Option(cut.schedule, len(cut.spans) // cut.stages))
        try:
            return step.predict(schedule, cut.owners, cut.spans, holders)
        except ScheduleError:
            return step.predict(fallback(cut.owners), cut.owners, cut.spans, holders)

    def costs_within_step(self, boundary: int, cut: Cut, pipelines: int) -> ModelCosts:
        """Return the costs with fewer seconds an action, if the predicted step would be longer than the measured one.

        An action is measured in rounds without units, in which all workers compute at once. If workers share the cores
        of a host, an action takes longer there than in a step, in which most workers wait for their devices. It takes
        its processor time in any case.

        Args:
            boundary: number of frozen layers in the measured step (`ModelCosts.step_seconds`).
            cut: the cut of that step.
            pipelines: number of pipelines in that step.
        """
        costs, measured = self.costs, self.costs.step_seconds
        free = costs.model_copy(update={"seconds_per_action": 0.0})
        predicted = self.step_seconds(boundary, cut, pipelines)
        least = replace(self, costs=free).step_seconds(boundary, cut, pipelines)
        if measured is None or predicted <= max(measured, least):
            return costs
        # Between these two, a step is at most as long as a line says, because it is the longest of several sums.
        # Only `Ahead` may deviate, because its order depends on the costs.
        share = max(0.0, measured - least) / (predicted - least)
        seconds = max(share * costs.seconds_per_action, costs.processor_per_action)
        return costs.model_copy(update={"seconds_per_action": min(seconds, costs.seconds_per_action)})

    def step_seconds(self, boundary: int, cut: Cut, pipelines: int) -> float:
        """Seconds of a step: the simulated round, plus the part of the reduction that does not overlap with it.

        A stage's reduction overlaps with its last backward. The first stage does not compute samples that its cache
        holds; the time to read them is not counted.
        """
        return self.predict(boundary, cut, pipelines).seconds

    def idle_share(self, boundary: int, cut: Cut, pipelines: int) -> float:
        """Share of a step in which stages compute nothing: bubble, imbalance, and reduction that overlaps with
        nothing."""
        return self.predict(boundary, cut, pipelines).idle_share

    def bytes_per_worker(self, boundary: int, cut: Cut, pipelines: int) -> int:
        """Bytes of the worker that holds the most."""
        return self.predict(boundary, cut, pipelines).bytes_per_worker

    def sizes(self, stages: int, pipelines: int) -> list[int]:
        """Micro-batch sizes to choose from, in samples, descending. None is larger than the share of a pipeline,
        because the rest would be padding."""
        samples = self._samples(pipelines)
        if self.micro_batch_size is not None:
            return [min(self.micro_batch_size, samples)]
        return sorted({-(-samples // (stages * each)) for each in _MICRO_BATCHES_PER_STAGE}, reverse=True)

    def schedule(self, option: Option) -> Schedule:
        """The schedule of an option."""
        if option not in self._schedules:
            made = make_schedule(option.schedule, self.script_schedule, spans_per_worker=option.spans_per_worker)
            self._schedules[option] = made
        return self._schedules[option]

    def step(self, boundary: int, size: int, pipelines: int) -> Step:
        """The work of a step with micro-batches of `size` samples."""
        first = first_trainable(boundary)
        frozen, trained = self.unit_bytes[:first], self.unit_bytes[first:]
        seconds_per_byte = self.costs.seconds_per_byte * 2 * (pipelines - 1) / pipelines
        micro_batches = -(-self._samples(pipelines) // size)
        return Step(
            self._unit_work(boundary, size, self._miss_share(boundary, pipelines)),
            micro_batches,
            state_bytes=[*frozen, *self.trained_bytes[first:]],
            reduction_seconds=[0.0] * len(frozen) + [seconds_per_byte * needed for needed in trained],
            # The outputs for this round are still kept while those for the next one arrive, so it is twice the size.
            made_bytes=2 * micro_batches * size * self.sample_bytes,
            off_units=first_trainable(self.off_layers(boundary, pipelines)),
            steps_per_round=self.steps_per_round,
        )

    def off_layers(self, boundary: int, pipelines: int) -> int:
        """Number of leading layers that the first span keeps in host memory.

        It is 0 if the cache cannot hold all samples of its pipeline. Layers that moved earlier do stay in host memory
        then, but that is not predicted.
        """
        leave = self.offloads and self._held_share(boundary, pipelines) == 1
        return min(self.cached_layers, boundary) if leave else 0

    def _unit_work(self, boundary: int, size: int, miss_share: float) -> UnitWork:
        key = (boundary, size, miss_share)
        if key not in self._units:
            self._units[key] = UnitWork(
                self.costs.at(size),
                boundary,
                miss_share=miss_share,
                message_seconds=self.costs.seconds_per_byte * self.sample_bytes * size,
                action_seconds=self.costs.seconds_per_action,
                recompute=self.recompute,
            )
        return self._units[key]

    def _miss_share(self, boundary: int, pipelines: int) -> float:
        """Share of the frozen forwards that the first worker of a pipeline computes: the cache cannot hold the sample,
        or its entry is of fewer frozen layers."""
        return 1 - self._held_share(boundary, pipelines) * (1 - self.cold_share)

    def _held_share(self, boundary: int, pipelines: int) -> float:
        """Share of a pipeline's samples that its cache can hold."""
        if self._changes(boundary):
            return 0.0
        needed = self.num_samples / pipelines * self.sample_bytes
        return min(1.0, self.cache_bytes / needed) if needed else 0.0

    def _samples(self, pipelines: int) -> int:
        """Samples of a step in the pipeline with the most shards."""
        shards = -(-self.num_shards // pipelines)
        return -(-self.global_batch * shards // self.num_shards)
