"""Ends a job: by its leader's word, by a worker that refuses the spec, or by its deadline."""

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
from pipetransformer_operator.plan.types import Worker
from pipetransformer_operator.plan.view import View

#: When a leader reports the end, the workers end by themselves and their logs stay. Those that still run after this
#: time are deleted.
FINISH_GRACE = timedelta(seconds=30)


def judge(draft: Draft) -> None:
    """Sets Complete or Failed when the job has ended."""
    status = draft.status
    if status.finished:
        return
    report = status.last_report
    if report and report.outcome is not None:
        _believe(draft, report)
    elif refusal := _refusal(draft.view):
        reason, message = termination(refusal)
        if not report_of(refusal):  # the exit code is the program's own, or Python's if there is no program
            message = ": ".join(filter(None, [f"{refusal.name} exited with code {EXIT_USER_ERROR}", message]))
        draft.fail(reason or Reason.USER_ERROR, message)
    elif _ended_in_success(draft.view):
        _complete(draft, "")
    else:
        _check_deadline(draft)


def _believe(draft: Draft, report: Report) -> None:
    if report.outcome is Outcome.SUCCEEDED:
        _complete(draft, report.message)
    else:
        draft.fail(report.reason or Reason.TRAINING_FAILED, report.message)


def clean(draft: Draft) -> None:
    """Deletes workers of a job that has ended as `cleanPodPolicy` says, and the job after its time to live."""
    status, policy = draft.status, draft.spec.run_policy
    draft.update(resize=None, next_resize_time=None)
    draft.keep_workers(draft.status.worker_ids if status.stop else [], ENDED)
    ended = status.completion_time or draft.now
    had_time = draft.clock.reached(ended + FINISH_GRACE)
    draft.spared_ids = draft.view.workers.that(lambda one: not _goes(draft.view, one, had_time=had_time)).ids
    if draft.view.workers.holding:
        draft.min_available = 0  # workers that are kept do not keep a node from being emptied
    else:
        draft.update(quota_requests=[])
    if policy.ttl_seconds_after_finished is not None:
        expiry = ended + timedelta(seconds=policy.ttl_seconds_after_finished)
        draft.expired = draft.clock.reached(expiry) and draft.observed.kept_by is None and status.stop is None


def _goes(view: View, worker: Worker, *, had_time: bool) -> bool:
    """Whether the pod of a job that has ended is deleted; `had_time` if it could have ended by itself."""
    policy = view.spec.run_policy.clean_pod_policy
    if view.observed.kept_by is not None and policy is CleanPodPolicy.NONE:
        policy = CleanPodPolicy.RUNNING  # pods that hold nothing go with the job
    if policy is CleanPodPolicy.NONE:
        return False
    if worker.alive:
        return had_time or not _ends_by_itself(view)
    return policy is CleanPodPolicy.ALL or (worker.lingers and had_time)


def _ends_by_itself(view: View) -> bool:
    """Whether the workers end without being deleted, because their leader knows that the job has ended."""
    report = view.status.last_report
    return view.status.is_true(ConditionType.COMPLETE) or (report is not None and report.outcome is not None)


def _refusal(view: View) -> Worker | None:
    """A worker that cannot do what its spec says, or has too little memory in the longest pipelines. While a job trains
    only members count: the node of a joiner may lack what theirs have, and then the change fails."""
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
    """Whether the job ended without a report: members exit as successful only once the model is durable.

    While the leader lives, its report is awaited.
    """
    generation = view.status.generation
    if generation is None:
        return False
    leader = next(member for member in generation.members if member.name == generation.leader)
    return not view.alive(leader) and any(says_succeeded(view.worker(member)) for member in generation.members)


def _check_deadline(draft: Draft) -> None:
    seconds, start = draft.spec.run_policy.active_deadline_seconds, draft.status.start_time
    if seconds is None or start is None or draft.view.stopped or draft.status.is_true(ConditionType.SUSPENDED):
        return
    if draft.clock.reached(start + timedelta(seconds=seconds)):
        draft.fail(Reason.DEADLINE_EXCEEDED, f"spec.runPolicy.activeDeadlineSeconds: not done within {seconds} s")
