"""Counts failures against the job's budget (`runPolicy.backoffLimit`), and lost nodes, which do not count as failures.

A failure is forgotten after `forgetFailuresAfterSteps` more steps, so old failures do not end a long run. A silent
worker may hang, or its node may be dead; the cluster knows which about a minute later. Until then the status keeps a
note of the silent node. If the node is lost, that is one node loss for all its workers. Otherwise it is one failure.
"""

from collections.abc import Container, Iterable
from datetime import timedelta

from pipetransformer_contract.api.status import NodeSilence, Reason
from pipetransformer_contract.words import counted

from .draft import DOUBT, Draft
from .types import FailureCause, NodeFailure, Worker
from .view import NAMED_SILENCE, OVERDUE, View

#: Maximum length of the description of a loss that the status keeps until the cause is known, in characters.
MAX_SILENCE_CHARACTERS = 1024
#: How long the status keeps the note of a lost node after its last worker fell silent.
KEPT = timedelta(minutes=30)


def forget(draft: Draft) -> None:
    """Forgets failures that are at least `forgetFailuresAfterSteps` steps old."""
    report = draft.status.last_report
    if report is not None:
        outlived = report.step - draft.spec.run_policy.forget_failures_after_steps
        draft.update(failure_steps=[step for step in draft.status.failure_steps if step > outlived])


def count(draft: Draft, described: str) -> int:
    """Counts a failure of the job, and ends the job if the budget is exceeded. Returns the step that the failure has.

    `described` says what failed, for the message of the job's end."""
    policy, steps = draft.spec.run_policy, draft.status.failure_steps
    # After a restart the job repeats steps. They are no progress, so the step of a failure never decreases.
    step = max([*steps, draft.view.newest_step])
    steps = [*steps, step]
    draft.update(failures=draft.status.failures + 1, failure_steps=steps)
    if len(steps) > policy.backoff_limit and not draft.status.finished:
        draft.fail(
            Reason.BACKOFF_LIMIT_EXCEEDED,
            f"spec.runPolicy.backoffLimit: {counted(len(steps), 'failure')} within"
            f" {counted(policy.forget_failures_after_steps, 'step')}"
            f" (forgetFailuresAfterSteps), {policy.backoff_limit} allowed; the last: {described}",
        )
    return step


def is_of_node(view: View, worker: Worker, suspects: Container[str]) -> bool:
    """Whether a member may be lost because of its node: it did not end by itself, and the node or worker is silent.

    `suspects` are the names of members that are lost although their pods look alive."""
    if worker.exit_code is not None or not worker.node:
        return False
    return worker.node_lost or (worker.name in suspects and not view.hears(worker.uid, NAMED_SILENCE))


def note(draft: Draft, workers: Iterable[Worker], described: str) -> None:
    """Notes the nodes of these lost workers as silent. Several workers of one node count as one loss.

    `described` says what was lost, for the event that follows once the cause is known."""
    known = {silence.node: silence for silence in draft.status.silences}
    for node in dict.fromkeys(worker.node for worker in workers):
        new = NodeSilence(node=node, time=draft.now, newest=draft.now, words=described[:MAX_SILENCE_CHARACTERS])
        known[node] = known.get(node, new).model_copy(update={"newest": draft.now})
    draft.update(silences=list(known.values()))
    judge(draft)


def judge(draft: Draft) -> None:
    """Counts each silent node as a node loss or as a failure as soon as the cause is known; later forgets the node."""
    lost = draft.observed.nodes.lost | set(draft.view.workers.that(lambda worker: worker.node_lost).nodes)
    kept = []
    for silence in draft.status.silences:
        silence = _decide(draft, silence, lost)
        # Heartbeats of the node's workers may be minutes apart in a large fleet, so they fall silent one by one.
        until = silence.newest + (KEPT if silence.node in lost else OVERDUE) + draft.observed.pace
        if draft.now < until:
            kept.append(silence)
    draft.update(silences=kept)


def _decide(draft: Draft, silence: NodeSilence, lost: Container[str]) -> NodeSilence:
    if silence.lost:
        return silence
    if silence.node in lost:
        # If the cluster took longer than `DOUBT` to see it, the silence was counted as a failure. Take that back.
        steps = list(draft.status.failure_steps)
        if silence.failure_step in steps:
            steps.remove(silence.failure_step)
        draft.update(node_losses=draft.status.node_losses + 1, failure_steps=steps)
        draft.failures.append(NodeFailure(silence.node, FailureCause.LOST))
        draft.tell(Reason.NODE_LOST, f"Node {silence.node} is lost, which is not a failure of the job: {silence.words}")
        return silence.model_copy(update={"lost": True, "failure_step": None, "words": ""})
    if silence.decided:
        return silence
    due = silence.time + DOUBT
    awaited = draft.observed.sees_drains and not draft.status.finished
    if awaited and not draft.clock.reached(due):
        return silence
    draft.failures.append(NodeFailure(silence.node, FailureCause.SILENT))
    return silence.model_copy(update={"failure_step": count(draft, silence.words)})
