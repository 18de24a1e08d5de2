"""Starts a job, also after a stop: creates its workers, and publishes a generation once all are warm.

A start needs all its workers. If the cluster cannot place or start them all within a time, the job releases all and
tries again later. Once all have nodes, they get six times that time. The job also releases all workers if another
waiting job can start with their accelerators (`gangs`). A worker that ends before the job trains is replaced, and the
other workers stay warm meanwhile.
"""

from datetime import datetime, timedelta

from pipetransformer_contract.api.status import ConditionType, Reason, Resize, ResizePhase
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import ResizeReason
from pipetransformer_contract.words import counted
from pipetransformer_operator.plan import generations, layouts, workforce
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.types import EventType
from pipetransformer_operator.plan.view import View

from . import share, undeleted
from .attempts import back_off_start, forget_failures
from .claim import postpones_hopeless_attempt
from .readiness import why_not_ready

LONGEST_RETRY = timedelta(minutes=4)
#: How often the time of a start may restart because workers ended. The other workers hold their nodes meanwhile.
RENEWALS = 16
#: Once all workers of a start have nodes, the start has this many times `startTimeoutSeconds`. Each start that was too
#: slow doubles the time of the next one.
PLACED = 6


def take_size(draft: Draft) -> Layout | None:
    """Takes the starting size from the spec, which users may edit until the job trains. Returns the starting layout.

    Returns None if no layout is valid. Workers learn the starting size when they are created, so they are replaced if
    it changed, and the start's time begins again. After the first generation the number of pipelines is limited by the
    shards of the checkpoint's data order. Without a checkpoint it is limited by the number that the first workers were
    told.
    """
    status, workers = draft.status, draft.spec.elastic_policy.workers
    num_shards = draft.spec.max_pipelines
    if status.layout_generation > 0:
        num_shards = min(max(num_shards, draft.view.shards_of(None)), draft.view.shards_of(status.checkpoint))
        workers = min(workers, draft.spec.pipeline.stages * num_shards)
    if (workers, num_shards) != (status.initial_workers, status.num_shards):
        draft.update(initial_workers=workers, num_shards=num_shards, resize=None)
        draft.keep_workers([], "the starting size changed, so new workers replace them")
    return layouts.starting(draft.view)


def refuse_start(draft: Draft) -> None:
    """Releases all workers and tells the user that the limits of spec and checkpoint allow no layout for a start."""
    bounds, lengths = layouts.bounds_of(draft.view), dict.fromkeys(layouts.starting_lengths(draft.view))
    *others, last = lengths
    words = " or ".join([*map(str, others), counted(last, "stage")])
    message = (
        f"no starting layout is within all limits: pipelines of {words}; {bounds.min_pipelines} to"
        f" {counted(bounds.max_pipelines, 'pipeline')}, by spec.elasticPolicy and the data order of the checkpoint;"
        f" {bounds.min_workers} to {counted(bounds.max_workers, 'worker')}, by spec.elasticPolicy"
    )
    draft.warn(ConditionType.RUNNING, False, Reason.NO_LEGAL_START, message)
    hold_nothing(draft, Reason.NO_LEGAL_START, message)


def hold_nothing(draft: Draft, reason: Reason, message: str) -> None:
    """Releases all workers until the user changes the job's spec. The condition Running says why (`message`)."""
    draft.set_condition(ConditionType.RUNNING, False, reason, message)
    draft.update(start_time=None, resize=None)
    draft.keep_workers([], f"the job cannot start: {message}")
    if not draft.observed.workers:
        draft.update(quota_requests=[])


def start(draft: Draft, layout: Layout) -> None:
    """Creates the workers of the starting layout, and publishes the first generation once all of them are ready."""
    status = draft.status
    if status.start_time is None:
        draft.update(start_time=draft.now)
    if draft.observed.gives_way_to and not draft.view.start_complete:
        _give_way(draft)
        return
    if draft.view.asleep_and_wakes() or undeleted.leaks(draft) or _waits_for_room(draft, layout):
        return
    ready = draft.view.ready_joiners
    if len(ready) >= layout.workers:
        generations.publish(draft, layout, ready, ResizeReason.START)
        draft.keep_workers(draft.view.ids_of(ready[: layout.workers]), "not needed for the starting layout")
        forget_failures(draft)
        return
    ids = list(dict.fromkeys([*draft.view.joiners.by_id, *draft.view.joining_ids]))  # workers that are alive come first
    workforce.want(draft, ids[: layout.workers], layout.workers)
    draft.enter(ResizePhase.PREPARE, layout, ResizeReason.START)
    _check_deadline(draft)


def _give_way(draft: Draft) -> None:
    """Releases all workers, and waits until the job that this one gives way to has started."""
    why = f"job {draft.observed.gives_way_to} can start with the accelerators that this job would hold"
    if draft.status.resize is not None:
        _postpone(draft, Reason.GAVE_WAY, why)
    elif not draft.view.asleep_and_wakes():
        message = f"{why}; this job tries again once that job has started"
        draft.set_condition(ConditionType.RUNNING, False, Reason.GAVE_WAY, message)


