"""Finds jobs that make no steps, and the member that holds them up: it is silent, or its peers wait for it.

A silent member may still train without reaching the operator. So silence counts only once something else is wrong.
Peers lost their group, no step is made, the node is silent too, or a generation is not confirmed. It also counts only
if the operator hears another member. If all are silent, the operator may be cut off from them. Then a member counts as
lost only if the cluster says that its pod or node is gone.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

from pipetransformer_contract.messages import Member
from pipetransformer_operator.plan.types import NEVER, Worker
from pipetransformer_operator.plan.view import NAMED_SILENCE, SILENCE, View

#: Default of `stallTimeoutSeconds`: the longest of this time, `STEPS_AWAITED` median steps, and `ROUNDS_AWAITED` rounds
#: of several steps, because steps are committed in whole rounds.
DEFAULT_TIMEOUT = timedelta(minutes=30)
STEPS_AWAITED, ROUNDS_AWAITED = 20, 2
LONGEST_TIMEOUT = timedelta(days=7)
#: A job stalls only if this many reports of progress are overdue. If many jobs share an operator, each reports rarely.
REPORTS_AWAITED = 3
#: This many generations in a row may break before a condition says so, because a network may fail for a moment.
BROKEN_ALLOWED = 1
#: This many broken generations in a row (about two minutes) are a failure of the job, and so is each one after them.
BROKEN_IN_A_ROW = 6
#: Within this time at least one living member of a job sends something.
NEXT_WORD = timedelta(seconds=1)


def stall_timeout(view: View) -> timedelta:
    """How long the job may make no step: what its spec says, by default the longest of 30 minutes, 20 median steps and
    2 rounds."""
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
    """When the job counts as stalled unless it makes a step before; None if it does not train.

    Also None while it waits for workers that the next level's model needs. Before the first step the time counts from
    the publication of a generation."""
    report, generation = view.status.last_report, view.status.generation
    if generation is None or view.awaited_level is not None:
        return None
    begin = view.counted_from(view.published_time)
    last = max(begin, report.time) if report else begin
    return last + max(stall_timeout(view), REPORTS_AWAITED * view.observed.report_pace)


def is_stalled(view: View) -> bool:
    """Whether the job makes no steps."""
    stall = stall_time(view)
    return stall is not None and view.now >= stall


def why_no_group_lasts(view: View) -> str:
    """Why a job makes no steps although all members are alive; empty unless several generations in a row broke."""
    generation, report = view.status.generation, view.status.last_report
    if generation is None or generation.broken_before <= BROKEN_ALLOWED or not view.all_alive:
        return ""
    return (
        f"no step was made since step {report.step if report else 0}. {generation.broken_before} generations in a row"
        " broke although all workers are alive. Either they cannot reach each other, or all fail in the same way:"
        f" see their logs. From {BROKEN_IN_A_ROW} on, each counts against spec.runPolicy.backoffLimit"
        f"{why_group_broke(view)}"
    )


def why_group_broke(view: View) -> str:
    """Why the published generation broke, in the words of its leader, otherwise of the first member that says so.

    The text is for the end of a message and begins with `; `. It is empty if no member says why."""
    generation = view.generation
    for member in sorted(generation.members, key=lambda member: member.name != generation.leader):
        if words := view.observed.beat(member.uid).why_broken:
            return f"; {member.name}: {words}"
    return ""


def _is_awaited(view: View) -> bool:
    """Whether the published generation should have been confirmed by now, but is not."""
    generation = view.generation
    return not generation.confirmed and view.clock.reached(view.published_time + SILENCE)


def all_silent(view: View) -> bool:
    """Whether all workers with state have been silent for too long; False without such workers."""
    holders = view.state_holders
    due = [_last_heard(view, member) + view.patience(member.uid) for member in holders]
    return bool(due) and view.now >= max(due)


def _last_heard(view: View, member: Member) -> datetime:
    """When the member last sent anything, or when this operator began to listen, whichever is later."""
    return max(view.observed.heard.get(member.uid, NEVER), view.observed.listening_since)


def suspicion(view: View, member: Member) -> str:
    """Why a member is lost although its pod looks alive; empty if it is not lost, or not yet."""
    suspect = _Suspect(view, member)
    if not suspect.in_question:
        return ""
    if suspect.silent_on_deleted_node or suspect.silent_alone:
        return f"not heard for {(suspect.due - suspect.heard).total_seconds():.0f} s"
    if view.clock.reached(suspect.due) and view.hears_holders:
        view.clock.wake_at(view.now + NEXT_WORD)
    if suspect.hangs and view.hears_waiting:
        return "the other workers wait for the next generation, but it does not"
    return ""


@dataclass(frozen=True)
class _Suspect:
    """Questions about a member whose pod looks alive."""

    view: View
    member: Member

    @cached_property
    def worker(self) -> Worker:
        worker = self.view.worker(self.member)
        assert worker is not None
        return worker

    @property
    def named_by_peers(self) -> bool:
        """Whether peers reported that they lost their connection to the member."""
        return self.member.name in self.view.observed.lost_peers

    @property
    def holds_up_peers(self) -> bool:
        """Whether peers wait for the next generation, but the member does not."""
        return self.view.broken_since is not None and not self.view.waits(self.member)

    @property
    def in_question(self) -> bool:
        """Whether anything except silence suggests that the member is lost."""
        from_others = self.named_by_peers or self.holds_up_peers or self.worker.node_lost
        return from_others or is_stalled(self.view) or _is_awaited(self.view)

    @cached_property
    def heard(self) -> datetime:
        """When the member last sent anything, or when this operator began to listen, whichever is later."""
        return _last_heard(self.view, self.member)

    @cached_property
    def due(self) -> datetime:
        """When the member's silence has lasted too long.

        A living member sends a heartbeat when its group breaks, whatever its pace. So this time is earlier if peers
        name the member and its node is silent too. The peers' report alone is not enough: after a break they name all
        other members. A member in a callback or a long round notices the break only later.
        """
        broken = self.view.broken_since
        due = self.heard + self.view.patience(self.member.uid, NAMED_SILENCE if self.named_by_peers else SILENCE)
        was_heard = self.view.observed.heard.get(self.member.uid, NEVER) >= self.view.observed.listening_since
        had_to_beat = self.named_by_peers and self.worker.node_lost and was_heard
        return min(due, max(broken, self.heard) + SILENCE) if broken is not None and had_to_beat else due

    @property
    def silent_on_deleted_node(self) -> bool:
        """Whether the member's node was deleted, and its silence has lasted too long."""
        return self.worker.node_gone and self.view.now >= self.due

    @property
    def silent_alone(self) -> bool:
        """Whether the member's silence lasted too long while the operator heard another member."""
        return self.view.newest_word >= self.due

    @property
    def hangs(self) -> bool:
        """Whether peers have waited too long for the member to leave the broken generation."""
        broken, policy = self.view.broken_since, self.view.spec.run_policy
        if not self.holds_up_peers:
            return False
        assert broken is not None
        patience = timedelta(seconds=policy.stall_timeout_seconds or policy.resize_timeout_seconds)
        return self.view.clock.reached(broken + patience)
