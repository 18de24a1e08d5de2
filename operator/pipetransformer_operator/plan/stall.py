"""When a job makes no steps, and who is the reason: a member that is not heard, or that its peers wait for in vain.

Silence alone proves nothing: a job trains on while the operator is away, and so do members that the operator cannot
hear. It counts only once something else is wrong.
"""

from datetime import datetime, timedelta

from pipetransformer_contract.messages import Member

from .draft import Draft
from .types import SHORTEST_PACE

#: A member that its peers may have lost and that is not heard for so long is lost, although its pod looks alive.
NAMED_SILENCE = timedelta(seconds=10)
#: The same for a member that nobody names while its peers wait, or while no step is made. Both hold for workers that
#: beat at the shortest pace; the others have as much more time.
SILENCE = timedelta(seconds=20)


def stall_time(draft: Draft) -> datetime | None:
    """When the job counts as stalled unless a step comes before; None while it is not to be judged."""
    seconds, report, plan = draft.spec.run_policy.stall_timeout_seconds, draft.status.last_report, draft.status.plan
    if seconds is None or report is None or plan is None:
        return None
    since = [time for time in (report.time, draft.observed.since, plan.published_time) if time is not None]
    return max(since) + timedelta(seconds=seconds)


def is_stalled(draft: Draft) -> bool:
    """Whether the job makes no steps."""
    stall = stall_time(draft)
    return stall is not None and draft.now >= stall


def patience(draft: Draft, member: Member, silence: timedelta) -> timedelta:
    """How long the member may be silent, where `silence` is too long for one that beats at the shortest pace."""
    beat = draft.observed.beats.get(member.uid)
    return silence + (beat.pace if beat else draft.observed.pace) - SHORTEST_PACE


def suspicion(draft: Draft, member: Member) -> str:
    """Why a member whose pod looks alive is lost; empty when it is not, or not yet."""
    observed, broken = draft.observed, draft.broken_since
    named = member.name in observed.lost_peers
    deserted = broken is not None and not draft.waits(member)
    if not (named or deserted or is_stalled(draft)):
        return ""
    limit = patience(draft, member, NAMED_SILENCE if named else SILENCE)
    heard = max((time for time in (observed.heard.get(member.uid), observed.since) if time), default=draft.now)
    if draft.now >= heard + limit:
        return f"not heard for {limit.total_seconds():.0f} s"
    draft.wake_at(heard + limit)
    if broken is None or not deserted:
        return ""
    policy = draft.spec.run_policy
    hangs = broken + timedelta(seconds=policy.stall_timeout_seconds or policy.resize_timeout_seconds)
    if draft.now >= hangs:
        return "its peers wait for another generation, and it does not"
    draft.wake_at(hangs)
    return ""
