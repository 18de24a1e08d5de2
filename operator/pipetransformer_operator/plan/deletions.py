"""Deletions of workers, and the events by which `kubectl describe` of the job says why workers are deleted."""

from collections.abc import Iterable, Iterator, Sequence

from pipetransformer_contract.api.status import Reason

from .types import Deletion, EventType, PlanEvent, Worker

#: Maximum number of workers' names in one event.
MAX_NAMES = 8
#: Reason for a worker whose deletion an earlier turn decided: the status no longer says why.
DECIDED_BEFORE = "no longer needed by the job"
#: Reason for a worker of a job that has ended.
ENDED = "the job has ended (spec.runPolicy.cleanPodPolicy)"


def deletion_of(worker: Worker, why: str) -> Deletion:
    """The deletion of a worker. `why` is the reason, as words that follow a colon."""
    return Deletion(worker.id, worker.name, worker.uid, why)


def events_of(deletions: Iterable[Deletion]) -> Iterator[PlanEvent]:
    """One event for each reason, with the names of its workers."""
    names: dict[str, list[str]] = {}
    for deletion in deletions:
        names.setdefault(deletion.why, []).append(deletion.name)
    for why, deleted in names.items():
        yield PlanEvent(EventType.NORMAL, Reason.WORKERS_DELETED, f"Deleting {listed(deleted)}: {why}")


def listed(names: Sequence[str]) -> str:
    """The first `MAX_NAMES` names in one text, and how many more there are."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
