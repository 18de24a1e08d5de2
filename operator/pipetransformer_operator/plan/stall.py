"""When a job makes no steps, and who is the reason: a member that is not heard, or that its peers wait for in vain.

Silence alone proves nothing: a job trains on while the operator is away, and so do members that the operator cannot
hear. It counts only once something else is wrong: peers lost their group, no step is made, its node is not heard
either, or a published generation is not confirmed.
"""

from datetime import datetime, timedelta

from pipetransformer_contract.messages import Member

from .draft import SILENCE, Draft

#: A member that its peers may have lost and that is not heard for so long is lost, although its pod looks alive; one
#: that nobody names has `SILENCE`.
NAMED_SILENCE = timedelta(seconds=10)
#: Reports of progress that must be overdue, where many jobs share one operator, and each reports rarely.
REPORTS_AWAITED = 3


def stall_time(draft: Draft) -> datetime | None:
    """When the job counts as stalled unless a step comes before; None while it is not to be judged."""
    seconds, report, plan = draft.spec.run_policy.stall_timeout_seconds, draft.status.last_report, draft.status.plan
    if seconds is None or report is None or plan is None:
        return None
    since = [time for time in (report.time, draft.observed.since, plan.published_time) if time is not None]
    return max(since) + max(timedelta(seconds=seconds), REPORTS_AWAITED * draft.observed.report_pace)


def is_stalled(draft: Draft) -> bool:
    """Whether the job makes no steps."""
    stall = stall_time(draft)
    return stall is not None and draft.now >= stall


def _is_awaited(draft: Draft, member: Member) -> bool:
    """Whether the published generation is not confirmed in time, although others of it are heard."""
    plan = draft.status.plan
    if plan is None or plan.confirmed or plan.published_time is None:
        return False
    if draft.now < plan.published_time + SILENCE:
        draft.wake_at(plan.published_time + SILENCE)
        return False
    return any(draft.hears(other.uid) for other in draft.state_holders if other != member)


def suspicion(draft: Draft, member: Member) -> str:
    """Why a member whose pod looks alive is lost; empty when it is not, or not yet."""
    observed, broken = draft.observed, draft.broken_since
    named = member.name in observed.lost_peers
    deserted = broken is not None and not draft.waits(member)
    worker = draft.worker(member)
    unseen = worker is not None and worker.node_lost
    if not (named or deserted or unseen or is_stalled(draft) or _is_awaited(draft, member)):
        return ""
    limit = draft.patience(member.uid, NAMED_SILENCE if named else SILENCE)
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
