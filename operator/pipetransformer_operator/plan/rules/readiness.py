"""Says why workers that will join are not ready, in words for conditions and events."""

from pipetransformer_contract.api.status import Reason
from pipetransformer_contract.words import counted
from pipetransformer_operator.plan.members import names
from pipetransformer_operator.plan.quota import balance, requests
from pipetransformer_operator.plan.types import Worker
from pipetransformer_operator.plan.view import View

#: Reasons why joiners are not ready. The condition shows the first of them that holds for any joiner.
_WORST = (Reason.UNSCHEDULABLE, Reason.IMAGE_PULL, Reason.NOT_READY)


def why_not_ready(view: View) -> tuple[Reason, str]:
    """Why joiners are not ready: the worst reason, and words about each joiner that is not ready."""
    if view.observed.refusal:
        return Reason.CREATION_REFUSED, view.observed.refusal
    if view.awaits_quota:
        return Reason.WAITING_FOR_QUOTA, queue_says(view)
    late = _why_late(view)
    worst = min((reason for reason, _ in late.values()), key=_WORST.index, default=Reason.NOT_READY)
    words = "; ".join([f"{name}: {why}" for name, (_, why) in late.items()][:8])
    if worst is Reason.UNSCHEDULABLE and view.observed.nodes.avoided:
        words += f"; avoiding nodes whose accelerators failed: {', '.join(sorted(view.observed.nodes.avoided)[:8])}"
    return worst, words or _why_none_is_awaited(view)


def _why_late(view: View) -> dict[str, tuple[Reason, str]]:
    """Reason and words for each joiner that is not ready, by its name."""
    ready = names(view.ready_joiners)
    if view.status.generation is not None:  # a joiner on a cordoned node replaces no worker
        ready -= view.joiners.draining.names
    late = {key: view.name_of(key) for key in view.joining_ids if view.name_of(key) not in ready}
    workers = view.joiners.by_id
    return {name: _why(workers.get(key)) for key, name in late.items()}


def _why(worker: Worker | None) -> tuple[Reason, str]:
    if worker is None:
        return Reason.NOT_READY, "is not created yet"
    if not worker.scheduled:
        return Reason.UNSCHEDULABLE, worker.why_pending or "has no node: no scheduler has reported on it yet"
    if worker.lacks_image:
        return Reason.IMAGE_PULL, worker.why_pending
    return Reason.NOT_READY, worker.why_pending or (
        "is on a cordoned node" if worker.draining else "runs and is not ready"
    )


def _why_none_is_awaited(view: View) -> str:
    ceiling = view.spec.elastic_policy.ceiling
    if view.asleep:
        return f"the next attempt begins at {view.status.next_resize_time:%Y-%m-%dT%H:%M:%SZ}"
    if view.status.quota_requests:
        return "quota becomes free once the pods of earlier workers are gone"
    if len(view.status.worker_ids) >= ceiling:
        return f"spec.elasticPolicy.maxWorkers allows no more than {counted(ceiling, 'worker')}"
    return "no new worker is pending"


def queue_says(view: View) -> str:
    """Which requests the queue has not granted yet, and the queue's messages about them, in words."""
    waiting = requests.waiting(view.status)
    asked = ", ".join(f"queue {one.queue} was asked for {counted(one.granted, 'worker')}" for one in waiting)
    return ": ".join(filter(None, [asked, balance.words(waiting, view.observed.queue)]))
