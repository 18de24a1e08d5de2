"""Starting, and starting again: workers are created, and when all are warm a generation is published.

All or none: workers of a start that the cluster cannot place whole, or whose containers it cannot start, are given back
after a time, and tried again later.
"""

from pipetransformer_contract.messages import ResizeReason

from ..api.status import ConditionType, Reason, ResizePhase
from . import layouts, share
from .draft import Draft
from .prepare import all_scheduled, back_off, can_start, forget_failures, why_not_ready
from .types import EventType


def take_size(draft: Draft) -> None:
    """Takes the starting size from the spec, which may be edited until the job trains, and when it starts again.

    Workers that wait were told another size, so they make room for others. The order of the data stays what it was in
    the first generation, and has no work for more pipelines than it has shards.
    """
    status, workers = draft.status, draft.spec.elastic_policy.workers
    num_shards = draft.spec.max_pipelines
    if status.layout_generation > 0 and status.num_shards is not None:
        num_shards = status.num_shards
        workers = min(workers, draft.spec.pipeline.stages * num_shards)
    if (workers, num_shards) != (status.initial_workers, status.num_shards):
        draft.update(initial_workers=workers, num_shards=num_shards)
        draft.keep_workers([])


def start(draft: Draft) -> None:
    """Creates the workers of the starting layout and publishes it once each of them is ready."""
    status = draft.status
    if status.start_time is None:
        draft.update(start_time=draft.now)
    if draft.sleeps():
        return
    layout = layouts.starting(draft)
    ready = draft.ready_joiners
    if len(ready) >= layout.workers:
        draft.publish(layout, ready, ResizeReason.START)
        draft.keep_workers(draft.ids_of(ready[: layout.workers]))
        forget_failures(draft)
        return
    alive = [worker.id for worker in draft.joiners]
    ids = [*alive, *(key for key in draft.joining_ids if key not in alive)]
    draft.want(ids[: layout.workers], layout.workers)
    draft.enter(ResizePhase.PREPARE, layout, ResizeReason.START, None)
    _put_off_what_cannot_run(draft)


def _put_off_what_cannot_run(draft: Draft) -> None:
    resize = draft.status.resize
    assert resize is not None and resize.deadline is not None
    if all_scheduled(draft) and can_start(draft):
        return
    if draft.now < resize.deadline:
        draft.wake_at(resize.deadline)
        return
    reason, why = why_not_ready(draft)
    if reason is Reason.UNSCHEDULABLE:
        share.note_vain(draft)
    wait = back_off(draft)
    message = f"Start put off, its workers are given back: {why}; next attempt in {wait.total_seconds():.0f} s"
    draft.set_condition(ConditionType.RUNNING, False, reason, message)
    draft.tell(reason, message, EventType.WARNING)
    draft.update(resize=None)
    draft.keep_workers([])
