"""Counts what the job holds, what it gave back and what that saved. A worker counts until its pod is gone."""

from datetime import datetime

from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_contract.api.status import Gpus, JobStatus, Reason
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.view import View


def count(draft: Draft) -> None:
    """Updates the numbers of workers in the status. It writes nothing where only time has passed."""
    status = draft.status
    there = {worker.id for worker in draft.observed.workers}
    gone = [worker_id for worker_id in status.releasing_ids if worker_id not in there]
    # Pods that have ended may be kept after the job's end, and hold no accelerator.
    held = sum(worker.holds for worker in draft.observed.workers) if status.finished else len(there)
    training = (
        status.generation is not None and not status.finished and bool(status.worker_ids)
    )  # otherwise all of them end
    saved = _saved(draft.view, held) if training else 0
    gpus = Gpus(held=held, released=status.gpus.released + len(gone), saved=saved)
    if gone:
        left = "1 worker is gone" if len(gone) == 1 else f"{len(gone)} workers are gone"
        draft.tell(Reason.GPUS_RELEASED, f"{left}, {held} {'is' if held == 1 else 'are'} held")
    changed = (gpus.held, gpus.saved) != (status.gpus.held, status.gpus.saved) or training != (
        status.gpu_seconds_time is not None
    )
    if changed:
        draft.update(
            gpu_seconds_saved=gpu_seconds_saved(status, draft.now),
            gpu_seconds_time=draft.now if training else None,
        )
    draft.update(
        gpus=gpus,
        workers=len(there),
        priority=max((worker.priority for worker in draft.observed.workers), default=status.priority),
        releasing_ids=[worker_id for worker_id in status.releasing_ids if worker_id in there],
        selector=f"{JOB_LABEL}={draft.observed.name}",
        observed_generation=draft.observed.metadata_generation,
    )


def _saved(view: View, held: int) -> int:
    """Workers that packing spares: shorter pipelines of the starting width need that many fewer, as far as the job does
    not hold them. Workers that a ceiling or a failure takes do not count."""
    generation, spec = view.status.generation, view.spec
    if generation is None:
        return 0
    stages = spec.pipeline.stages
    pipelines = min(view.status.initial_workers, spec.elastic_policy.ceiling) // stages
    return max(0, min(pipelines * (stages - generation.stages), pipelines * stages - held))


def gpu_seconds_saved(status: JobStatus, now: datetime) -> float:
    """GPU-seconds that packing left to others until `now`."""
    if status.gpu_seconds_time is None:
        return status.gpu_seconds_saved
    return status.gpu_seconds_saved + status.gpus.saved * max(0.0, (now - status.gpu_seconds_time).total_seconds())
