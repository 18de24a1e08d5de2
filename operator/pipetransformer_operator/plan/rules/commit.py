"""The second phase of a resize: a generation is published, and the workers' vote commits it or not.

A worker's heartbeat says which generation it has committed. It also says whether the worker waits for a newer one,
because its group broke or never formed. If all members are alive then, the operator publishes another generation. It
has the same layout if a worker has committed the broken generation, otherwise the layout before it. Several generations
in a row that break without a step are a failure of the job. The members cannot reach each other, or each fails in the
same way. If one member does not wait for the next generation, the others wait until `stall` declares it lost.
"""

from datetime import datetime, timedelta

from pipetransformer_contract.api.status import LayoutSize, Reason
from pipetransformer_contract.messages import Generation, Member, ResizeReason
from pipetransformer_operator.plan import generations, layouts
from pipetransformer_operator.plan.budget import count
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.types import EventType
from pipetransformer_operator.plan.view import View

from .attempts import back_off
from .stall import BROKEN_IN_A_ROW, why_group_broke

#: Longest wait before the next generation while generations break without a step. It is 2 s at first, and doubles.
LONGEST_PAUSE_SECONDS = 300
#: The operator publishes the next generation even if a member is still in the group of an older one. After this many
#: broken generations in a row it first waits for that member, because the member is slow or hangs.
MISSED_IN_A_ROW = 3


def advance(draft: Draft) -> bool:
    """Publishes another generation if the present one broke, or undoes it if it is late.

    Returns whether this phase is not over, because the newest generation is not confirmed yet."""
    generation = draft.view.generation
    since = draft.view.broken_since
    if since is not None:
        _replace_broken(draft, generation, since)
    elif not generation.confirmed:
        _check_deadline(draft, generation)
    return draft.status.finished or draft.status.generation is not generation or not generation.confirmed


def _replace_broken(draft: Draft, generation: Generation, since: datetime) -> None:
    if not all(_is_outside(draft.view, generation, member, since) for member in draft.view.state_holders):
        return  # the other members notice the break soon, or are lost
    due, broken = since, generation.broken_before + 1
    if broken > 1 or not generation.confirmed:
        due = max(due, draft.view.published_time + timedelta(seconds=min(LONGEST_PAUSE_SECONDS, 2**broken)))
    if not draft.clock.reached(due):
        return
    if (
        generation.confirmed
        or generation.reason in generations.NOT_UNDONE
        or _committed_by_some(draft.view, generation)
    ):
        words = why_group_broke(draft.view)
        message = f"Generation {generation.layout_generation} broke: its workers lost their connections{words}"
        draft.tell(Reason.GROUP_BROKEN, message, EventType.WARNING)
        if broken >= BROKEN_IN_A_ROW:
            count(draft, f"{broken} generations in a row broke although all workers are alive{words}")
        if not draft.status.finished:
            generations.publish(
                draft, generation.layout, [*generation.members, *generation.leavers], ResizeReason.FAILURE, broken
            )
    else:
        _go_back(draft, generation, "its workers could not connect to each other or move their state")


def _is_outside(view: View, generation: Generation, member: Member, since: datetime) -> bool:
    """Whether the member is ready for another generation: it waits for one, or is still in an older generation's group.

    `since` is when the published generation broke. A heartbeat before that proves nothing."""
    if view.waits(member):
        return True
    if generation.broken_before >= MISSED_IN_A_ROW:
        return False
    beat = view.observed.beat(member.uid)
    return beat.time > since and beat.layout_generation < generation.layout_generation


def _check_deadline(draft: Draft, generation: Generation) -> None:
    if generation.reason in generations.NOT_UNDONE:
        return
    begin = draft.view.counted_from(draft.view.published_time)
    deadline = begin + timedelta(seconds=draft.spec.run_policy.resize_timeout_seconds)
    if draft.clock.reached(deadline) and not _committed_by_some(draft.view, generation):
        _go_back(draft, generation, "its workers did not finish the resize within spec.runPolicy.resizeTimeoutSeconds")


def _committed_by_some(view: View, generation: Generation) -> bool:
    living = view.living([*generation.members, *generation.leavers])
    return any(view.observed.beat(one.uid).layout_generation >= generation.layout_generation for one in living)


def _go_back(draft: Draft, generation: Generation, why: str) -> None:
    """Publishes a generation with the layout before this one. Workers that joined for this one leave again.

    `why` says why, for the event. Nothing happens while a worker of the old layout is silent, because the operator may
    be the one that is cut off.
    """
    resize = draft.status.resize
    assert resize is not None
    assert resize.from_ is not None
    old = resize.from_.layout
    stayed = len(generation.members) - max(0, generation.layout.workers - old.workers)
    holders = draft.view.living([*generation.members[:stayed], *generation.leavers])
    if not all(_is_heard(draft.view, member) for member in holders):
        return
    joined = draft.view.living(generation.members[stayed:])
    candidates = [*holders, *(member for member in joined if _is_heard(draft.view, member))]
    layout = old if old.workers <= len(candidates) else layouts.best(draft.view, len(candidates))
    if layout is None:
        return
    wait = back_off(draft)
    draft.update(not_committed=LayoutSize.of(generation.layout))
    draft.tell(
        Reason.NOT_COMMITTED,
        f"Generation {generation.layout_generation} is undone: {why};"
        f" next attempt in {wait.total_seconds():.0f} s{why_group_broke(draft.view)}",
        EventType.WARNING,
    )
    generations.publish(draft, layout, candidates, ResizeReason.UNDO)


def _is_heard(view: View, member: Member) -> bool:
    return view.observed.beat(member.uid).time > view.now - view.patience(member.uid)
