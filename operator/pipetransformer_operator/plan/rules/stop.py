"""Stops a job that trains: its members write a checkpoint, and are deleted once it is durable.

The channel tells members to stop in its answers to heartbeats. A member ends by itself once the checkpoint is durable,
so a pod that has ended shows that it is. If a member is lost before, another generation continues without it. The
operator deletes members that have not ended after `runPolicy.stopTimeoutSeconds`. An event says which steps are lost.
"""

from datetime import datetime, timedelta

from pipetransformer_contract.api.status import ConditionType, Reason, Stop
from pipetransformer_contract.messages import Member, ResizeReason
from pipetransformer_operator.plan import generations, layouts
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.types import EventType
from pipetransformer_operator.plan.view import View

from . import commit, recover
from .lost_steps import forget_generation, saved_by_members, tell_lost
from .unsaved import durable_words, trouble


def begin(draft: Draft) -> None:
    """Tells the members to write a checkpoint and end, unless they were told already or the job does not train."""
    if draft.status.stop is not None or draft.status.generation is None:
        return
    draft.update(stop=Stop(time=draft.now))
    draft.clock.wake_at(draft.now)
    if draft.spec.checkpoint is None and (step := draft.view.newest_step):
        message = f"All {step} steps will be lost with the pods: the job has no spec.checkpoint"
        draft.tell(Reason.STEPS_LOST, message, EventType.WARNING)


def release_workers(draft: Draft, why: str) -> None:
    """Releases all workers. Members that may still write a checkpoint are released only at the end of the stop.

    Once no pod is left, the published generation is removed from the status. `why` is the reason of the deletions. They
    need no event, because the stop has one.
    """
    begin(draft)
    draft.explained_ids = draft.view.workers.ids
    draft.keep_workers(draft.view.ids_of(_saving(draft)), why)
    draft.update(next_resize_time=None, resize_failures=0, slow_starts=0)
    if not draft.status.worker_ids:
        draft.update(resize=None)
    if not draft.observed.workers:  # until then members may still report the checkpoint that they write
        forget_generation(draft)


def end_finished(draft: Draft) -> None:
    """Stops a job that has ended because `activeDeadlineSeconds` passed: its members first write a checkpoint.

    Unlike in `release_workers`, the generation stays, and `cleanPodPolicy` says which pods are deleted."""
    if draft.status.reason(ConditionType.FAILED) != Reason.DEADLINE_EXCEEDED:
        draft.update(stop=None)
        return
    if not draft.observed.status.finished:
        begin(draft)
    if draft.status.stop is None:
        return
    saving = _saving(draft)
    draft.keep_workers(draft.view.ids_of(saving), "the job is past spec.runPolicy.activeDeadlineSeconds")
    if not saving:
        tell_lost(draft)
        draft.update(stop=None)


def words(view: View) -> str:
    """What the stop waits for, as words for a condition; empty if it waits for nothing."""
    if not view.status.worker_ids:
        return ""
    stop = view.status.stop
    assert stop is not None
    left, deadline = len(view.status.worker_ids), _deadline(view, stop)
    waits = f"workers left: {left}; until {deadline:%Y-%m-%dT%H:%M:%SZ} they may write a checkpoint"
    return ": ".join(filter(None, [f"{waits}, {durable_words(view)}", trouble(view)]))


def _deadline(view: View, stop: Stop) -> datetime:
    """When the operator deletes members that have not ended.

    The time restarts with a new operator, because its predecessor may not have told the members."""
    return view.counted_from(stop.time) + timedelta(seconds=view.spec.run_policy.stop_timeout_seconds)


def _saving(draft: Draft) -> list[Member]:
    """Members that stay for now, because they may still write a checkpoint. Empty if the job has no `spec.checkpoint`,
    once the checkpoint is durable, and after the stop's deadline.

    Also notes in `status.stop` which step is saved. If members were lost, publishes a generation of the others."""
    stop = draft.status.stop
    if stop is None:
        return []
    if draft.observed.status.stop is None:  # the stop begins in this turn, and its event comes before the deletions
        return draft.view.state_holders
    saved = max(stop.saved_step, saved_by_members(draft.view))
    draft.update(stop=stop.model_copy(update={"saved_step": saved}))
    deadline = _deadline(draft.view, stop)
    # The checkpoint that a member wrote before it ended is durable for all members.
    if draft.spec.checkpoint is None or saved or draft.now >= deadline:
        return []
    draft.clock.wake_at(deadline)
    if draft.view.preparation:
        draft.update(resize=None)
    if not draft.status.finished:
        _regroup_survivors(draft)
    return draft.view.state_holders


def _regroup_survivors(draft: Draft) -> None:
    """Publishes a generation of the members that are left, if some were lost or the group broke.

    If the survivors are too few for a layout, or hold no copy of a lost stage, the job releases them."""
    generation = draft.view.generation
    lost = recover.find_lost(draft, generation)
    if not lost:
        commit.advance(draft)
        return
    whys = {key: lost[name] for key in draft.status.worker_ids if (name := draft.view.name_of(key)) in lost}
    draft.keep_workers(draft.view.wanted_ids - whys.keys(), whys)
    survivors = draft.view.state_holders
    layout = layouts.best(draft.view, len(survivors))
    if layout is None or (generation.pipelines == 1 and draft.spec.mirror is None):
        draft.keep_workers([], "the job stops, and too few workers are left to write a checkpoint")
    else:
        generations.publish(draft, layout, survivors, ResizeReason.FAILURE)
