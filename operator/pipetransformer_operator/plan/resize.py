"""Changing the layout of a job that trains: prepare, publish, and give back what is no longer needed.

At most one change is under way. What the present workers carry is published at once; for more workers pods are created,
and the old layout trains until all of them are warm.
"""

from datetime import timedelta

from pipetransformer_contract.choose import Layout, OnPack
from pipetransformer_contract.messages import ResizeReason

from ..api.status import Reason, Resize
from .draft import Draft
from .types import EventType

FIRST_BACKOFF = timedelta(seconds=60)
LONGEST_BACKOFF = timedelta(hours=1)


def resize(draft: Draft) -> None:
    """Moves a training job one step closer to its best layout, unless members are lost or ending."""
    plan = draft.status.plan
    if plan is None or not all(draft.alive(member) for member in plan.members):
        return
    if not plan.confirmed or not _settle(draft) or _publish_what_is_there(draft):
        return
    _give_up_past_deadline(draft)
    target = _target(draft, plan.layout)
    _want(draft, max(target.workers, _held(draft)))
    _remember(draft, plan.layout, target)


def cancel(draft: Draft, why: str) -> None:
    """Drops a preparation; each one in a row doubles the wait for the next."""
    failures = draft.status.resize_failures
    wait = min(LONGEST_BACKOFF, FIRST_BACKOFF * 2 ** min(failures, 16))
    draft.update(resize=None, resize_failures=failures + 1, next_resize_time=draft.now + wait)
    draft.tell(
        Reason.DEADLINE_EXCEEDED,
        f"Resize cancelled: {why}; next attempt in {wait.total_seconds():.0f} s",
        EventType.WARNING,
    )


def reason_of(draft: Draft, before: Layout, after: Layout) -> ResizeReason:
    """Why a job goes from one layout to the other."""
    if after == before:
        return ResizeReason.BALANCE
    if after.workers > before.workers:
        return ResizeReason.CLAIM
    if after.stages > before.stages:
        return ResizeReason.DEEPEN
    if after.workers == before.workers or draft.on_pack is OnPack.HOLD:
        return ResizeReason.PACK
    return ResizeReason.RELEASE if after.stages < before.stages else ResizeReason.SPEC


def _settle(draft: Draft) -> bool:
    """Gives leavers back once a checkpoint that knows the new layout's boundary is durable; True when none is left."""
    plan = draft.status.plan
    assert plan is not None
    names = {member.name for member in plan.leavers}
    leaving = [key for key in draft.status.worker_ids if draft.name_of(key) in names]
    if not leaving:
        return True
    if draft.spec.checkpoint and not plan.covered_by(draft.status.checkpoint):
        return False
    draft.keep_workers(key for key in draft.status.worker_ids if key not in leaving)
    draft.tell(Reason.WORKERS_DELETED, f"{len(leaving)} workers have left generation {plan.layout_generation}")
    if plan.reason is not ResizeReason.FAILURE and draft.on_pack is not OnPack.HOLD:
        draft.update(releasing_ids=sorted({*draft.status.releasing_ids, *leaving}))
    return True


def _publish_what_is_there(draft: Draft) -> bool:
    """Publishes a better layout, or a better cut, if the members, with all joiners or with none, carry one."""
    plan = draft.status.plan
    assert plan is not None
    warm = draft.ready_joiners
    preparing = [key for key in draft.status.worker_ids if draft.name_of(key) not in {m.name for m in plan.members}]
    candidates = [*plan.members, *(warm if len(warm) == len(preparing) else [])]
    layout = draft.choose(len(candidates))
    if layout is None or (layout == plan.layout and not draft.pays_to_recut):
        return False
    draft.publish(layout, candidates, reason_of(draft, plan.layout, layout))
    if layout.workers > plan.layout.workers:
        draft.update(resize_failures=0, next_resize_time=None)
    return True


def _give_up_past_deadline(draft: Draft) -> None:
    resize = draft.status.resize
    if resize is None:
        return
    if draft.now < resize.deadline:
        draft.wake_at(resize.deadline)
        return
    late = sorted({worker.name for worker in draft.joiners} - {member.name for member in draft.ready_joiners})
    cancel(
        draft, f"not ready within spec.runPolicy.resizeTimeoutSeconds: {', '.join(late[:8]) or 'workers not created'}"
    )


def _target(draft: Draft, current: Layout) -> Layout:
    """The best layout that more workers would carry; the present one while a cancelled attempt is being slept over."""
    snooze = draft.status.next_resize_time
    if snooze is not None and draft.now < snooze:
        draft.wake_at(snooze)
        return current
    best = draft.choose(draft.spec.elastic_policy.max_workers)
    return best if best and best.workers > current.workers else current


def _held(draft: Draft) -> int:
    """Workers that the job keeps whether its layout needs them or not: leavers have exited, so new ones warm up."""
    return draft.status.initial_workers if draft.on_pack is OnPack.HOLD else 0


def _want(draft: Draft, count: int) -> None:
    plan = draft.status.plan
    assert plan is not None
    names = {member.name for member in plan.members}
    members = [key for key in draft.status.worker_ids if draft.name_of(key) in names]
    joiners = [key for key in draft.status.worker_ids if key not in members]
    draft.keep_workers(draft.top_up([*members, *joiners][: max(count, len(members))], count))


def _remember(draft: Draft, current: Layout, target: Layout) -> None:
    before = draft.status.resize
    if target == current:
        draft.update(resize=None)
    elif before is None or before.layout != target:
        timeout = timedelta(seconds=draft.spec.run_policy.resize_timeout_seconds)
        draft.update(
            resize=Resize(
                stages=target.stages,
                pipelines=target.pipelines,
                reason=reason_of(draft, current, target),
                start_time=before.start_time if before else draft.now,
                deadline=before.deadline if before else draft.now + timeout,
            )
        )
        draft.wake_at(before.deadline if before else draft.now + timeout)
