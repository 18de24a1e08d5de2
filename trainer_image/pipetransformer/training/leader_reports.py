"""The leader's reports to the operator, and the predictions that they carry."""

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from pipetransformer.job.job import Job
from pipetransformer.partition import ASSUMED_PAUSE_SECONDS, ModelCosts, StepModel
from pipetransformer.record import RunRecord
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer_contract.messages import (
    MAX_MESSAGE,
    MAX_WHY,
    DurableCheckpoint,
    HeldOut,
    Offer,
    Outcome,
    Report,
    ResizeReason,
    Upcoming,
)

from .leader_events import (
    BoundaryMoved,
    CheckpointWritten,
    Failed,
    Finished,
    FirstStepTaken,
    FreezeKept,
    GenerationBegun,
    LayersOffloaded,
    LeaderEvent,
    StepTaken,
    WaitingForLevel,
)

#: The median step time is that of the newest steps, at most this many.
_STEPS_MEASURED = 20
#: Seconds between two reports that only say that training continues.
_REPORT_SECONDS = 1.0
#: Steps to measure after a change of layout or boundary before offers are predicted from their times.
_STEPS_TO_OFFER = 5
#: Reasons of generations whose pause says little about the cost of a planned change: members may have waited for a pod.
_UNPLANNED = (ResizeReason.START, ResizeReason.FAILURE, ResizeReason.DRAIN, ResizeReason.UNDO)
#: How long a job that failed tries to send its last report.
_FAILURE_SECONDS = 30.0
#: With `multiLevel`, workers for a larger model are requested this long before it begins to train. A pod starts and
#: warms up in about half this time.
LEVEL_LEAD_SECONDS = 120.0


class ReportSink(Protocol):
    """Sends reports to the operator. In a job it is `senders.ReportSender`; tests use a list."""

    def submit(self, report: Report, *, urgent: bool) -> None: ...

    def flush(self, timeout: float | None = None) -> bool: ...


@dataclass
class Offered:
    """The offers that this worker last made as the leader. It outlives a generation.

    Only the level, the boundary and the caches decide in how many stages the model fits. So a new generation can begin
    with the old offers, and no worker waits for a prediction before the first step.

    Attributes:
        boundary: number of frozen layers (without layers on trial) that the offers are for; None before the first
            offers.
        cached_layers: number of layers whose outputs the caches had.
        level: level of the model; 0 is the job's own model.
        announced: the visit in which the larger model of the next visit was last announced; None if never.
        offers: the offers, one for each number of stages.
    """

    boundary: int | None = None
    cached_layers: int = 0
    level: int = 0
    announced: int | None = None
    offers: list[Offer] = field(default_factory=list)

    def holds_for(self, control: Control, level: int) -> bool:
        """Whether the offers are for the present level, boundary and caches, so that the same numbers of stages fit."""
        now = (control.settled_boundary, control.settled_cached_layers, level)
        return (self.boundary, self.cached_layers, self.level) == now

    def lengths(self) -> list[Offer]:
        """The offers without step times, because these were scaled by the step time of another layout."""
        return [offer.model_copy(update={"step_seconds": []}) for offer in self.offers]


