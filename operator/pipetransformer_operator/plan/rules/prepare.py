"""The first phase of a resize: new workers warm up while the old layout trains; then a generation is published.

A preparation that is not done by its deadline is cancelled. An event says why, and the operator tries again later. The
wait before each attempt is twice as long as the last one.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from pipetransformer_contract.api.status import ConditionType, LayoutSize, Reason, Resize, ResizePhase
from pipetransformer_contract.choose import OnPack
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Member, ResizeReason
from pipetransformer_contract.words import counted
from pipetransformer_operator.plan import generations, layouts, leavers, workforce
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.members import names, parted
from pipetransformer_operator.plan.quota import quota, requests
from pipetransformer_operator.plan.sharing import share
from pipetransformer_operator.plan.sharing.claim import is_claim, target
from pipetransformer_operator.plan.types import EventType, Worker
from pipetransformer_operator.plan.view import View

#: Reasons why joiners are not ready. The condition shows the first of them that holds for any joiner.
_WORST = (Reason.UNSCHEDULABLE, Reason.IMAGE_PULL, Reason.NOT_READY)
FIRST_BACKOFF = timedelta(seconds=60)
LONGEST_BACKOFF = timedelta(hours=1)
#: The same for a job that does not train. It tries more often, because it has nothing else to do.
LONGEST_SLEEP = timedelta(minutes=5)
#: How often the time of a preparation may restart because the cluster removed a joiner.
RENEWALS = 4


def publish(draft: Draft) -> bool:
    """Publishes a better layout, or the same one with stages cut again, if the present workers can run it.

    It takes all joiners once all are ready; after the deadline those that are ready; otherwise none. Workers whose
    quota the queue reclaims leave. Returns whether it published a generation.
    """
    generation = draft.view.generation
    going, staying = parted(generation.members, draft.view.names_of(quota.lost_ids(draft.status, draft.observed)))
    joining = _joining_now(draft)
    number = len(staying) + len(joining)
    layout = layouts.best(draft.view, layouts.limited(draft.view, number)) or layouts.best(draft.view, number)
    unchanged = layout == generation.layout and not going and not layouts.pays_to_recut(draft.view)
    if layout is None or unchanged or snoozed(draft.view, layout):
        return False
    candidates = [*leavers.last(draft.view, staying, layout.workers), *joining]
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
        share.rest(draft)
    kept = draft.view.wanted_ids - set(draft.view.joining_ids)
    draft.keep_workers(kept, "the job releases workers, so no new ones join")


def prepare(draft: Draft) -> None:
    """Creates the workers of the next layout, and cancels the attempt if they are not ready by its deadline."""
    generation = draft.view.generation
    begin(draft, ResizeReason.CLAIM)  # drops the replacements of a drain that is over
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


def begin(draft: Draft, reason: ResizeReason) -> None:
    """Ends a preparation that has another reason, so that the time of the new preparation counts from now."""
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
    wait = sleep(draft, reason) if is_recovery(draft.view) else back_off(draft)
    if not (is_recovery(draft.view) and draft.status.checkpoint):
        draft.update(resize=None)
    message = f"cancelled: {why}; next attempt in {wait.total_seconds():.0f} s"
    draft.set_condition(ConditionType.RESIZING, False, reason, message)
    draft.tell(reason, f"Resize {message}", EventType.WARNING)


def renew(draft: Draft) -> None:
    """Restarts the time of a preparation, because the cluster removed joiners and new ones replace them.

    This happens at most `RENEWALS` times."""
    prepared = draft.view.preparation
    assert prepared is not None
    if may_renew(draft.view):
        draft.update(resize=prepared.model_copy(update={"renewals": prepared.renewals + 1}))
        draft.restart_preparation(draft.now)


def may_renew(view: View) -> bool:
    """Whether a job that trains prepares a resize, and its time may restart once more."""
    prepared = view.prepared_resize
    return prepared is not None and prepared.renewals < RENEWALS


def back_off(draft: Draft) -> timedelta:
    """Postpones the next attempt to resize. The wait doubles with each failed attempt in a row. Returns the wait."""
    return _back_off(draft, LONGEST_BACKOFF)


def sleep(draft: Draft, reason: Reason) -> timedelta:
    """Like `back_off`, for a job that does not train. Its longest wait is shorter. Returns the wait.

    If the attempt failed because no nodes were free (`reason`), `wake` ends the wait once accelerators are released."""
    wait = _back_off(draft, LONGEST_SLEEP)
    if reason in (Reason.UNSCHEDULABLE, Reason.GAVE_WAY):
        draft.update(waits_for_nodes_since=draft.now)
    return wait


def _back_off(draft: Draft, longest: timedelta) -> timedelta:
    failures = draft.status.resize_failures
    wait = min(longest, FIRST_BACKOFF * (1 << min(failures, 16)))
    draft.update(resize_failures=failures + 1, next_resize_time=draft.now + wait, waits_for_nodes_since=None)
    return wait


def wake(draft: Draft) -> None:
    """Ends the wait of a job that found no free nodes, if accelerators became free or other jobs give way to it."""
    since, observed = draft.status.waits_for_nodes_since, draft.observed
    if since is None or not draft.view.asleep:
        return
    if observed.preferred_since or (observed.released or since) > since:
        draft.update(next_resize_time=None, waits_for_nodes_since=None)


def try_at_once(draft: Draft) -> None:
    """Ends the wait after failed attempts, because the next attempt has another purpose."""
    draft.update(resize_failures=0, next_resize_time=None, waits_for_nodes_since=None)


def forget_failures(draft: Draft) -> None:
    """Forgets failed attempts, because one succeeded or the job's spec changed."""
    try_at_once(draft)
    draft.update(not_committed=None, slow_starts=0, unused_shares=0, sits_out_until=None)


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


