"""How a job ends: by its leader's word, by a worker that refuses the spec, or by its deadline."""

import json
from datetime import timedelta

from pipetransformer_contract.messages import Outcome

from ..api.job import CleanPodPolicy
from ..api.status import ConditionType, Reason
from .draft import FINISH_GRACE, Draft
from .types import Worker

#: Exit code of a trainer that cannot do what its spec says.
EXIT_USER_ERROR = 2


def judge(draft: Draft) -> None:
    """Sets Complete or Failed when the job has ended."""
    status = draft.status
    if status.finished:
        return
    report = status.last_report
    if report and report.outcome is Outcome.SUCCEEDED:
        _complete(draft, report.message)
    elif report and report.outcome is Outcome.FAILED:
        draft.fail(report.reason or Reason.TRAINING_FAILED, report.message)
    elif refusal := next((worker for worker in draft.wanted if worker.exit_code == EXIT_USER_ERROR), None):
        reason, message = _termination(refusal)
        draft.fail(reason or Reason.USER_ERROR, message or f"{refusal.name} exited with code {EXIT_USER_ERROR}")
    elif _ended_in_success(draft):
        _complete(draft, "")
    else:
        _check_deadline(draft)


def clean(draft: Draft) -> None:
    """After the end: nothing is created any more, workers go by `cleanPodPolicy`, the job by its time to live."""
    status, policy = draft.status, draft.spec.run_policy
    draft.update(resize=None, next_resize_time=None)
    draft.keep_workers([])
    if not any(worker.holds for worker in draft.observed.workers):
        draft.update(quota_requests=[])
    ended = status.completion_time or draft.now
    if policy.clean_pod_policy is not CleanPodPolicy.NONE and draft.now < ended + FINISH_GRACE:
        draft.wake_at(ended + FINISH_GRACE)
    if policy.ttl_seconds_after_finished is not None:
        expiry = ended + timedelta(seconds=policy.ttl_seconds_after_finished)
        draft.expired = draft.now >= expiry
        if not draft.expired:
            draft.wake_at(expiry)


def says_succeeded(worker: Worker | None) -> bool:
    """Whether a worker exited because the training is done."""
    return worker is not None and worker.exit_code == 0 and _outcome(worker) == Outcome.SUCCEEDED


def says_left(worker: Worker) -> bool:
    """Whether a worker exited because it was told to leave, although it is wanted again."""
    return worker.exit_code == 0 and _outcome(worker) == "Left"


def _complete(draft: Draft, message: str) -> None:
    draft.set_condition(ConditionType.COMPLETE, True, Reason.TRAINING_SUCCEEDED, message)
    draft.tell(Reason.TRAINING_SUCCEEDED, message or "The model is trained and written")
    draft.update(completion_time=draft.now)


def _ended_in_success(draft: Draft) -> bool:
    """How an end is found that was reported to nobody: members exit as successful only once the model is durable.

    While the leader lives its report is waited for.
    """
    plan = draft.status.plan
    if plan is None:
        return False
    leader = next(member for member in plan.members if member.name == plan.leader)
    return not draft.alive(leader) and any(says_succeeded(draft.worker(member)) for member in plan.members)


def _check_deadline(draft: Draft) -> None:
    seconds, start = draft.spec.run_policy.active_deadline_seconds, draft.status.start_time
    if seconds is None or start is None or draft.spec.suspend or draft.status.is_true(ConditionType.SUSPENDED):
        return
    deadline = start + timedelta(seconds=seconds)
    if draft.now >= deadline:
        draft.fail(Reason.DEADLINE_EXCEEDED, f"spec.runPolicy.activeDeadlineSeconds: not done within {seconds} s")
    else:
        draft.wake_at(deadline)


def _parsed(worker: Worker) -> dict[str, object]:
    """The termination message's JSON line; empty when the trainer left other text, as a crash does."""
    try:
        line = json.loads(worker.message.strip().rpartition("\n")[2] or "{}")
    except json.JSONDecodeError:
        return {}
    return line if isinstance(line, dict) else {}


def _outcome(worker: Worker) -> str:
    return str(_parsed(worker).get("outcome", ""))


def _termination(worker: Worker) -> tuple[str, str]:
    line = _parsed(worker)
    return str(line.get("reason", "")), str(line.get("message", "")) or worker.message