class Pace:
    """Measures the time of the newest steps in one layout, at one boundary."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_STEPS_MEASURED)
        #: Number of frozen layers in the steps that are measured.
        self.boundary = 0

    def note(self, boundary: int, seconds: float) -> None:
        """Note that a step at `boundary` took `seconds`. If the boundary has changed, earlier steps are discarded."""
        if boundary != self.boundary:
            self._seconds.clear()
            self.boundary = boundary
        self._seconds.append(seconds)

    @property
    def median(self) -> float | None:
        """Median time of the noted steps in seconds; None before the first."""
        return statistics.median(self._seconds) if self._seconds else None

    @property
    def is_measured(self) -> bool:
        """Whether enough steps are measured for an offer."""
        return len(self._seconds) >= _STEPS_TO_OFFER

    @property
    def is_just_measured(self) -> bool:
        """Whether `is_measured` has become true with the newest step."""
        return len(self._seconds) == _STEPS_TO_OFFER

    def seconds_left(self, job: Job, control: Control) -> float | None:
        """Seconds until the job's last step, if the layout stays.

        None until enough steps are measured. With `multiLevel` also None before the last visit, because a step of
        another level takes a different time.
        """
        if not self.is_measured or self.median is None or not job.is_last(control.visit):
            return None
        return max(0, job.total_steps - control.step) * self.median


def held_out(job: Job, control: Control) -> HeldOut | None:
    """The newest value of the metric that decides which model is best; None before the first evaluation, or if the
    value is not finite."""
    metric = job.spec.evaluation.best_metric
    value = control.metrics.get(metric)
    if value is None or not math.isfinite(value):
        return None
    return HeldOut(metric=metric, value=value, step=control.evaluated_step)


class LayoutPredictions:
    """Predicts the time of a step in the present layout and in others.

    Layers on trial may train again, so step times are predicted as if these layers trained.

    Attributes:
        idle_share: idle share of a step in the present layout, predicted by `StepModel`; None before the first
            prediction.
        step_seconds: time of a step in the present layout; None until its steps are measured. With packing `Measured`
            the costs of the units must be measured too.
        starting_step_seconds: time of a step in the job's first layout with no frozen layers; None as long as
            `step_seconds` is, or if neither that layout nor the spec's fits in memory.
        pause_seconds: expected pause of a planned change of the layout.
    """

    def __init__(self, job: Job, layout: StageLayout, pace: Pace, offered: Offered) -> None:
        self._job, self._layout, self._pace, self._offered = job, layout, pace, offered
        self._cut = layout.cut
        self._costs: dict[str, Any] | None = None
        self.idle_share: float | None = None
        self.step_seconds: float | None = None
        self.starting_step_seconds: float | None = None
        self.pause_seconds = ASSUMED_PAUSE_SECONDS

    @property
    def offers(self) -> list[Offer]:
        """The offers: what the model could do at each number of stages. The operator chooses a layout from them."""
        return self._offered.offers

    def begin(self, control: Control) -> None:
        """Begin a generation with the offers that this worker made before, without step times. If they no longer hold,
        predict new offers."""
        if self._offered.holds_for(control, self._job.level):
            self._offered.offers = self._offered.lengths()
            model = self._job.layouts.choice_model(_costs(control), control.settled_cached_layers)
            self._predict_present(control, model, scale=None)
        else:
            self.predict(control)

    def note_pause(self, seconds: float, phases: Mapping[str, float], *, moved: bool) -> None:
        """Expect that the next pause takes as long as the pause of this generation.

        The pause of a start is ignored. After a failure or another unplanned change only the phases of the regroup
        itself count, because members may have waited for a pod.

        Args:
            seconds: the whole pause.
            phases: seconds of the pause by phase.
            moved: whether state moved from worker to worker.
        """
        reason = self._layout.generation.reason
        if reason not in _UNPLANNED:
            self.pause_seconds = seconds
        elif reason is not ResizeReason.START:
            # Without transfers, workers read the state from storage in the phase "assemble". A planned change does not.
            self.pause_seconds = sum(phases[name] for name in phases if moved or name != "assemble")

    def is_stale(self, control: Control) -> bool:
        """Whether to predict again: the newest step was the last that had to be measured, or the measured costs have
        changed since the last prediction."""
        return self._pace.is_just_measured or (self._pace.is_measured and control.costs != self._costs)

    def predict(self, control: Control) -> None:
        """Make new offers, and predict the time of a step in the present layout. As long as `step_seconds` is None, the
        offers have no step times."""
        job, costs = self._job, _costs(control)
        model = job.layouts.choice_model(costs, control.settled_cached_layers)
        scale = self._scale(model) if job.layouts.cuts_by_paper or costs is not None else None
        self._costs = control.costs
        self._offered.boundary = control.settled_boundary
        self._offered.cached_layers = control.settled_cached_layers
        self._offered.level = job.level
        self._offered.offers = job.layouts.offers(
            control.settled_boundary,
            costs,
            scale=scale,
            pause_seconds=self.pause_seconds,
            cached_layers=control.settled_cached_layers,
        )
        self._predict_present(control, model, scale)

    def _predict_present(self, control: Control, model: StepModel, scale: float | None) -> None:
        pipelines = self._layout.pipelines
        self.idle_share = model.idle_share(control.boundary, self._cut, pipelines)
        present = model.step_seconds(control.settled_boundary, self._cut, pipelines)
        self.step_seconds = None if scale is None else scale * present
        starting = None if scale is None else self._job.layouts.starting_step_seconds(_costs(control), control.began_in)
        self.starting_step_seconds = None if scale is None or starting is None else scale * starting

    def _scale(self, model: StepModel) -> float | None:
        """Return the measured step time divided by the predicted one: predictions are multiplied by this factor. None
        until a step is measured."""
        if self._pace.median is None:
            return None
        return self._pace.median / model.step_seconds(self._pace.boundary, self._cut, self._layout.pipelines)


def _costs(control: Control) -> ModelCosts | None:
    return None if control.costs is None else ModelCosts.model_validate(control.costs)


class LevelAhead:
    """With `multiLevel`, announces the larger model of the next visit before it begins, because workers need time to
    start. A visit is the period in which one level trains.

    An announcement stays until the visit ends. Otherwise the first report in the new, larger layout would offer layouts
    of the smaller model, because no step is measured there yet. The operator would then remove the new workers.

    Args:
        job: the job of the present level.
        grows_into: the job of the next visit if its model is larger; otherwise None.
        pace: measures steps in the present layout.
        offered: what this worker offered and announced in earlier generations.
    """

    def __init__(self, job: Job, grows_into: Job | None, pace: Pace, offered: Offered) -> None:
        self._job, self._grows_into, self._pace, self._offered = job, grows_into, pace, offered
        self._waits = False

    def wait(self) -> bool:
        """Note that the job waits for a layout in which the larger model fits. Returns whether this is the first call,
        so that the leader reports it once."""
        news, self._waits = not self._waits, True
        return news

    def upcoming(self, control: Control) -> Upcoming | None:
        """The announcement of the larger model; None if the next visit has no larger model, or is not near yet."""
        if self._grows_into is None:
            return None
        begins, seconds = self._job.visits[control.visit].end, self._pace.median
        if self._waits or (seconds is not None and (begins - control.step) * seconds < LEVEL_LEAD_SECONDS):
            self._offered.announced = control.visit
        if self._offered.announced != control.visit:
            return None
        return Upcoming(step=begins, level=self._grows_into.level, waits=self._waits)

    @cached_property
    def offers(self) -> list[Offer]:
        """Offers for the larger model: the numbers of stages in which it fits. They have no step times, because none
        were measured."""
        assert self._grows_into is not None
        offers = self._grows_into.layouts.offers(0, None, scale=None, pause_seconds=ASSUMED_PAUSE_SECONDS)
        return [offer for offer in offers if self._grows_into.layouts.fits(offer.stages)]


class OperatorReports:
    """Reports to the operator. A report that the operator may act on is sent at once, others at most once a second.
    Implements `LeaderListener`."""

    def __init__(
        self,
        job: Job,
        layout: StageLayout,
        sink: ReportSink,
        pace: Pace,
        predictions: LayoutPredictions,
        level_ahead: LevelAhead,
        record: RunRecord,
    ) -> None:
        self._job, self._layout, self._sink, self._record = job, layout, sink, record
        self._pace, self._predictions, self._level_ahead = pace, predictions, level_ahead
        self._checkpoint: DurableCheckpoint | None = None
        self._loss: float | None = None
        self._submitted_at = 0.0

    def on_event(self, event: LeaderEvent) -> None:
        control = event.control
        match event:
            case GenerationBegun(checkpoint=checkpoint):
                self._checkpoint = checkpoint
                self._predictions.begin(control)
                self._submit(control)
            case FirstStepTaken(level_change=False, pause_seconds=pause, phases=phases, transfers=transfers):
                self._predictions.note_pause(pause, phases, moved=bool(transfers))
            case StepTaken(line=line):
                self._loss = line["loss"]
                stale = self._predictions.is_stale(control)
                if stale:
                    self._predictions.predict(control)
                if stale or time.monotonic() >= self._submitted_at + _REPORT_SECONDS:
                    self._submit(control, urgent=stale)
            case BoundaryMoved() | FreezeKept() | LayersOffloaded():
                self._predictions.predict(control)
                self._submit(control)
            case WaitingForLevel():
                if self._level_ahead.wait():
                    self._submit(control)
            case CheckpointWritten(checkpoint=checkpoint):
                self._checkpoint = checkpoint
                self._submit(control)
            case Finished():
                self._submit(control, outcome=Outcome.SUCCEEDED, reason="TrainingFinished")
                self._sink.flush()
            case Failed(reason=reason, message=message):
                self._submit(control, outcome=Outcome.FAILED, reason=reason, message=message)
                self._sink.flush(timeout=_FAILURE_SECONDS)

    def _submit(
        self,
        control: Control,
        *,
        urgent: bool = True,
        outcome: Outcome | None = None,
        reason: str = "",
        message: str = "",
    ) -> None:
        self._submitted_at = time.monotonic()
        job, layout, seconds = self._job, self._layout, self._pace.median
        upcoming = self._level_ahead.upcoming(control)
        report = Report(
            job_uid=layout.generation.job_uid,
            layout_generation=layout.number,
            step=control.step,
            epoch=job.order.epoch(control.step),
            boundary=control.boundary,
            boundary_step=control.boundary_step,
            why_thawed=control.why_thawed[:MAX_WHY],
            num_layers=job.num_layers,
            stage_layers=layout.cut.stage_layers,
            stage_frozen_layers=layout.cut.frozen_layers(control.boundary),
            schedule=layout.schedule,
            why_schedule=layout.cut.why_schedule[:MAX_WHY],
            frozen_forward=layout.cut.frozen_forward,
            why_frozen_forward=layout.cut.why_in_place[:MAX_WHY],
            bytes_budget=job.layouts.bytes_budget,
            offers=self._predictions.offers if upcoming is None else self._level_ahead.offers,
            level=job.level,
            upcoming=upcoming,
            checkpoint=self._checkpoint,
            redone_steps=self._record.redone_steps,
            loss=self._loss,
            samples_per_second=job.order.global_batch / seconds if seconds else None,
            step_seconds=self._predictions.step_seconds if upcoming is None else None,  # of the same model as offers
            starting_step_seconds=self._predictions.starting_step_seconds,
            total_steps=job.total_steps,
            seconds_left=self._pace.seconds_left(job, control),
            held_out=held_out(job, control),
            outcome=outcome,
            reason=reason,
            # A path may hold bytes that are not UTF-8, and JSON cannot.
            message=message.encode(errors="replace").decode()[:MAX_MESSAGE],
        )
        self._sink.submit(report, urgent=urgent)