def why_not_ready(view: View) -> tuple[Reason, str]:
    """Why joiners are not ready: the worst reason, and words about each joiner that is not ready."""
    if view.observed.refusal:
        return Reason.CREATION_REFUSED, view.observed.refusal
    if view.awaits_quota:
        return Reason.WAITING_FOR_QUOTA, queue_says(view)
    late = _why_late(view)
    worst = min((reason for reason, _ in late.values()), key=_WORST.index, default=Reason.NOT_READY)
    words = "; ".join([f"{name}: {why}" for name, (_, why) in late.items()][:8])
    if worst is Reason.UNSCHEDULABLE and view.observed.nodes.avoided:
        words += f"; avoiding nodes whose accelerators failed: {', '.join(sorted(view.observed.nodes.avoided)[:8])}"
    return worst, words or _why_none_is_awaited(view)


def _why_late(view: View) -> dict[str, tuple[Reason, str]]:
    """Reason and words for each joiner that is not ready, by its name."""
    ready = names(view.ready_joiners)
    if view.status.generation is not None:  # a joiner on a cordoned node replaces no worker
        ready -= view.joiners.draining.names
    late = {key: view.name_of(key) for key in view.joining_ids if view.name_of(key) not in ready}
    workers = view.joiners.by_id
    return {name: _why(workers.get(key)) for key, name in late.items()}


def _why_none_is_awaited(view: View) -> str:
    ceiling = view.spec.elastic_policy.ceiling
    if view.asleep:
        return f"the next attempt begins at {view.status.next_resize_time:%Y-%m-%dT%H:%M:%SZ}"
    if view.status.quota_requests:
        return "quota becomes free once the pods of earlier workers are gone"
    if len(view.status.worker_ids) >= ceiling:
        return f"spec.elasticPolicy.maxWorkers allows no more than {counted(ceiling, 'worker')}"
    return "no new worker is pending"


def _held(view: View) -> int:
    """How many workers `onPack: Hold` keeps, spares included: the starting size, or `maxWorkers` if that is less."""
    return min(view.status.initial_workers, view.spec.elastic_policy.ceiling)


def queue_says(view: View) -> str:
    """Which requests the queue has not granted yet, and the queue's messages about them, in words."""
    waiting = requests.waiting(view.status)
    asked = ", ".join(f"queue {one.queue} was asked for {counted(one.granted, 'worker')}" for one in waiting)
    return ": ".join(filter(None, [asked, quota.words(waiting, view.observed.queue)]))


def _why(worker: Worker | None) -> tuple[Reason, str]:
    if worker is None:
        return Reason.NOT_READY, "is not created yet"
    if not worker.scheduled:
        return Reason.UNSCHEDULABLE, worker.waiting or "has no node: no scheduler has reported on it yet"
    if worker.lacks_image:
        return Reason.IMAGE_PULL, worker.waiting
    return Reason.NOT_READY, worker.waiting or ("is on a cordoned node" if worker.draining else "runs and is not ready")


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


def snoozed(view: View, layout: Layout) -> bool:
    """Whether the workers recently failed to commit this layout, and the wait after that is not over."""
    return view.status.not_committed == LayoutSize.of(layout) and view.sleeps()
