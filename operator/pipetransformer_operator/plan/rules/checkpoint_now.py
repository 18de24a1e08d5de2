"""Turns a user's request for a checkpoint into one to the members, and says when it is durable.

The annotation holds a token. The members are asked until the leader reports a durable checkpoint begun for it. So a
request outlives regroups, lost workers and restarts of the operator. An answered token is not asked again.
"""

from pipetransformer_contract.api.status import CheckpointRequest, Reason
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.types import EventType

NO_CHECKPOINT = "spec.checkpoint is missing, so the job writes no checkpoints; it can only be set in a new job"
ENDED = "the job ended before the checkpoint was durable"


def follow(draft: Draft) -> None:
    """Takes a new request, forgets one that was withdrawn, and answers the present one if it can be."""
    token, request = draft.observed.checkpoint_now, draft.status.checkpoint_request
    if request is None or request.token != token:
        request = CheckpointRequest(token=token, time=draft.now) if token else _answered(request)
    if request is not None and request.is_open:
        request = _answer(draft, request)
    draft.update(checkpoint_request=request)


def _answered(request: CheckpointRequest | None) -> CheckpointRequest | None:
    """The request if it was answered; None if the user took the annotation away before."""
    return None if request is None or request.is_open else request


def _answer(draft: Draft, request: CheckpointRequest) -> CheckpointRequest:
    """The request with its answer, if there is one now."""
    if draft.spec.checkpoint is None:
        return _refused(draft, request, NO_CHECKPOINT)
    durable = draft.status.checkpoint
    if durable is not None and durable.request == request.token:
        draft.tell(Reason.CHECKPOINT_MADE, f"Checkpoint {request.token} is durable. It is of step {durable.step}")
        return request.model_copy(update={"step": durable.step, "served_time": draft.now})
    return _refused(draft, request, ENDED) if draft.status.finished else request


def _refused(draft: Draft, request: CheckpointRequest, why: str) -> CheckpointRequest:
    draft.tell(Reason.CHECKPOINT_REFUSED, f"No checkpoint {request.token}: {why}", EventType.WARNING)
    return request.model_copy(update={"message": why})
