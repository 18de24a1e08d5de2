"""Starts a job, also after a stop: creates its workers, and publishes a generation when all are warm.

All or none: workers that the cluster cannot place or start together are given back after a time and tried again later.
Workers that are all placed have six times that time. All are given back at once if another waiting job can start on
what they hold (`gangs`). A worker that ends before the job trains is replaced, and the others stay warm meanwhile.
"""

from datetime import datetime, timedelta

from pipetransformer_contract.api.status import ConditionType, Reason, Resize, ResizePhase
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import ResizeReason
from pipetransformer_operator.plan import generations, layouts, workforce
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.sharing import share
from pipetransformer_operator.plan.sharing.claim import is_in_vain
from pipetransformer_operator.plan.types import EventType
from pipetransformer_operator.plan.view import View

from . import undeleted
from .prepare import forget_failures, sleep, why_not_ready

LONGEST_RETRY = timedelta(minutes=4)
#: This many times a start gets all its time again, because workers that end again and again hold the others' nodes.
RENEWALS = 16
#: A start whose workers are all placed has this many times `startTimeoutSeconds`; doubled with each that was too slow.
PLACED = 6


def take_size(draft: Draft) -> Layout | None:
    """Takes the starting size from the spec, which users may edit until the job trains. Returns the layout to start
    with, None if none is legal.

    Workers that were told another size are deleted, and new ones are created. Once a generation was published, there
    are at most as many pipelines as the checkpoint's data order has shards, or, without a checkpoint, as the first
    workers were told.
    """
    status, workers = draft.status, draft.spec.elastic_policy.workers
    num_shards = draft.spec.max_pipelines
    if status.layout_generation > 0 and status.num_shards is not None:
        shards = status.checkpoint.num_shards if status.checkpoint else None
        num_shards = min(max(num_shards, status.num_shards), shards or status.num_shards)
        workers = min(workers, draft.spec.pipeline.stages * num_shards)
    if (workers, num_shards) != (status.initial_workers, status.num_shards):
        draft.update(initial_workers=workers, num_shards=num_shards)
        draft.keep_workers([], "the job starts in another size, of which new workers are told")
    return layouts.starting(draft.view)


def wait(draft: Draft) -> None:
    """Holds no workers and says why, because no layout to start with is within the spec's bounds."""
    bounds, lengths = layouts.bounds_of(draft.view), dict.fromkeys(layouts.starting_lengths(draft.view))
    message = (
        f"spec.elasticPolicy allows no start: pipelines of {' or '.join(map(str, lengths))} stages,"
        f" {bounds.min_pipelines} to {bounds.max_pipelines} of them,"
        f" {bounds.min_workers} to {bounds.max_workers} workers in all"
    )
    if draft.status.reason(ConditionType.RUNNING) != Reason.NO_LEGAL_START:
        draft.tell(Reason.NO_LEGAL_START, message, EventType.WARNING)
    hold_nothing(draft, Reason.NO_LEGAL_START, message)


def hold_nothing(draft: Draft, reason: Reason, message: str) -> None:
    """Gives all workers back until the job's spec changes; the condition says why."""
    draft.set_condition(ConditionType.RUNNING, False, reason, message)
    draft.update(start_time=None, resize=None)
    draft.keep_workers([], f"the job cannot start: {message}")
    if not draft.observed.workers:
        draft.update(quota_requests=[])


def start(draft: Draft, layout: Layout) -> None:
    """Creates the workers of the starting layout and publishes it once each of them is ready."""
    status = draft.status
    if status.start_time is None:
        draft.update(start_time=draft.now)
    if draft.observed.gives_way_to and not draft.view.start_complete:
        _give_way(draft)
        return
    if draft.view.sleeps() or undeleted.leaks(draft) or _is_in_vain(draft, layout):
        return
    ready = draft.view.ready_joiners
    if len(ready) >= layout.workers:
        generations.publish(draft, layout, ready, ResizeReason.START)
        draft.keep_workers(draft.view.ids_of(ready[: layout.workers]), "the layout that starts does not need it")
        forget_failures(draft)
        return
    ids = list(dict.fromkeys([*draft.view.joiners.by_id, *draft.view.joining_ids]))  # those that live come first
    workforce.want(draft, ids[: layout.workers], layout.workers)
    draft.enter(ResizePhase.PREPARE, layout, ResizeReason.START, None)
    _put_off_what_does_not_begin(draft)


