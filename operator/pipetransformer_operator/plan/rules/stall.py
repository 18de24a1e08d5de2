"""Tells when a job makes no steps, and which member is the reason: one that is silent, or that its peers wait for.

Silence alone proves nothing, because members train on when the operator cannot hear them. It counts once something else
is wrong: peers lost their group, no step is made, the node is silent too, or a generation is not confirmed. It also
counts only if another member is heard. If all are silent, the network to the operator may be cut, and the cluster has
to say that pods or nodes are gone.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

from pipetransformer_contract.messages import Member
from pipetransformer_operator.plan.clock import latest
from pipetransformer_operator.plan.types import Worker
from pipetransformer_operator.plan.view import SILENCE, View

#: A member that peers name as lost and that is silent for this long is lost, although its pod looks alive. One that no
#: peer names has `SILENCE`.
NAMED_SILENCE = timedelta(seconds=10)
#: Without `stallTimeoutSeconds` a job may make no step for the longer of this time and this many median steps, or two
#: rounds of several steps, because progress is made in whole rounds.
DEFAULT_TIMEOUT = timedelta(minutes=30)
STEPS_AWAITED, ROUNDS_AWAITED = 20, 2
LONGEST_TIMEOUT = timedelta(days=7)
#: This many reports of progress must be overdue. Where many jobs share one operator, each reports rarely.
REPORTS_AWAITED = 3
#: This many generations in a row may break before it is told, because a network may be away for a moment.
BROKEN_ALLOWED = 1
#: If another member is alive, it says something within this time.
NEXT_WORD = timedelta(seconds=1)


def stall_timeout(view: View) -> timedelta:
    """How long the job may make no step: as its spec says, by default the longer of 30 minutes and 20 median
    steps, or 2 rounds."""
    seconds, report = view.spec.run_policy.stall_timeout_seconds, view.status.last_report
    if seconds is not None:
        return timedelta(seconds=seconds)
    if report is None or not report.samples_per_second:
        return DEFAULT_TIMEOUT
    # The leader divides the samples of a step by the median of the last steps' seconds.
    awaited = max(STEPS_AWAITED, ROUNDS_AWAITED * view.spec.pipeline.most_steps)
    waited = awaited * view.spec.training.global_batch_size / report.samples_per_second
    return max(DEFAULT_TIMEOUT, timedelta(seconds=min(waited, LONGEST_TIMEOUT.total_seconds())))


def stall_time(view: View) -> datetime | None:
    """When the job counts as stalled unless a step is made before; None if it does not train, or waits for workers that
    the next level's model needs. Before the first step the time counts from the publication of a generation."""
    report, generation = view.status.last_report, view.status.generation
    if generation is None or view.awaited_level is not None:
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
    if generation is None or generation.broken_before <= BROKEN_ALLOWED or not view.all_alive:
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
    suspect = _Suspect(view, member)
    if not suspect.in_question:
        return ""
    if suspect.is_on_deleted_node or suspect.outlived:
        return f"not heard for {(suspect.due - suspect.heard).total_seconds():.0f} s"
    if view.clock.reached(suspect.due) and view.hears_holders:
        view.clock.wake_at(view.now + NEXT_WORD)
    if suspect.hangs and view.hears_waiting:
        return "its peers wait for another generation, and it does not"
    return ""


@dataclass(frozen=True)
class _Suspect:
    """Questions about a member whose pod looks alive."""

    view: View
    member: Member

    @cached_property
    def worker(self) -> Worker | None:
        return self.view.worker(self.member)

    @property
    def named(self) -> bool:
        """Whether its peers name it as lost."""
        return self.member.name in self.view.observed.lost_peers

    @property
    def deserted(self) -> bool:
        """Whether peers wait for another generation, and it does not."""
        return self.view.broken_since is not None and not self.view.waits(self.member)

    @property
    def unseen(self) -> bool:
        """Whether its node is silent, too."""
        return self.worker is not None and self.worker.node_lost

    @property
    def in_question(self) -> bool:
        """Whether something other than silence speaks against it."""
        return self.named or self.deserted or self.unseen or is_stalled(self.view) or _is_awaited(self.view)

    @cached_property
    def heard(self) -> datetime:
        """When it last said anything, or the operator began to listen."""
        return _last_heard(self.view, self.member)

    @cached_property
    def due(self) -> datetime:
        """When its silence has lasted too long.

        A living member beats when its group breaks, whatever its pace. The peers' word alone is not enough: they name
        all others, and a member in a callback or a long round notices the break only afterwards.
        """
        broken = self.view.broken_since
        due = self.heard + self.view.patience(self.member.uid, NAMED_SILENCE if self.named else SILENCE)
        had_to_beat = self.named and self.unseen and _was_heard(self.view, self.member)
        return min(due, max(broken, self.heard) + SILENCE) if broken is not None and had_to_beat else due

    @property
    def is_on_deleted_node(self) -> bool:
        """Whether its node was deleted, and its silence has lasted too long."""
        return self.worker is not None and self.worker.node_gone and self.view.now >= self.due

    @property
    def outlived(self) -> bool:
        """Whether another member was heard since it was due, so that the operator is not deaf."""
        newest = self.view.newest_word
        return newest is not None and newest >= self.due

    @property
    def hangs(self) -> bool:
        """Whether its peers have waited too long for it to leave its generation."""
        broken, policy = self.view.broken_since, self.view.spec.run_policy
        if broken is None or not self.deserted:
            return False
        patience = timedelta(seconds=policy.stall_timeout_seconds or policy.resize_timeout_seconds)
        return self.view.clock.reached(broken + patience)
