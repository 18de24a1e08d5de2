"""Lost workers: the rest trains on in the best layout that it carries, and replacements are grown back later.

A lost member is found by comparing, at each turn, the published members with the pods. It is counted once, when its
worker's id is taken from the wanted ones.
"""

from datetime import timedelta

from pipetransformer_contract.messages import Member, ResizeReason

from ..api.status import Reason, Resize
from .draft import Draft
from .finish import says_succeeded
from .resize import cancel
from .types import EventType, Worker, WorkerPhase

#: A member that its peers call lost, and that was not heard for so long, is lost although its pod looks alive.
SILENCE = timedelta(seconds=15)


def recover(draft: Draft) -> None:
    """Drops lost workers, counts the incident, and publishes a generation of the survivors if members were lost."""
    plan = draft.status.plan
    holders = [] if plan is None else plan.members if plan.confirmed else [*plan.members, *plan.leavers]
    lost = [member for member in holders if _lost(draft, member)]
    _drop(draft, lost)
    if draft.status.finished or not lost:
        return
    survivors = draft.state_holders
    if not survivors:
        draft.update(plan=None, resize=None)
        return
    candidates = [*survivors, *draft.ready_joiners]
    if layout := draft.choose(len(candidates)):
        draft.publish(layout, candidates, ResizeReason.FAILURE)
    else:
        _wait_for_replacements(draft, survivors)


def _lost(draft: Draft, member: Member) -> bool:
    worker = draft.worker(member)
    if says_succeeded(worker) or _left(draft, member, worker):
        return False
    return not draft.alive(member) or _unreachable(draft, member)


def _left(draft: Draft, member: Member, worker: Worker | None) -> bool:
    """Whether a leaver did as told: it may be seen to end before the leader's confirmation arrives."""
    plan = draft.status.plan
    return plan is not None and member in plan.leavers and worker is not None and worker.exit_code == 0


def _unreachable(draft: Draft, member: Member) -> bool:
    observed = draft.observed
    if member.name not in observed.lost_peers:
        return False
    heard = max((time for time in (observed.heartbeats.get(member.uid), observed.since) if time), default=draft.now)
    if draft.now < heard + SILENCE:
        draft.wake_at(heard + SILENCE)
        return False
    return True


def _drop(draft: Draft, lost: list[Member]) -> None:
    """Takes lost members and failed joiners from the wanted workers: one incident, however many fell at once."""
    names = {member.name for member in lost}
    wanted = {worker_id: draft.name_of(worker_id) for worker_id in draft.status.worker_ids}
    newly_lost = sorted(key for key, name in wanted.items() if name in names)
    ended = [worker for worker in draft.wanted if _ended_joiner(draft, worker)]
    preparing = draft.status.resize is not None and draft.status.resize.reason is not ResizeReason.FAILURE
    gone = {*newly_lost, *(worker.id for worker in ended)}
    if not gone:
        return
    draft.keep_workers(key for key in wanted if key not in gone)
    failed = [worker for worker in ended if worker.phase is WorkerPhase.FAILED and not worker.terminating]
    if not newly_lost and preparing and failed:
        cancel(draft, f"{_describe(draft, failed[0].id)} failed before it was ready")
    if not newly_lost and (preparing or not failed):
        return
    failures = draft.status.failures + 1
    draft.update(failures=failures)
    described = ", ".join(_describe(draft, key) for key in sorted(gone))
    draft.tell(Reason.WORKER_LOST, f"Lost {described}", EventType.WARNING)
    limit = draft.spec.run_policy.backoff_limit
    if failures > limit:
        draft.fail(
            Reason.BACKOFF_LIMIT_EXCEEDED,
            f"spec.runPolicy.backoffLimit: {failures} failures, {limit} allowed; {described}",
        )


def _ended_joiner(draft: Draft, worker: Worker) -> bool:
    plan = draft.status.plan
    taken = {member.name for member in (*plan.members, *plan.leavers)} if plan else set()
    return not worker.alive and worker.name not in taken


def _describe(draft: Draft, worker_id: int) -> str:
    name = draft.name_of(worker_id)
    worker = next((worker for worker in draft.observed.workers if worker.id == worker_id), None)
    if worker is None:
        return f"{name} (its pod is gone)"
    if worker.exit_code is not None:
        return f"{name} (exit code {worker.exit_code}{': ' + worker.message[-200:] if worker.message else ''})"
    return f"{name} ({'deleted' if worker.terminating else worker.phase.value})"


def _wait_for_replacements(draft: Draft, survivors: list[Member]) -> None:
    """Too few are left for any layout: they hold their state until the present layout can be manned again."""
    plan = draft.status.plan
    assert plan is not None
    layout = draft.choose(draft.spec.elastic_policy.max_workers) or plan.layout
    names = {member.name for member in survivors}
    ids = [key for key in draft.status.worker_ids if draft.name_of(key) in names]
    others = [key for key in draft.status.worker_ids if key not in ids]
    draft.keep_workers(draft.top_up([*ids, *others], plan.layout.workers))
    if draft.status.resize is None or draft.status.resize.reason is not ResizeReason.FAILURE:
        timeout = timedelta(seconds=draft.spec.run_policy.resize_timeout_seconds)
        draft.update(
            resize=Resize(
                stages=layout.stages,
                pipelines=layout.pipelines,
                reason=ResizeReason.FAILURE,
                start_time=draft.now,
                deadline=draft.now + timeout,
            )
        )
