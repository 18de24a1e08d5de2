"""Which accelerators a job holds without training on them, and what they wait for."""

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

from pipetransformer_contract.api.status import ConditionType, JobStatus, Reason, ResizePhase
from pipetransformer_contract.messages import Generation, ResizeReason
from pipetransformer_operator.plan import Observed, Worker, WorkerPhase


class IdleReason(StrEnum):
    """What a worker waits for while it holds an accelerator and does not train."""

    STARTING = "Starting"  #: it loads its image, imports, the model, or the checkpoint
    GANG = "WaitingForGang"  #: it is warm, and other workers that it needs are not there yet
    REGROUPING = "Regrouping"  #: the members change to another generation, or lost each other
    STORAGE = "WaitingForStorage"  #: it left the layout, and waits for a durable checkpoint
    LEVEL = "WaitingForLevel"  #: the next level has a larger model, which needs more workers
    STALLED = "Stalled"  #: the job makes no step
    STOPPING = "Stopping"  #: it writes a last checkpoint, or its pod ends
    SPARE = "Spare"  #: it is warm and in no layout, such as with `onPack: Hold`


def idle_gpus(observed: Observed, status: JobStatus) -> Mapping[IdleReason, int]:
    """Accelerators that the job holds without training on them, by reason. A pod without a node holds none.

    Args:
        observed: the workers of the job.
        status: as the plan made from `observed` left it.
    """
    holding = (one for one in observed.workers if one.holds and (one.scheduled or one.phase is not WorkerPhase.PENDING))
    return Counter(filter(None, (_why_idle(worker, observed, status) for worker in holding)))


def _why_idle(worker: Worker, observed: Observed, status: JobStatus) -> IdleReason | None:
    """Why the worker does not train; None if it does."""
    generation = status.generation
    if status.finished or status.stop is not None or worker.terminating or worker.id not in status.worker_ids:
        return IdleReason.STOPPING
    if generation is None:
        return _joiner(worker, observed)
    if worker.uid in {member.uid for member in generation.members}:
        return _member(worker, observed, status, generation)
    if worker.id in status.leaving_ids:
        return IdleReason.STORAGE if generation.confirmed else IdleReason.REGROUPING
    prepares = status.resize is not None and status.resize.phase is ResizePhase.PREPARE
    return _joiner(worker, observed) if prepares else IdleReason.SPARE


def _joiner(worker: Worker, observed: Observed) -> IdleReason:
    return IdleReason.GANG if worker.uid in observed.ready else IdleReason.STARTING


def _member(worker: Worker, observed: Observed, status: JobStatus, generation: Generation) -> IdleReason | None:
    if status.is_true(ConditionType.STALLED):
        return IdleReason.STALLED
    if status.reason(ConditionType.RUNNING) == Reason.RECOVERING:
        return IdleReason.GANG
    if not generation.confirmed:
        return IdleReason.STARTING if generation.reason is ResizeReason.START else IdleReason.REGROUPING
    if status.reason(ConditionType.RESIZING) == Reason.WAITING_FOR_LEVEL:
        return IdleReason.LEVEL
    return IdleReason.REGROUPING if observed.beat(worker.uid).waiting_after is not None else None
