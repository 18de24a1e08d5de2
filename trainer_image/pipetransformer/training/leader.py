"""The leader of a generation, and its listeners: the run's record, callbacks, metrics and reports to the operator."""

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from pipetransformer.callbacks.callback import Callback, Teller
from pipetransformer.errors import StorageError
from pipetransformer.job.job import Job
from pipetransformer.metrics import Meter
from pipetransformer.record import Role, RunRecord
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout

from .leader_events import (
    BoundaryMoved,
    CheckpointWritten,
    Evaluated,
    Failed,
    Finished,
    FirstStepTaken,
    FreezeKept,
    GenerationBegun,
    LayersOffloaded,
    LeaderEvent,
    LeaderListener,
    StepSkipped,
    StepTaken,
)
from .leader_reports import LayoutPredictions, LevelAhead, Offered, OperatorReports, Pace, ReportSink, held_out
from .vote import Vote

logger = logging.getLogger(__name__)


class Leader:
    """Tells the record, the callbacks, the metrics and the operator what happens while this worker is the leader. All
    methods are called between rounds.

    Args:
        job: the job that trains.
        reports: sends reports to the operator.
        teller: calls the callbacks of the user's program.
        run_dir: folder of the run's record.
        layout: layout of the generation.
        offered: offers that this worker made when it was the leader of an earlier generation.
        meter: counts this worker's Prometheus metrics.
        grows_into: with `multiLevel`, the job of the next visit (the steps of one level) if its model is larger;
            otherwise None.
    """

    def __init__(
        self,
        job: Job,
        reports: ReportSink,
        teller: Teller,
        run_dir: Path,
        layout: StageLayout,
        offered: Offered,
        meter: Meter | None = None,
        grows_into: Job | None = None,
    ) -> None:
        self._job = job
        self._pace = Pace()
        self._predictions = LayoutPredictions(job, layout, self._pace, offered)
        level_ahead = LevelAhead(job, grows_into, self._pace, offered)
        self.record = RunRecord(run_dir)
        self._listeners: list[LeaderListener] = [
            RecordWriter(job, layout, self.record),
            CallbackTeller(job, layout, teller, self._pace),
            LeaderMetrics(meter or Meter()),
            OperatorReports(job, layout, reports, self._pace, self._predictions, level_ahead, self.record),
        ]

    @property
    def idle_share(self) -> float | None:
        """Idle share of a step in the present layout, predicted by `StepModel`; None before the first prediction."""
        return self._predictions.idle_share

    def tell(self, event: LeaderEvent) -> None:
        """Tell all listeners, the record first: then it already holds all that the other listeners show."""
        for listener in self._listeners:
            listener.on_event(event)

    def on_round(
        self,
        control: Control,
        vote: Vote,
        *,
        seconds: float,
        idle_share: float,
        ahead_share: float,
        staleness: Sequence[Sequence[int]],
    ) -> None:
        """The steps of a round are committed.

        Args:
            control: the control state after the round; `last_step` is the line of its last step.
            vote: the vote that committed the round.
            seconds: how long the round took.
            idle_share: share of the round in which a worker did not compute, as a mean over all workers.
            ahead_share: share of the round's micro-batches whose frozen forwards ran in the round before.
            staleness: for each step of the round, the staleness of all forwards in the pipeline.
        """
        for line, ages in zip([*control.earlier_steps, control.last_step], staleness, strict=True):
            self._pace.note(line["frozen_layers"], seconds / vote.num_steps)
            measured = {
                "samples_per_second": line["samples"] * vote.num_steps / seconds,
                "idle_share": idle_share,
                "frozen_ahead_share": ahead_share,
                "staleness": sum(ages) / len(ages) if ages else 0.0,
                "staleness_largest": max(ages, default=0),
            }
            self.tell(StepTaken(control, {**line, **measured}, vote.finite))

    def on_finished(self, control: Control) -> None:
        """The final model is durable: write the summary of the run, and tell the listeners that the job has finished.
        Returns once the operator has the report."""
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
        self.tell(Finished(control, summary))

    def on_failed(self, control: Control, reason: str, message: str) -> None:
        """The job cannot continue. The operator is told first and the record last, because a broken record may be the
        reason.

        Args:
            control: the control state.
            reason: the reason in one word, in CamelCase.
            message: the reason in words.
        """
        for listener in reversed(self._listeners):
            listener.on_event(Failed(control, reason, message))