def _give_way(draft: Draft) -> None:
    """Holds nothing until the job that can start has all its workers."""
    why = f"job {draft.observed.gives_way_to} can start on what this one would hold"
    if draft.status.resize is not None:
        _put_off(draft, Reason.GAVE_WAY, why)
    elif not draft.view.sleeps():
        message = f"{why}; the next attempt follows when that job has started"
        draft.set_condition(ConditionType.RUNNING, False, Reason.GAVE_WAY, message)


def _is_in_vain(draft: Draft, layout: Layout) -> bool:
    """Waits until nodes have room for all workers of the start, and says so. Returns whether it waits."""
    if not is_in_vain(draft, layout.workers):
        return False
    draft.waits_for_room = True
    room = draft.view.num_placed + (draft.observed.reach or 0)
    message = (
        f"nodes have room for {room} of {layout.workers} workers, with what these may preempt; it starts once they do"
    )
    draft.set_condition(ConditionType.RUNNING, False, Reason.UNSCHEDULABLE, message)
    return True


def _put_off_what_does_not_begin(draft: Draft) -> None:
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
        share.note_vain(draft)
    elif placed and trouble is None:
        draft.update(slow_starts=draft.status.slow_starts + 1)
    _put_off(draft, reason, why)


def replace(draft: Draft, lost: str, first: timedelta | None) -> None:
    """Replaces workers that ended before the job trained: others are created after a wait, and have all the time of a
    start. All workers are given back if too many ended, in a row or in total.

    Workers of one node or one cause end one after the other. So one that ends while others are awaited is replaced with
    them.

    Args:
        draft: of a job that does not train yet.
        lost: which workers ended, and how.
        first: how long to wait before the first replacement; None for no wait.
    """
    again, wait = draft.status.next_resize_time, first or timedelta()
    if again is not None and draft.view.asleep:
        begin = max(again, draft.now + wait)
    else:
        begin = draft.now + wait * (1 << min(_replaced_in_a_row(draft), 16))
        if trouble := _note_replacement(draft, begin, waits=first is not None):
            _put_off(draft, Reason.WORKER_FAILED, f"{trouble} some ended, now {lost}")
            return
    if begin > draft.now:
        draft.update(next_resize_time=begin)
        message = f"{lost} before all were ready; replaced in {(begin - draft.now).total_seconds():.0f} s"
        draft.set_condition(ConditionType.RUNNING, False, Reason.WORKER_FAILED, message)
    draft.prepare_anew(begin)


def _replaced_in_a_row(draft: Draft) -> int:
    """How often workers were replaced in a row, before this time. A replacement that stayed for long ends the row."""
    resize = draft.status.resize
    lasts = resize is not None and draft.now <= resize.start_time + LONGEST_RETRY
    return resize.replacements if resize is not None and lasts else 0


def _note_replacement(draft: Draft, begin: datetime, *, waits: bool) -> str:
    """Counts a replacement that begins at `begin`. Returns how many there were if they are too many, otherwise nothing.

    Only one that `waits` doubles the next wait."""
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
    """When a start is put off. Once each worker is placed, images, init containers and models have more time, and more
    with each attempt, but not without end.

    Trouble counts from when it began: a pod may vanish and a container may begin to fail late. An image is pulled after
    the init containers, and a registry that refuses once may serve the next time.
    """
    timeout = timedelta(seconds=view.spec.run_policy.start_timeout_seconds)
    if resize.trouble_time is not None:
        begin = max(resize.start_time, resize.trouble_time)
        return max(begin, view.observed.preferred_since or begin) + timeout
    longer = resize.start_time + PLACED * timeout * (1 << min(view.status.slow_starts, 4))
    return max(longer, view.counted_from(resize.start_time) + timeout)


def _put_off(draft: Draft, reason: Reason, why: str) -> None:
    wait = sleep(draft, reason)
    message = f"Start put off, its workers are to be given back: {why}; next attempt in {wait.total_seconds():.0f} s"
    draft.set_condition(ConditionType.RUNNING, False, reason, message)
    draft.tell(reason, message, EventType.WARNING)
    draft.update(resize=None)
    draft.keep_workers([], f"the start is put off: {why}")
