"""Counts the GPUs that the job holds, released and saved. A worker counts until its pod is gone."""

from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_contract.api.status import Gpus, JobStatus, Reason
from pipetransformer_contract.words import counted_are
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.view import View


def count(draft: Draft) -> None:
    """Updates the numbers of workers in the status. They do not change because time passes, which saves writes."""
    status = draft.status
    there = draft.view.workers.ids
    gone = set(status.releasing_ids) - there
    # After the job's end, pods that have ended may stay. They hold no accelerator.
    held = len(draft.view.workers.holding if status.finished else draft.view.workers)
    saved = _saved(draft.view, held) if _uses_workers(status) else 0
    if gone:
        left = counted_are(len(gone), "worker")
        draft.tell(Reason.GPUS_RELEASED, f"{left} gone, {held} {'is' if held == 1 else 'are'} held")
    _add_seconds(draft, held, saved)
    draft.update(
        gpus=Gpus(held=held, released=status.gpus.released + len(gone), saved=saved),
        workers=len(there),
        # Claimed workers have another priority, so they do not count.
        priority=draft.view.wanted.without(draft.view.claimed_ids).highest_priority(status.priority),
        releasing_ids=sorted(set(status.releasing_ids) & there),
        selector=f"{JOB_LABEL}={draft.observed.name}",
        observed_generation=draft.observed.metadata_generation,
    )


def _uses_workers(status: JobStatus) -> bool:
    """Whether the job trains and wants workers."""
    return status.generation is not None and not status.finished and bool(status.worker_ids)


def _add_seconds(draft: Draft, held: int, saved: int) -> None:
    """Adds up the saved GPU-seconds until now, if the number of held or saved GPUs changed."""
    status, counting = draft.status, _uses_workers(draft.status)
    before = (status.gpus.held, status.gpus.saved, status.gpu_seconds_time is not None)
    if (held, saved, counting) != before:
        seconds = status.gpu_seconds_saved_at(draft.now)
        draft.update(gpu_seconds_saved=seconds, gpu_seconds_time=draft.now if counting else None)


def _saved(view: View, held: int) -> int:
    """How many workers packing saves: those that the shorter pipelines do not need, and that the job does not hold.

    The comparison is with as many pipelines as at the start. Workers that are missing because of a failure or a lower
    `maxWorkers` do not count. `held` is the number of workers that the job holds."""
    stages = view.spec.pipeline.stages
    pipelines = min(view.status.initial_workers, view.spec.elastic_policy.ceiling) // stages
    return max(0, min(pipelines * (stages - view.generation.stages), pipelines * stages - held))
