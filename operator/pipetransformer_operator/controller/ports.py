"""What the controller needs: where jobs are kept and where workers run.

On a cluster the API server keeps jobs, and workers are pods. A local run keeps its one job in memory, and its workers
are processes. The loop cannot tell them apart.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple, Protocol

from pipetransformer_contract.api import JobStatus, PipeTrainingJob
from pipetransformer_operator.plan import DisruptionBudget, NodeFacts, Observed, Plan, PlanEvent, Queue, Worker


class JobKey(NamedTuple):
    """Namespace and name of a job."""

    namespace: str
    name: str

    @classmethod
    def of(cls, job: PipeTrainingJob) -> "JobKey":
        return cls(job.metadata.namespace, job.metadata.name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Room(NamedTuple):
    """How many more workers of a job would find a free accelerator now."""

    free: int | None  #: in total; None: unknown
    unreserved: int | None  #: those that no other job has reserved; 0 if unknown, None if unlimited
    reach: int | None = None  #: in total if pods of lower priority were preempted; None: unknown or not asked
    unknown: str = ""  #: why `free` is unknown, in words


class Conflict(Exception):
    """The job changed after it was read: observe again."""


class Unavailable(Exception):
    """The API server cannot be reached or is overloaded: try again later."""


class Refused(Unavailable):
    """The request is refused as it is: an invalid object, quota, admission or rights."""


class Invalid(Refused):
    """The request itself is invalid, so trying it again is useless."""


class NameConflict(Exception):
    """An object that is not this job's worker has the worker's name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} already exists and is not a worker of this job")
        self.name = name


class JobStore(Protocol):
    """Where jobs are kept. Reads come from memory, and are never older than the store's own writes."""

    def read(self, key: JobKey) -> PipeTrainingJob | None:
        """The job, or None when it does not exist."""
        ...

    async def write_status(self, job: PipeTrainingJob, status: JobStatus) -> None:
        """Replaces the status of `job`, which was read from this store.

        Raises:
            Conflict: the job changed meanwhile, or is gone.
            Unavailable: it cannot be written now.
        """
        ...

    async def delete(self, job: PipeTrainingJob) -> None:
        """Deletes the job; it may be gone already.

        Raises:
            Unavailable: it cannot be deleted now.
        """
        ...

    async def tell(self, job: PipeTrainingJob, event: PlanEvent) -> None:
        """Tells the user of a decision. A failure is only logged."""
        ...


class WorkerPool(Protocol):
    """Where workers run."""

    @property
    def sees_drains(self) -> bool:
        """Whether workers become `draining` before their node is emptied."""
        ...

    @property
    def nodes(self) -> NodeFacts:
        """What is known of nodes."""
        ...

    def list(self, job: PipeTrainingJob) -> tuple[Worker, ...]:
        """The job's existing workers, by id. From memory, and always with those that the pool itself created."""
        ...

    def room(self, job: PipeTrainingJob) -> Room:
        """How many of the job's workers without a node, and new ones, would find a node now. From memory."""
        ...

    def reserve_room(self, job: PipeTrainingJob, status: JobStatus) -> None:
        """Reserves room for the workers of the job's next status, so that other jobs do not count on it."""
        ...

    async def prepare(self, job: PipeTrainingJob, status: JobStatus, new: Sequence[int]) -> None:
        """Writes what all workers of the job need. Running workers need it too, because another operator may have
        changed it.

        Args:
            job: the job.
            status: its next one, which says which workers it wants.
            new: workers that are created next, in this order.

        Raises:
            Conflict: something changed meanwhile, or the namespace is gone.
            Refused: the cluster refuses it; the message says why.
            Unavailable: it cannot be written now.
        """
        ...

    async def create(self, job: PipeTrainingJob, worker_id: int, status: JobStatus) -> None:
        """Starts a worker, unless it already exists.

        Raises:
            Conflict: something changed meanwhile, or the namespace is gone.
            NameConflict: another object has its name.
            Refused: the cluster refuses the worker, always or for now; the message says why.
            Unavailable: it cannot be created now; the message says why.
        """
        ...

    async def protect(self, job: PipeTrainingJob, budget: DisruptionBudget | None) -> None:
        """Limits which workers may be evicted, and who may connect to workers. None leaves the present budget.

        Raises:
            Conflict: something changed meanwhile, or the namespace is gone.
            Refused: the cluster refuses the protection; the message says why.
            Unavailable: it cannot be written now.
        """
        ...

    def doubt(self, job: PipeTrainingJob, silent: Mapping[str, datetime], unfit: Mapping[str, datetime]) -> None:
        """The job's workers on these nodes fell silent or could not run there.

        Until the time given the job's workers avoid them. Other jobs avoid unfit nodes for a shorter time."""
        ...

    def blame(self, failed_devices: Mapping[str, str]) -> None:
        """Notes failed accelerators. `failed_devices` has the node by UID of the worker.

        A node with two failures gets no worker for an hour."""
        ...

    async def delete(self, job: PipeTrainingJob, name: str, uid: str) -> None:
        """Asks the worker to end if its UID is still `uid`. Does nothing if it is gone already.

        Raises:
            Refused: the cluster keeps it; the message says why.
            Unavailable: it cannot be deleted now.
        """
        ...


class Quota(Protocol):
    """Where jobs request workers if a queue decides."""

    def observe(self, job: PipeTrainingJob) -> Queue | None:
        """What is known of the job's queue; None if the job names none. From memory."""
        ...

    async def apply(self, job: PipeTrainingJob, status: JobStatus) -> None:
        """Requests the workers in the status, and returns the quota of all others.

        Raises:
            Conflict: a request changed after it was observed.
            Refused: a request is refused as it is; `observe` says why.
            Unavailable: it cannot be written now.
        """
        ...


class TurnResult(StrEnum):
    """How a turn of a job's loop ended."""

    DONE = "Done"
    CONFLICT = "Conflict"  #: the job changed meanwhile; another turn follows soon
    UNAVAILABLE = "Unavailable"  #: a write failed; another turn tries again later
    ERROR = "Error"  #: a defect of the operator; another turn tries again later


class LoopMetrics:
    """Is told what the loops do. Every method does nothing here."""

    def on_decided(self, job: PipeTrainingJob, observed: Observed, plan: Plan, seconds: float) -> None:
        """A plan was made from `job` and `observed` in `seconds`. Its status is durable, or only its words changed and
        are written later."""

    def on_turned(self, result: TurnResult, seconds: float) -> None:
        """A turn has ended."""

    def on_gone(self, key: JobKey) -> None:
        """The job is gone, or a new job has its name."""
