"""Tells when a job makes no steps, and which member is the reason: one that is silent, or that its peers wait for.

Silence alone proves nothing, because members train on when the operator cannot hear them. It counts once something else
is wrong: peers lost their group, no step is made, the node is silent too, or a generation is not confirmed. It also
counts only if another member is heard. If all are silent, the network to the operator may be cut, and the cluster has
to say that pods or nodes are gone.
"""

from datetime import datetime, timedelta

from pipetransformer_contract.messages import Member
from pipetransformer_operator.plan.clock import latest
from pipetransformer_operator.plan.view import SILENCE, View

#: A member that peers name as lost and that is silent for this long is lost, although its pod looks alive. One that no
#: peer names has `SILENCE`.
NAMED_SILENCE = timedelta(seconds=10)
#: Without `stallTimeoutSeconds` a job may make no step for the longer of this time and this many median steps.
DEFAULT_TIMEOUT = timedelta(minutes=30)
STEPS_AWAITED = 20
LONGEST_TIMEOUT = timedelta(days=7)
#: This many reports of progress must be overdue. Where many jobs share one operator, each reports rarely.
REPORTS_AWAITED = 3
#: This many generations in a row may break before it is told, because a network may be away for a moment.
BROKEN_ALLOWED = 1
#: If another member is alive, it says something within this time.
NEXT_WORD = timedelta(seconds=1)


def stall_timeout(view: View) -> timedelta:
    """How long the job may make no step: as its spec says, by default the larger of 30 minutes and 20 median steps."""
    seconds, report = view.spec.run_policy.stall_timeout_seconds, view.status.last_report
    if seconds is not None:
        return timedelta(seconds=seconds)
    if report is None or not report.samples_per_second:
        return DEFAULT_TIMEOUT
    # The leader divides the samples of a step by the median of the last steps' seconds.
    steps = STEPS_AWAITED * view.spec.training.global_batch_size / report.samples_per_second
    return max(DEFAULT_TIMEOUT, timedelta(seconds=min(steps, LONGEST_TIMEOUT.total_seconds())))


def stall_time(view: View) -> datetime | None:
    """When the job counts as stalled unless a step is made before; None if it does not train. Before the first step the
    time counts from the publication of a generation."""
    report, generation = view.status.last_report, view.status.generation
    if generation is None:
        return None
    last = latest((report.time if report else None, view.observed.since, generation.published_time))
    patience = max(stall_timeout(view), REPORTS_AWAITED * view.observed.report_pace)
    return None if last is None else last + patience


def is_stalled(view: View) -> bool:
    """Whether the job makes no steps."""
    stall = stall_time(view)
    return stall is not None and view.now >= stall


def why_broken(view: View) -> str:
    """Why a job whose members all live makes no steps; empty unless generation after generation breaks."""
    generation, report = view.status.generation, view.status.last_report
    if generation is None or generation.broken_before <= BROKEN_ALLOWED or not all(map(view.alive, generation.members)):
        return ""
    return (
        f"no step was made since step {report.step if report else 0}: {generation.broken_before} generations in a"
        " row broke, and all members live; either they do not reach each other or each fails alike, their logs say"
        f" which; what lasts for minutes counts against spec.runPolicy.backoffLimit{last_words(view)}"
    )


def last_words(view: View) -> str:
    """Why a generation broke, in the words of its leader or of the first member that knows; to be appended."""
    generation = view.status.generation
    assert generation is not None
    for member in sorted(generation.members, key=lambda member: member.name != generation.leader):
        if because := view.observed.beat(member.uid).because:
            return f"; {member.name}: {because}"
    return ""


def _is_awaited(view: View) -> bool:
    """Whether the published generation is not confirmed in time."""
    generation = view.status.generation
    if generation is None or generation.confirmed or generation.published_time is None:
        return False
    return view.clock.reached(generation.published_time + SILENCE)


def hears_nobody(view: View) -> bool:
    """Whether all holders of state are silent, each for longer than it should be."""
    holders = view.state_holders
    due = [_last_heard(view, member) + view.patience(member.uid) for member in holders]
    return bool(due) and view.now >= max(due)


def _last_heard(view: View, member: Member) -> datetime:
    """When the member last said anything, or the operator began to listen."""
    return latest((view.observed.heard.get(member.uid), view.observed.since)) or view.now


def _was_heard(view: View, member: Member) -> bool:
    """Whether this operator heard the member. Its words to an earlier operator are unknown, and its next heartbeat
    may come a whole pace later."""
    heard = view.observed.heard.get(member.uid)
    return heard is not None and heard >= view.counted_from(heard)


def suspicion(view: View, member: Member) -> str:
    """Why a member whose pod looks alive is lost; empty when it is not, or not yet."""
    broken = view.broken_since
    named = member.name in view.observed.lost_peers
    deserted = broken is not None and not view.waits(member)
    worker = view.worker(member)
    unseen = worker is not None and worker.node_lost
    if not (named or deserted or unseen or is_stalled(view) or _is_awaited(view)):
        return ""
    heard = _last_heard(view, member)
    due = heard + view.patience(member.uid, NAMED_SILENCE if named else SILENCE)
    if named and unseen and broken is not None and _was_heard(view, member):
        # A living member beats when its group breaks, whatever its pace. The peers' word alone is not enough: they name
        # all others, and a member in a callback or a long round notices the break only afterwards.
        due = min(due, max(broken, heard) + SILENCE)
    gone = worker is not None and worker.node_gone and view.now >= due
    newest = view.newest_word
    if gone or (newest is not None and newest >= due):  # another was heard since, so the operator is not deaf
        return f"not heard for {(due - heard).total_seconds():.0f} s"
    if view.clock.reached(due) and view.hears_holders:
        view.clock.wake_at(view.now + NEXT_WORD)
    if broken is None or not deserted:
        return ""
    policy = view.spec.run_policy
    hangs = broken + timedelta(seconds=policy.stall_timeout_seconds or policy.resize_timeout_seconds)
    if view.clock.reached(hangs) and view.hears_waiting:
        return "its peers wait for another generation, and it does not"
    return ""