def _waits_for_room(draft: Draft, layout: Layout) -> bool:
    """Returns whether the start waits because nodes lack room for all its workers. If so, the condition says it."""
    if not postpones_hopeless_attempt(draft, layout.workers):
        return False
    draft.waits_for_room = True
    assert draft.observed.reach is not None
    room = draft.view.num_placed + draft.observed.reach
    message = f"nodes have room for {room} of {layout.workers} workers, even by preemption; the job starts once all fit"
    draft.set_condition(ConditionType.RUNNING, False, Reason.UNSCHEDULABLE, message)
    return True


def _check_deadline(draft: Draft) -> None:
    resize = draft.status.resize
    assert resize is not None
    placed = len(draft.view.joining_ids) == resize.to.layout.workers and draft.view.joiners_placed
    trouble = None if placed and draft.view.joiners_startable else resize.trouble_time or draft.now
    resize = resize.model_copy(update={"trouble_time": trouble})
    deadline = _deadline(draft.view, resize)
    draft.update(resize=resize.model_copy(update={"deadline": deadline}))
    if not draft.clock.reached(deadline):
        return
    reason, why = why_not_ready(draft.view)
    if reason is Reason.UNSCHEDULABLE:
        share.note_no_nodes(draft)
    elif trouble is None:
        draft.update(slow_starts=draft.status.slow_starts + 1)
    _postpone(draft, reason, why)


def replace(draft: Draft, lost: str, first: timedelta | None) -> None:
    """Replaces workers that ended before the job trained. New ones follow after a wait, and the start's time restarts.

    If workers ended too often, in a row or in total, the job releases all workers and tries again later. Workers that
    fail by one cause end one after the other. So a worker that ends during the wait is replaced together with the
    first ones, and does not count again.

    Args:
        draft: draft of the plan of a job that does not train yet.
        lost: which workers ended, and why, in words.
        first: how long to wait before the first replacement in a row; None for no wait.
    """
    again, wait = draft.status.next_resize_time, first or timedelta()
    if draft.view.asleep:
        assert again is not None
        begin = max(again, draft.now + wait)
    else:
        begin = draft.now + wait * (1 << min(_replaced_in_a_row(draft), 16))
        if trouble := _note_replacement(draft, begin, waits=first is not None):
            _postpone(draft, Reason.WORKER_FAILED, f"workers ended before the start {trouble}. The last: {lost}")
            return
    if begin > draft.now:
        draft.update(next_resize_time=begin)
        message = f"lost {lost} before all workers were ready; replaced in {(begin - draft.now).total_seconds():.0f} s"
        draft.set_condition(ConditionType.RUNNING, False, Reason.WORKER_FAILED, message)
    draft.restart_preparation(begin)


def _replaced_in_a_row(draft: Draft) -> int:
    """How often workers were replaced in a row so far. The row ends if no worker was lost for `LONGEST_RETRY`."""
    resize = draft.status.resize
    if resize is None or draft.now > resize.start_time + LONGEST_RETRY:
        return 0
    return resize.replacements


def _note_replacement(draft: Draft, begin: datetime, *, waits: bool) -> str:
    """Counts a replacement that begins at `begin`. Returns words if there were too many, otherwise an empty text.

    `waits`: the replacement begins after a wait. Only such replacements double the next wait."""
    resize = draft.status.resize
    replacements = _replaced_in_a_row(draft) + waits
    renewals = 1 + (resize.renewals if resize is not None else 0)
    if begin > draft.now + LONGEST_RETRY:
        return f"{replacements} times in a row"
    if renewals > RENEWALS:
        return f"{renewals} times"
    if resize is not None:
        draft.update(resize=resize.model_copy(update={"replacements": replacements, "renewals": renewals}))
    return ""


def _deadline(view: View, resize: Resize) -> datetime:
    """When to postpone a start that is not ready.

    Once all workers have nodes, there is more time for images, init containers and models. Each slow attempt doubles
    it, up to 16 times. If workers lack nodes or containers cannot start, there is `startTimeoutSeconds` since that
    trouble began. It may begin late: an image is pulled after the init containers. A registry that refuses once
    may serve the next time.
    """
    timeout = timedelta(seconds=view.spec.run_policy.start_timeout_seconds)
    if resize.trouble_time is not None:
        begin = max(resize.start_time, resize.trouble_time)
        return max(begin, view.observed.preferred_since or begin) + timeout
    longer = resize.start_time + PLACED * timeout * (1 << min(view.status.slow_starts, 4))
    return max(longer, view.counted_from(resize.start_time) + timeout)


def _postpone(draft: Draft, reason: Reason, why: str) -> None:
    wait = back_off_start(draft, reason)
    message = f"Start postponed, all its workers are released: {why}; next attempt in {wait.total_seconds():.0f} s"
    draft.set_condition(ConditionType.RUNNING, False, reason, message)
    draft.tell(reason, message, EventType.WARNING)
    draft.update(resize=None)
    draft.keep_workers([], f"the start is postponed: {why}")
