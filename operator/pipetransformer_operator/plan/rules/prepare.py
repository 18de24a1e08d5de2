"""The first phase of a resize: new workers warm up while the old layout trains; then a generation is published.

A preparation that is not done by its deadline is cancelled. An event says why, and `attempts` decides when the next
attempt begins.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from pipetransformer_contract.api.status import ConditionType, Reason, Resize, ResizePhase
from pipetransformer_contract.choose import OnPack
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Member, ResizeReason
from pipetransformer_operator.plan import generations, layouts, leavers, workforce
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.members import parted
from pipetransformer_operator.plan.quota import balance
from pipetransformer_operator.plan.types import EventType
from pipetransformer_operator.plan.view import View

from . import share
from .attempts import back_off, back_off_start, recently_not_committed
from .claim import is_claim, target
from .readiness import why_not_ready


def publish(draft: Draft) -> bool:
    """Publishes a better layout, or the same one with stages cut again, if the present workers can run it.

    It takes all joiners once all are ready; after the deadline those that are ready; otherwise none. Workers whose
    quota the queue reclaims leave. Returns whether it published a generation.
    """
    generation = draft.view.generation
    going, staying = parted(generation.members, draft.view.names_of(balance.lost_ids(draft.status, draft.observed)))
    joining = _joining_now(draft)
    number = len(staying) + len(joining)
    layout = layouts.best(draft.view, layouts.limited(draft.view, number)) or layouts.best(draft.view, number)
    unchanged = layout == generation.layout and not going and not layouts.pays_to_recut(draft.view)
    if layout is None or unchanged or recently_not_committed(draft.view, layout):
        return False
    candidates = [*leavers.stayers_first(draft.view, staying, layout.workers), *joining]
    is_limited = layouts.limited(draft.view, len(generation.members)) < len(generation.members)
    reason = ResizeReason.RELEASE if going else reason_of(draft.view, generation.layout, layout)
    generations.publish(draft, layout, [*candidates, *going], reason)
    if layout.workers <= generation.layout.workers:
        _follow_release(draft, reclaimed=bool(going), is_limited=is_limited)
    return True


def _joining_now(draft: Draft) -> list[Member]:
    """The joiners that a generation may take now: all once all are ready, after the deadline those that are ready."""
    warm = draft.view.ready_joiners
    complete = len(warm) == len(draft.view.joining_ids)
    may_join = not draft.view.asleep and (complete or is_late(draft))
    return warm if may_join else []


def _follow_release(draft: Draft, *, reclaimed: bool, is_limited: bool) -> None:
    """After a release that the queue or the job's share demanded, stops growth for a while and drops joiners.

    Args:
        draft: draft of the job's plan.
        reclaimed: the queue reclaimed quota of members.
        is_limited: the job's share was below its number of workers.
    """
    if not reclaimed and not is_limited:
        draft.update(not_committed=None)
        return
    back_off(draft)
    if not reclaimed:
        share.sit_out_after_release(draft)
    kept = draft.view.wanted_ids - set(draft.view.joining_ids)
    draft.keep_workers(kept, "the job releases workers, so no new ones join")


def prepare(draft: Draft) -> None:
    """Creates the workers of the next layout, and cancels the attempt if they are not ready by its deadline."""
    generation = draft.view.generation
    end_other_preparation(draft, ResizeReason.CLAIM)  # drops the replacements of a drain that is over
    if is_late(draft):
        cancel(draft, *why_not_ready(draft.view))
    to = target(draft)
    members = draft.view.ids_of(generation.members)
    most = max(to.workers, len(members), _held(draft.view) if draft.view.on_pack is OnPack.HOLD else 0)
    joining = draft.view.joining_ids
    if to == generation.layout:  # joiners are spares: a lost or drained one is not replaced
        joining = list(draft.view.joiners.staying.by_id)
    kept = [*members, *joining][:most]
    _count_spares(draft, kept)
    workforce.want(draft, kept, max(to.workers, len(kept)))
    if to == generation.layout:
        draft.update(resize=None)
        return
    enter(draft, to, reason_of(draft.view, generation.layout, to))


def _count_spares(draft: Draft, kept: Sequence[int]) -> None:
    """Counts spares of `onPack: Hold` that are not kept as released, because the user changed `onPack`.

    A spare was in a generation, unlike a worker that was created for one."""
    view = draft.view
    if view.leaves_surplus(view.generation.reason):
        spares = view.joiners.that(lambda worker: view.observed.beat(worker.uid).layout_generation > 0).ids
        draft.update(releasing_ids=sorted({*draft.status.releasing_ids, *spares.difference(kept)}))


def end_other_preparation(draft: Draft, reason: ResizeReason) -> None:
    """Ends the present preparation if it has another reason, so that the time of the new one counts from now."""
    prepared = draft.view.preparation
    if prepared is not None and prepared.reason is not reason:
        draft.update(resize=None)


def enter(draft: Draft, to: Layout, reason: ResizeReason) -> None:
    """Writes into the status which layout is being prepared, why, and by which deadline."""
    draft.enter(ResizePhase.PREPARE, to, reason)
    resize = draft.status.resize
    assert resize is not None
    deadline = _deadline(draft, resize)
    draft.update(resize=resize.model_copy(update={"deadline": deadline}))
    draft.clock.wake_at(deadline)


def cancel(draft: Draft, reason: Reason, why: str) -> None:
    """Cancels the present preparation, tells the user why, and sets when the next attempt begins.

    If replacements for lost workers are prepared and a durable checkpoint exists, the preparation stays in the status.
    All attempts to replace them share its deadline. After it the job starts again from the checkpoint.
    """
    if reason is Reason.UNSCHEDULABLE:
        share.note_no_nodes(draft)
    wait = back_off_start(draft, reason) if is_recovery(draft.view) else back_off(draft)
    if not (is_recovery(draft.view) and draft.status.checkpoint):
        draft.update(resize=None)
    message = f"cancelled: {why}; next attempt in {wait.total_seconds():.0f} s"
    draft.set_condition(ConditionType.RESIZING, False, reason, message)
    draft.tell(reason, f"Resize {message}", EventType.WARNING)


def reason_of(view: View, before: Layout, after: Layout) -> ResizeReason:
    """The reason of a generation that changes the layout from `before` to `after`."""
    if after == before:
        return ResizeReason.BALANCE
    if after.workers > before.workers:
        return ResizeReason.CLAIM
    if after.stages > before.stages:
        return ResizeReason.DEEPEN
    if after.workers == before.workers or view.on_pack is OnPack.HOLD:
        return ResizeReason.PACK
    if after.stages < before.stages or layouts.limited(view, before.workers) < before.workers:
        return ResizeReason.RELEASE
    return ResizeReason.SPEC


def _held(view: View) -> int:
    """How many workers `onPack: Hold` keeps, spares included: the starting size, or `maxWorkers` if that is less."""
    return min(view.status.initial_workers, view.spec.elastic_policy.ceiling)


def is_late(draft: Draft) -> bool:
    """Whether the present preparation is past its deadline; False without one."""
    prepared = draft.view.preparation
    return prepared is not None and draft.now >= _deadline(draft, prepared)


def is_recovery(view: View) -> bool:
    """Whether the present preparation replaces lost workers, because too few are left for any layout."""
    prepared = view.preparation
    return prepared is not None and prepared.reason is ResizeReason.FAILURE


def _deadline(draft: Draft, resize: Resize) -> datetime:
    """When to cancel this preparation. A claim has less time while some of its workers have no node.

    The time restarts with a new operator: it must first hear which workers are ready, and create missing ones.
    """
    policy = draft.spec.run_policy
    seconds = policy.resize_timeout_seconds
    claims = resize.reason is not ResizeReason.FAILURE and is_claim(draft, resize.to.layout)
    if claims and not draft.view.joiners_placed:
        seconds = min(seconds, policy.claim_timeout_seconds)
    return draft.view.counted_from(resize.start_time) + timedelta(seconds=seconds)
