"""`plan()`: applies all rules to one job, once for each turn of the job's loop."""

from datetime import datetime

from pipetransformer_contract.api.job import JobSpec
from pipetransformer_contract.api.status import Reason

from . import budget
from .draft import Draft
from .rules import (
    accounting,
    attempts,
    checkpoint_now,
    conditions,
    drain,
    finish,
    queue,
    recover,
    reports,
    resize,
    share,
    start,
    stop,
    suspend,
)
from .types import Observed, Plan


def plan(spec: JobSpec, observed: Observed, now: datetime) -> Plan:
    """Decides what a job needs now. `Plan` says in which order the operator executes the result.

    Equal arguments give equal plans. After a plan was executed, the next one has nothing to do until something happens.
    A job whose `managedBy` names another controller is not touched.
    """
    draft = Draft(spec, observed, now)
    if not spec.managed:
        return Plan(status=observed.status)
    reports.fold(draft)
    budget.forget(draft)
    finish.judge(draft)
    budget.judge(draft)
    if not draft.status.finished:
        _advance(draft)
    if draft.status.finished:
        stop.end_finished(draft)
        finish.clean(draft)
    else:
        drain.set_disruption_budget(draft)
    checkpoint_now.follow(draft)
    accounting.count(draft)
    conditions.describe(draft)
    return draft.plan()


def _advance(draft: Draft) -> None:
    if draft.view.stopped or suspend.is_ending(draft.view):
        suspend.suspend(draft)
        return
    suspend.resume(draft)
    share.take(draft)
    _try_an_edit_at_once(draft)
    attempts.wake(draft)
    queue.follow(draft)
    if queue.release_if_reclaimed(draft):
        return
    recover.recover(draft)
    if draft.status.finished:
        return
    if draft.status.generation is not None:
        resize.resize(draft)
    elif draft.view.spec_errors:
        attempts.try_at_once(draft)
        start.hold_nothing(draft, Reason.INVALID_SPEC, "; ".join(map(str, draft.view.spec_errors)))
    else:
        layout = start.take_size(draft)
        if layout is None:
            start.refuse_start(draft)
        elif queue.await_admission(draft, layout.workers):
            start.start(draft, layout)
    queue.tidy(draft)


def _try_an_edit_at_once(draft: Draft) -> None:
    """If the user edited the spec, forgets failed attempts, so that the next attempt begins at once."""
    if draft.status.observed_generation not in (0, draft.observed.metadata_generation):
        attempts.forget_failures(draft)
