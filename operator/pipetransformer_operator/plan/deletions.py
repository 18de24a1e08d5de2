"""Why workers are deleted, as `kubectl describe` of their job shows it."""

from collections.abc import Iterable, Iterator, Sequence

from pipetransformer_contract.api.status import Reason

from .types import Deletion, EventType, PlanEvent, Worker

#: Names of workers in one event.
MAX_NAMES = 8
#: Of a worker whose deletion an earlier turn decided.
DECIDED_BEFORE = "the job no longer needs it"
#: Of a worker of a job that has ended.
ENDED = "the job has ended (spec.runPolicy.cleanPodPolicy)"


def deletion_of(worker: Worker, why: str) -> Deletion:
    """The deletion of a worker for that reason."""
    return Deletion(worker.id, worker.name, worker.uid, why)


def events_of(deletions: Iterable[Deletion]) -> Iterator[PlanEvent]:
    """One event for each reason, with the names of its workers."""
    names: dict[str, list[str]] = {}
    for deletion in deletions:
        names.setdefault(deletion.why, []).append(deletion.name)
    for why, deleted in names.items():
        yield PlanEvent(EventType.NORMAL, Reason.WORKERS_DELETED, f"Deleting {listed(deleted)}: {why}")


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
