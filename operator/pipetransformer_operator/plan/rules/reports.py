"""Writes the leader's report into the status: at once if rules depend on it, but mere progress only now and then."""

from datetime import timedelta
from operator import attrgetter

from pipetransformer_contract.api.status import JobStatus, LastReport, Reason
from pipetransformer_contract.messages import DurableCheckpoint, Generation, Report, ResizeReason
from pipetransformer_contract.spec import FrozenForward
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.view import View

from .attempts import forget_failures
from .lost_steps import settle

#: A report that shows only more steps is written this often.
PROGRESS_INTERVAL = timedelta(seconds=30)
#: What rules decide by. A report in which one of these is new is written at once.
_DECIDES = attrgetter("layout_generation", "boundary", "outcome", "checkpoint", "offers", "upcoming", "step_seconds")


def fold(draft: Draft) -> None:
    """Writes the newest report into the status, and tells what is new.

    A repeated report, or one of an earlier job with the same name, changes nothing."""
    report, last = draft.view.report, draft.status.last_report
    if report is None or not report.newer_than(last):
        return
    makes_step = _is_first_step_after_break(draft.status, report)
    if last is not None and not (makes_step or _DECIDES(report) != _DECIDES(last) or _is_due(draft.view, last)):
        return
    before = draft.view.boundary
    _write(draft, report)
    _tell_boundary(draft, report, before)
    if makes_step:
        draft.update(generation=draft.view.generation.model_copy(update={"broken_before": 0}))
    if draft.status.generation is not None:
        _confirm(draft, draft.status.generation, report)


def _is_first_step_after_break(status: JobStatus, report: Report) -> bool:
    """Whether the report shows the first step after one or more generations broke."""
    steps = status.last_report.step if status.last_report else 0
    return status.generation is not None and status.generation.broken_before > 0 and report.step > steps


def _write(draft: Draft, report: Report) -> None:
    before, last = draft.status.checkpoint, draft.status.last_report
    checkpoint = _newer(before, report.checkpoint)
    begins = last is None or report.layout_generation > last.layout_generation
    draft.update(
        last_report=LastReport(**dict(report), time=draft.now),
        frozen=f"{report.boundary}/{report.num_layers}",
        checkpoint=checkpoint,
        checkpoint_time=draft.status.checkpoint_time if checkpoint == before else draft.now,
        redone_steps=draft.status.redone_steps + (report.redone_steps if begins else 0),
        num_shards=min(draft.view.shards_of(None), draft.view.shards_of(checkpoint)),
        # A status that another client emptied lacks it, and workers take no generation with a number that they had.
        layout_generation=max(draft.status.layout_generation, report.layout_generation),
    )


def _tell_boundary(draft: Draft, report: Report, before: int) -> None:
    """Sends an event if the number of frozen layers changed from `before`."""
    if report.boundary == before:
        return
    reason = Reason.LAYERS_FROZEN if report.boundary > before else Reason.LAYERS_UNFROZEN
    words = f"{report.boundary} of {report.num_layers} layers are frozen at step {report.step}"
    draft.tell(reason, words + (f"; {report.why_thawed}" if report.why_thawed else ""))


def _confirm(draft: Draft, generation: Generation, report: Report) -> None:
    """Writes that the report's generation is confirmed, and sends an event at the first report of each generation."""
    number = report.layout_generation
    settle(draft, report.step)
    if number <= generation.confirmed_generation:
        return
    draft.update(generation=generation.model_copy(update={"confirmed_generation": number}))
    if number == generation.layout_generation:
        if generation.reason is ResizeReason.CLAIM:  # not at its publication, because the claim could still be undone
            forget_failures(draft)
        words = f"Generation {number} trains: {generation.layout.words}{report.schedule_words}"
        draft.tell(Reason.GENERATION_CONFIRMED, words + _frozen_forward(report))


def _frozen_forward(report: Report) -> str:
    """Words for an event: frozen layers compute one round ahead, or why they do not although the spec asks for it.
    Otherwise empty."""
    if report.why_frozen_forward:
        return f", frozen layers compute in place ({report.why_frozen_forward})"
    return ", frozen layers compute ahead" if report.frozen_forward == FrozenForward.AHEAD else ""


def _is_due(view: View, last: LastReport) -> bool:
    """Whether it is time to write mere progress: often enough that the job does not seem to stall."""
    stall = view.spec.run_policy.stall_timeout_seconds
    interval = PROGRESS_INTERVAL if stall is None else min(PROGRESS_INTERVAL, timedelta(seconds=stall / 3))
    return view.clock.reached(last.time + interval)


def _newer(old: DurableCheckpoint | None, new: DurableCheckpoint | None) -> DurableCheckpoint | None:
    known = filter(None, (old, new))
    return max(known, key=lambda checkpoint: (checkpoint.layout_generation, checkpoint.step), default=None)
