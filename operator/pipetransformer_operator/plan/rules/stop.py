"""Stops a job that trains: its members leave a checkpoint, and are deleted once it is durable.

The channel tells them in its answers to heartbeats. Each member ends by itself when the checkpoint is durable, so a pod
that has ended proves it. Until then a lost member is left out by another generation, as in a job that trains on.
Members that have not ended after `runPolicy.stopTimeoutSeconds` are deleted, and an event says how many steps are lost.
"""

from datetime import datetime, timedelta

from pipetransformer_contract.api.status import ConditionType, Reason, Stop
from pipetransformer_contract.messages import Member, ResizeReason
from pipetransformer_operator.plan import generations, layouts
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.types import EventType
from pipetransformer_operator.plan.view import View

from . import commit, recover
from .lost_steps import forget_generation, newest_step, saved_by_members, tell_lost
from .unsaved import durable_words, trouble


def begin(draft: Draft) -> None:
    """Tells the members to leave a checkpoint and end, unless they were told already or nothing trains."""
    if draft.status.stop is not None or draft.status.generation is None:
        return
    draft.update(stop=Stop(time=draft.now))
    draft.clock.wake_at(draft.now)
    if draft.spec.checkpoint is None and (step := newest_step(draft.view)):
        message = f"All {step} steps will be lost with the pods: the job has no spec.checkpoint"
        draft.tell(Reason.STEPS_LOST, message, EventType.WARNING)


def give_back(draft: Draft, why: str) -> None:
    """Releases all workers. Members that may still write a checkpoint are kept until the stop's end.

    Once no member is kept and no pod is left, the generation is forgotten, but never its number. No event tells these
    deletions, because the event of the stop does.
    """
    begin(draft)
    draft.explained_ids = draft.view.workers.ids
    draft.keep_workers(draft.view.ids_of(_saving(draft)), why)
    draft.update(next_resize_time=None, resize_failures=0, slow_starts=0)
    if not draft.status.worker_ids:
        draft.update(resize=None)
    if not draft.observed.workers:  # until then its members may report the checkpoint that they leave
        forget_generation(draft)


def end_finished(draft: Draft) -> None:
    """Stops a job past its deadline like `give_back`, except that the generation stays and `cleanPodPolicy` says which
    pods are deleted."""
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
    """What the stop waits for, for a condition; empty where it waits for nothing."""
    stop, generation = view.status.stop, view.status.generation
    if stop is None or generation is None or not view.status.worker_ids:
        return ""
    waits = f"{len(view.status.worker_ids)} workers have until {_deadline(view, stop):%Y-%m-%dT%H:%M:%SZ} to leave"
    return ": ".join(filter(None, [f"{waits} a checkpoint, {durable_words(view)}", trouble(view)]))


def _deadline(view: View, stop: Stop) -> datetime:
    """When members that have not ended are deleted. The time counts again from the start of a new operator, because its
    predecessor may not have told them."""
    return view.counted_from(stop.time) + timedelta(seconds=view.spec.run_policy.stop_timeout_seconds)


def _saving(draft: Draft) -> list[Member]:
    """Members that may still leave a checkpoint."""
    stop, generation = draft.status.stop, draft.status.generation
    if stop is None or generation is None:
        return []
    if draft.observed.status.stop is None:  # they are deleted in the next turn, after the event that says what is lost
        return draft.view.state_holders
    _note_saved(draft, stop)
    deadline = _deadline(draft.view, stop)
    if draft.spec.checkpoint is None or _is_saved(draft.view) or draft.now >= deadline:
        return []
    draft.clock.wake_at(deadline)
    if draft.view.preparation:
        draft.update(resize=None)
    if not draft.status.finished:
        _regroup_survivors(draft)
    return draft.view.state_holders


def _note_saved(draft: Draft, stop: Stop) -> None:
    saved = saved_by_members(draft.view)
    if saved > stop.saved_step:
        draft.update(stop=stop.model_copy(update={"saved_step": saved}))


def _is_saved(view: View) -> bool:
    """Whether a member has ended after it left a checkpoint, which holds the state of all of them."""
    return view.status.stop is not None and view.status.stop.saved_step > 0


def _regroup_survivors(draft: Draft) -> None:
    """Publishes a generation of the members that are left, if some were lost or lost each other. If the survivors are
    too few, or hold no copy of what was lost, they are given back."""
    generation = draft.status.generation
    assert generation is not None
    lost = recover.find_lost(draft, generation)
    if not lost:
        commit.under_way(draft)
        return
    whys = {key: lost[name] for key in draft.status.worker_ids if (name := draft.view.name_of(key)) in lost}
    draft.keep_workers(draft.view.wanted_ids - whys.keys(), whys)
    survivors = draft.view.state_holders
    layout = layouts.best(draft.view, len(survivors))
    if layout is None or (generation.pipelines == 1 and draft.spec.mirror is None):
        draft.keep_workers([], "the job stops, and too few workers are left to write a checkpoint")
    else:
        generations.publish(draft, layout, survivors, ResizeReason.FAILURE)
