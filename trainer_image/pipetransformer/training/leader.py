"""What the leader of a generation does besides training: the run's record and the reports to the operator."""

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pipetransformer.callbacks.callback import Callback, Teller
from pipetransformer.errors import StorageError
from pipetransformer.job.job import Job
from pipetransformer.partition import ASSUMED_PAUSE_SECONDS, Cut, ModelCosts, StepModel
from pipetransformer.record import Role, RunRecord
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer_contract.messages import DurableCheckpoint, HeldOut, Offer, Outcome, Report, ResizeReason

from .vote import Vote

logger = logging.getLogger(__name__)

_STEPS_MEASURED = 20
#: Between reports that say nothing but that training goes on: the operator hears of it every few seconds only.
_REPORT_SECONDS = 1.0
#: Steps after a change of layout or boundary until its times are worth an offer.
_STEPS_TO_OFFER = 5
#: Their pauses say little of what a planned change costs: members may have waited long for a pod.
_UNPLANNED = (ResizeReason.START, ResizeReason.FAILURE, ResizeReason.DRAIN, ResizeReason.UNDO)


class ReportSink(Protocol):
    """Takes reports to the operator; `elastic.channel.ReportSender`, or a list in tests."""

    def submit(self, report: Report, *, urgent: bool) -> None: ...

    def flush(self, timeout: float | None = None) -> bool: ...


@dataclass
class Offered:
    """What this worker offered last while it led. Which lengths fit depends on the boundary only, so a generation that
    it leads, too, begins with them: nothing is predicted while all wait for its first step.

    Attributes:
        boundary: that the offers are for; None before the first.
    """

    boundary: int | None = None
    offers: list[Offer] = field(default_factory=list)

    def lengths(self) -> list[Offer]:
        """The offers without their times, which were scaled by another layout's."""
        return [offer.model_copy(update={"step_seconds": []}) for offer in self.offers]