class RecordWriter:
    """Writes events into the run's record. Implements `LeaderListener`."""

    def __init__(self, job: Job, layout: StageLayout, record: RunRecord) -> None:
        self._job, self._layout, self._record = job, layout, record

    def on_event(self, event: LeaderEvent) -> None:
        record, control = self._record, event.control
        match event:
            case GenerationBegun():
                self._begin(control)
            case FirstStepTaken(level_change=True):
                self._note_level(event)
            case FirstStepTaken():
                self._note_generation(event)
            case StepTaken(line=line):
                record.step(**line)
            case StepSkipped(place=place):
                record.event("StepSkipped", step=control.step - 1, reason="NonFinite", place=place)
            case BoundaryMoved():
                record.frozen(
                    step=control.step,
                    frozen_layers=control.boundary,
                    generation=self._layout.number,
                    why_thawed=control.why_thawed,
                )
            case LayersOffloaded():
                record.event("LayersOffloaded", step=control.step, layers=control.cached_layers)
            case FreezeKept(why=why):
                record.event("FreezeKept", step=control.step, frozenLayers=control.boundary, why=why)
            case Evaluated(better=better):
                metrics = {name: value if math.isfinite(value) else None for name, value in control.metrics.items()}
                record.event("Evaluated", step=control.step, metrics=metrics, best=better)
            case CheckpointWritten(checkpoint=checkpoint):
                record.event("CheckpointDurable", step=checkpoint.step, frozenLayers=checkpoint.boundary)
            case Failed(reason=reason, message=message):
                with suppress(StorageError):
                    record.event("Failed", reason=reason, message=message)

    def _begin(self, control: Control) -> None:
        """Begin the record, or continue that of an earlier leader: drop the lines of steps that are not committed, and
        add the lines of committed steps that the earlier leader did not write."""
        if self._record.started(
            step=control.step,
            job=self._layout.generation.job_uid,
            earlier_job=control.earlier_job,
            numLayers=(self._job.whole or self._job).num_layers,
            steps=self._job.total_steps,
        ):
            self._note_overruled()
        self._record.rewind(control.step)
        noted = self._record.last_step()
        for line in [*control.earlier_steps, control.last_step] if control.last_step else []:
            if line["step"] > noted:
                self._record.step(**line)

    def _note_overruled(self) -> None:
        for one in self._job.overruled:
            there = "does not set it" if one.manifest is None else f"says {one.manifest}"
            logger.warning("the script says %s: %s; the manifest %s, and wins", one.field, one.script, there)
            self._record.event("Overruled", **asdict(one))

    def _note_generation(self, event: FirstStepTaken) -> None:
        layout, control = self._layout, event.control
        self._record.generation_committed(
            generation=layout.number,
            stages=layout.stages,
            pipelines=layout.pipelines,
            frozen_layers=control.boundary,
            first_step=control.step - 1,
            pause_seconds=event.pause_seconds,
            phases=event.phases,
            transfers=event.transfers,
            roles=roles_of(layout),
            reason=layout.generation.reason.value,
            schedule=layout.schedule,
            why_schedule=layout.cut.why_schedule,
            frozen_forward=layout.cut.frozen_forward,
            why_frozen_forward=layout.cut.why_in_place,
        )

    def _note_level(self, event: FirstStepTaken) -> None:
        self._record.level_changed(
            level=self._job.level,
            num_layers=self._job.num_layers,
            first_step=event.control.step - 1,
            generation=self._layout.number,
            pause_seconds=event.pause_seconds,
            phases=event.phases,
            transfers=event.transfers,
            roles=roles_of(self._layout),
        )


class CallbackTeller:
    """Calls the callbacks of the user's program. Implements `LeaderListener`."""

    def __init__(self, job: Job, layout: StageLayout, teller: Teller, pace: Pace) -> None:
        self._job, self._layout, self._teller, self._pace = job, layout, teller, pace

    def on_event(self, event: LeaderEvent) -> None:
        teller, layout, control = self._teller, self._layout, event.control
        match event:
            case FirstStepTaken(level_change=False):
                teller.tell(Callback.on_generation, control.step - 1, layout.number, layout.stages, layout.pipelines)
            case StepTaken(line=line):
                evaluation = held_out(self._job, control)
                more = {
                    "total_steps": self._job.total_steps,
                    "num_layers": self._job.num_layers,
                    "seconds_left": self._pace.seconds_left(self._job, control),
                    "held_out": None if evaluation is None else (evaluation.metric, evaluation.value),
                }
                teller.tell(Callback.on_step, {**line, **more})
            case BoundaryMoved():
                teller.tell(Callback.on_freeze, control.step, control.boundary)
            case Evaluated():
                teller.tell(Callback.on_evaluate, control.step, dict(control.metrics))  # the program may change it
            case Finished(summary=summary):
                teller.tell(Callback.on_end, summary)
                teller.catch_up()


class LeaderMetrics:
    """Counts samples, skipped steps and trials of the whole job as metrics. Implements `LeaderListener`."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def on_event(self, event: LeaderEvent) -> None:
        match event:
            case StepTaken(line=line, finite=finite):
                self._meter.on_step_committed(line["samples"], skipped=not finite)
            case BoundaryMoved(control=control) if control.why_thawed:
                self._meter.on_trial(kept=False)
            case FreezeKept():
                self._meter.on_trial(kept=True)


def roles_of(layout: StageLayout) -> list[Role]:
    """Return each worker's name, pipeline, stage and layers."""
    return [
        Role(member.name, pipeline, stage, layout.cut.layers_of(stage))
        for member, (pipeline, stage) in zip(layout.generation.members, layout.roles, strict=True)
    ]
