"""Ends a job: because its leader reports the end, a worker refuses the spec, or its deadline has passed."""

from datetime import timedelta

from pipetransformer_contract.api.job import CleanPodPolicy
from pipetransformer_contract.api.status import ConditionType, Reason
from pipetransformer_contract.messages import Outcome, Report
from pipetransformer_operator.plan.deletions import ENDED
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.losses import (
    EXIT_USER_ERROR,
    out_of_memory_at,
    report_of,
    says_succeeded,
    termination,
)
from pipetransformer_operator.plan.types import NO_DISRUPTION_BUDGET, Worker, WorkerPhase
from pipetransformer_operator.plan.view import View

#: Once the leader reports the job's end, the workers end by themselves, so that their logs stay. The operator deletes
#: those that still run after this time.
FINISH_GRACE = timedelta(seconds=30)


def judge(draft: Draft) -> None:
    """Sets Complete or Failed when the job has ended."""
    status = draft.status
    if status.finished:
        return
    report = status.last_report
    if report and report.outcome is not None:
        _end_as_reported(draft, report)
    elif refusal := _refusal(draft.view):
        reason, message = termination(refusal)
        if not report_of(refusal):  # the code is from the user's program, or from Python without one
            message = ": ".join(filter(None, [f"{refusal.name} exited with code {EXIT_USER_ERROR}", message]))
        draft.fail(reason or Reason.USER_ERROR, message)
    elif _ended_in_success(draft.view):
        _complete(draft, "")
    else:
        _check_deadline(draft)


def _end_as_reported(draft: Draft, report: Report) -> None:
    if report.outcome is Outcome.SUCCEEDED:
        _complete(draft, report.message)
    else:
        draft.fail(report.reason or Reason.TRAINING_FAILED, report.message)


def clean(draft: Draft) -> None:
    """Deletes workers of a job that has ended as `cleanPodPolicy` says, and the job after `ttlSecondsAfterFinished`."""
    status, policy = draft.status, draft.spec.run_policy
    draft.update(resize=None, next_resize_time=None, silences=[])
    draft.keep_workers(draft.status.worker_ids if status.stop else [], ENDED)
    ended = status.completion_time
    assert ended is not None
    had_time = draft.clock.reached(ended + FINISH_GRACE)
    draft.spared_ids = draft.view.workers.that(lambda one: not _deletes(draft.view, one, had_time=had_time)).ids
    holding = draft.view.workers.holding
    # Evictions may remove workers that stay. If none does, the budget is still written for a while: a write may fail.
    if holding or not had_time:
        draft.disruption_budget = NO_DISRUPTION_BUDGET
    if not holding:
        draft.update(quota_requests=[])
    if policy.ttl_seconds_after_finished is not None:
        expiry = ended + timedelta(seconds=policy.ttl_seconds_after_finished)
        draft.expired = draft.clock.reached(expiry) and draft.observed.kept_by is None and status.stop is None


def _deletes(view: View, worker: Worker, *, had_time: bool) -> bool:
    """Whether to delete this pod of a job that has ended. `had_time`: the pod had `FINISH_GRACE` to end by itself."""
    policy = view.spec.run_policy.clean_pod_policy
    if policy is CleanPodPolicy.NONE and view.observed.kept_by is None:
        # A pod without a node has no log, and would take an accelerator later. While the job is being deleted all its
        # pods go: Kubernetes deletes only those that have ended.
        return worker.phase is WorkerPhase.PENDING and not worker.scheduled
    if worker.alive:
        return had_time or not _ends_by_itself(view)
    return policy is CleanPodPolicy.ALL or (worker.lingers and had_time)


def _ends_by_itself(view: View) -> bool:
    """Whether the workers end without being deleted, because they know that the job has ended."""
    report = view.status.last_report
    return view.status.is_true(ConditionType.COMPLETE) or (report is not None and report.outcome is not None)


def _refusal(view: View) -> Worker | None:
    """A worker that refuses the spec, or whose memory is too small even for the longest pipelines; None without one.

    While a job trains, only members count. If a joiner refuses, only the resize fails, because the joiner's node may
    lack something that the members' nodes have."""
    judged = {member.uid for member in view.members} or {worker.uid for worker in view.wanted}
    refusals = (one for one in view.wanted if one.uid in judged and _refuses(one, view.spec.pipeline.stages))
    return next(refusals, None)


def _refuses(worker: Worker, longest: int) -> bool:
    return worker.exit_code == EXIT_USER_ERROR or out_of_memory_at(worker) >= longest


def _complete(draft: Draft, message: str) -> None:
    draft.set_condition(ConditionType.COMPLETE, True, Reason.TRAINING_SUCCEEDED, message)
    draft.tell(Reason.TRAINING_SUCCEEDED, message or "The model is trained and written")
    draft.update(completion_time=draft.now)


def _ended_in_success(view: View) -> bool:
    """Whether the job succeeded without a report of its leader, because the leader died first.

    Then it is enough that any member exited as successful: members do so only once the model is durable. While the
    leader is alive, the job waits for its report.
    """
    generation = view.status.generation
    if generation is None:
        return False
    leader = generation.leader_member()
    return not view.alive(leader) and any(says_succeeded(view.worker(member)) for member in generation.members)


def _check_deadline(draft: Draft) -> None:
    seconds, start = draft.spec.run_policy.active_deadline_seconds, draft.status.start_time
    if seconds is None or start is None or draft.view.stopped or draft.status.is_true(ConditionType.SUSPENDED):
        return
    if draft.clock.reached(start + timedelta(seconds=seconds)):
        draft.fail(
            Reason.DEADLINE_EXCEEDED,
            f"spec.runPolicy.activeDeadlineSeconds: the job did not complete within {seconds} s",
        )