class Leader:
    """Keeps the record and reports while this worker leads. All methods are called between rounds.

    Attributes:
        idle_share: of a step in the present layout, as `StepModel` predicts it.
    """

    def __init__(
        self, job: Job, reports: ReportSink, teller: Teller, run_dir: Path, layout: StageLayout, offered: Offered
    ) -> None:
        self._job = job
        self._reports = reports
        self._layout = layout
        self._checkpoint: DurableCheckpoint | None = None
        self._offered = offered
        self._seconds: deque[float] = deque(maxlen=_STEPS_MEASURED)
        self._measured_boundary = 0
        self._measured_costs: dict[str, Any] | None = None
        self._step_seconds: float | None = None
        self._pause_seconds = ASSUMED_PAUSE_SECONDS
        self._loss: float | None = None
        self.idle_share: float | None = None
        self._submitted_at = 0.0
        self._teller = teller
        self.record = RunRecord(run_dir)

    def on_committed(self, control: Control, checkpoint: DurableCheckpoint | None) -> None:
        """The generation is committed: confirm it."""
        self._checkpoint = checkpoint
        job = self._job
        if self.record.started(
            step=control.step,
            job=self._layout.generation.job_uid,
            earlier_job=control.earlier_job,
            numLayers=job.num_layers,
            steps=job.total_steps,
        ):
            self._tell_overruled()
        self.record.rewind(control.step)
        if control.last_step and self.record.last_step() < control.last_step["step"]:
            self.record.step(**control.last_step, samples_per_second=None)
        if self._offered.boundary == control.boundary:
            self._offered.offers = self._offered.lengths()
            self._predict_present(control, self._job.choice_model(self._costs(control)), scale=None)
        else:
            self._predict(control)
        self._submit(control, urgent=True)

    def on_first_step(
        self,
        control: Control,
        *,
        pause_seconds: float,
        phases: Mapping[str, float],
        transfers: Sequence[tuple[int, int, int]],
    ) -> None:
        """Note the generation once its first step tells how long training paused."""
        layout = self._layout
        if layout.generation.reason not in _UNPLANNED:
            self._pause_seconds = pause_seconds
        elif layout.generation.reason is not ResizeReason.START:
            # Without transfers, "assemble" is what was read from storage, for nobody had it.
            self._pause_seconds = sum(phases[name] for name in phases if transfers or name != "assemble")
        self.record.generation_committed(
            generation=layout.number,
            stages=layout.stages,
            pipelines=layout.pipelines,
            frozen_layers=control.boundary,
            first_step=control.step - 1,
            pause_seconds=pause_seconds,
            phases=phases,
            transfers=transfers,
            roles=roles_of(layout, self._job.num_layers),
            reason=layout.generation.reason.value,
        )
        self._teller.tell(Callback.on_generation, control.step - 1, layout.number, layout.stages, layout.pipelines)

    def on_step(self, control: Control, vote: Vote, *, seconds: float) -> None:
        """A step is committed: `control.last_step` in so many seconds."""
        line = control.last_step
        if line["frozen_layers"] != self._measured_boundary:
            self._seconds.clear()
            self._measured_boundary = line["frozen_layers"]
        self._seconds.append(seconds)
        self._loss = line["loss"]
        line = {**line, "samples_per_second": line["samples"] / seconds}
        self.record.step(**line)
        held_out = self._held_out(control)
        told = {
            "total_steps": self._job.total_steps,
            "num_layers": self._job.num_layers,
            "seconds_left": self._seconds_left(control),
            "held_out": None if held_out is None else (held_out.metric, held_out.value),
        }
        self._teller.tell(Callback.on_step, line | told)
        measured = len(self._seconds) == _STEPS_TO_OFFER or (
            len(self._seconds) > _STEPS_TO_OFFER and control.costs != self._measured_costs
        )
        if measured:
            self._predict(control)
        self._submit(control, urgent=measured)

    def on_skipped(self, control: Control, place: str) -> None:
        """The newest step changed nothing, since there it began to be no number: in a unit, or in the loss."""
        self.record.event("StepSkipped", step=control.step - 1, reason="NonFinite", place=place)

    def on_frozen(self, control: Control) -> None:
        """The boundary changed before step `control.step`."""
        self.record.frozen(step=control.step, frozen_layers=control.boundary, generation=self._layout.number)
        self._teller.tell(Callback.on_freeze, control.step, control.boundary)
        self._predict(control)
        self._submit(control, urgent=True)

    def on_evaluated(self, control: Control, *, better: bool) -> None:
        """The held-out samples were evaluated."""
        metrics = {name: value if math.isfinite(value) else None for name, value in control.metrics.items()}
        self.record.event("Evaluated", step=control.step, metrics=metrics, best=better)
        self._teller.tell(Callback.on_evaluate, control.step, control.metrics)

    def on_checkpoint(self, control: Control, checkpoint: DurableCheckpoint) -> None:
        """A checkpoint is durable."""
        self._checkpoint = checkpoint
        self.record.event("CheckpointDurable", step=checkpoint.step, frozenLayers=checkpoint.boundary)
        self._submit(control, urgent=True)

    def on_finished(self, control: Control) -> None:
        """The model is durable: write the summary and say so. Returns once the operator knows."""
        if control.step > (wanted := self._job.total_steps):
            logger.warning(
                "the model was trained for %d steps already, more than the %d asked for", control.step, wanted
            )
        summary = self.record.finish(
            metrics=control.best if control.best_is_kept else control.metrics,
            model_step=control.best_step if control.best_is_kept else control.step,
            num_steps=control.step,
            order=self._job.order,
        )
        self._teller.tell(Callback.on_end, summary)
        self._teller.catch_up()
        self._submit(control, urgent=True, outcome=Outcome.SUCCEEDED, reason="TrainingFinished")
        self._reports.flush()

    def on_failed(self, control: Control, reason: str, message: str) -> None:
        """The job cannot go on."""
        self._submit(control, urgent=True, outcome=Outcome.FAILED, reason=reason, message=message)
        self._reports.flush(timeout=30)
        with suppress(StorageError):  # the record itself may be what failed
            self.record.event("Failed", reason=reason, message=message)

    def _tell_overruled(self) -> None:
        for one in self._job.overruled:
            there = "leaves it out" if one.manifest is None else f"says {one.manifest}"
            logger.warning("the script says %s: %s; the manifest %s, and holds", one.field, one.script, there)
            self.record.event("Overruled", **asdict(one))

    def _submit(
        self,
        control: Control,
        *,
        urgent: bool,
        outcome: Outcome | None = None,
        reason: str = "",
        message: str = "",
    ) -> None:
        now = time.monotonic()
        if not urgent and now < self._submitted_at + _REPORT_SECONDS:
            return
        self._submitted_at = now
        seconds = statistics.median(self._seconds) if self._seconds else None
        report = Report(
            job_uid=self._layout.generation.job_uid,
            layout_generation=self._layout.number,
            step=control.step,
            epoch=self._job.order.epoch(control.step),
            boundary=control.boundary,
            boundary_step=control.boundary_step,
            num_layers=self._job.num_layers,
            stage_layers=[
                len(range(max(s.start, 1), min(s.stop, self._job.num_layers + 1))) for s in self._layout.spans
            ],
            bytes_budget=self._job.bytes_budget,
            offers=self._offered.offers,
            checkpoint=self._checkpoint,
            loss=self._loss,
            samples_per_second=self._job.order.global_batch / seconds if seconds else None,
            step_seconds=self._step_seconds,
            total_steps=self._job.total_steps,
            seconds_left=self._seconds_left(control),
            held_out=self._held_out(control),
            outcome=outcome,
            reason=reason,
            message=message[:1024],
        )
        self._reports.submit(report, urgent=urgent)

    def _seconds_left(self, control: Control) -> float | None:
        """Until the last step, at the step time of the present layout; None until enough of its steps are measured."""
        if len(self._seconds) < _STEPS_TO_OFFER:
            return None
        return max(0, self._job.total_steps - control.step) * statistics.median(self._seconds)

    def _held_out(self, control: Control) -> HeldOut | None:
        """The newest evaluation; None before the first, or where its value is no number."""
        metric = self._job.spec.evaluation.best_metric
        value = control.metrics.get(metric)
        if value is None or not math.isfinite(value):
            return None
        return HeldOut(metric=metric, value=value, step=control.evaluated_step)

    def _predict(self, control: Control) -> None:
        """Renew what is told of the step in the present layout and in others, as soon as both are measured."""
        job, costs = self._job, self._costs(control)
        model = job.choice_model(costs)
        scale = self._scale(model) if job.cuts_by_paper or costs is not None else None
        self._measured_costs = control.costs
        self._offered.boundary = control.boundary
        self._offered.offers = job.offers(control.boundary, costs, scale=scale, pause_seconds=self._pause_seconds)
        self._predict_present(control, model, scale)

    def _predict_present(self, control: Control, model: StepModel, scale: float | None) -> None:
        pipelines = self._layout.pipelines
        self.idle_share = model.idle_share(control.boundary, self._cut, pipelines)
        present = model.step_seconds(control.boundary, self._cut, pipelines)
        self._step_seconds = None if scale is None else scale * present

    def _costs(self, control: Control) -> ModelCosts | None:
        return None if control.costs is None else ModelCosts.model_validate(control.costs)

    def _scale(self, model: StepModel) -> float | None:
        """What a prediction is multiplied by so that the present layout takes the seconds that were measured."""
        if not self._seconds:
            return None
        predicted = model.step_seconds(self._measured_boundary, self._cut, self._layout.pipelines)
        return statistics.median(self._seconds) / predicted

    @property
    def _cut(self) -> Cut:
        return Cut(self._layout.spans, self._layout.micro_batch_size)


def roles_of(layout: StageLayout, num_layers: int) -> list[Role]:
    """Who holds which blocks."""
    roles = []
    for member, (pipeline, stage) in zip(layout.generation.members, layout.roles, strict=True):
        span = layout.spans[stage]
        roles.append(Role(member.name, pipeline, stage, max(span.start, 1) - 1, min(span.stop - 1, num_layers) - 1))
    return roles


def wall_clock() -> float:
    """Seconds since the epoch: the one clock that a new leader shares with the old one."""
    return time.time()
