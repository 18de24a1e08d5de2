"""What the controller needs of the world: where jobs are kept and where workers run.

A cluster keeps jobs in the API server and runs workers as pods; a local run keeps its one job in memory and runs
workers as processes. The loop cannot tell them apart.
"""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple, Protocol

from pipetransformer_contract.api import JobStatus, PipeTrainingJob
from pipetransformer_operator.plan import NodeFacts, Observed, Plan, PlanEvent, Queue, Worker


class JobKey(NamedTuple):
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Room(NamedTuple):
    """Workers of a job that would find a free accelerator now."""

    free: int | None  #: in all; None where nobody knows
    unreserved: int | None  #: less those that other jobs are about to take; 0 where nobody knows, None without a bound
    reach: int | None = None  #: with those that its starting size would preempt; None where nobody knows or asks


class Conflict(Exception):
    """The job changed since it was read: observe again."""


class Unavailable(Exception):
    """The other side cannot be reached or is overloaded: try again later."""


class Refused(Unavailable):
    """The other side refuses the request as it is: an invalid object, quota, admission or rights."""


class Invalid(Refused):
    """What the request holds is refused, and will be again."""


class NameConflict(Exception):
    """Something that is not this job's worker has the worker's name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} exists and belongs to someone else")
        self.name = name


class JobStore(Protocol):
    """Where jobs are kept. Reading is from memory and never older than what the store itself wrote."""

    def read(self, key: JobKey) -> PipeTrainingJob | None:
        """The job, or None when it does not exist."""
        ...

    async def write_status(self, job: PipeTrainingJob, status: JobStatus) -> None:
        """Replaces the status of the job that was read as `job`.

        Raises:
            Conflict: the job changed or went since.
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
        """Tells the user of a decision, as well as it can be told: nothing depends on it."""
        ...


class WorkerPool(Protocol):
    """Where workers run."""

    @property
    def sees_drains(self) -> bool:
        """Whether workers are `draining` before their node is emptied."""
        ...

    @property
    def nodes(self) -> NodeFacts:
        """What is known of nodes, as far as they are seen."""
        ...

    def list(self, job: PipeTrainingJob) -> tuple[Worker, ...]:
        """The job's workers that are not gone, by id. From memory; never lacks one that the pool itself created."""
        ...

    def room(self, job: PipeTrainingJob) -> Room:
        """How many more of the job's workers nodes would take now, those among them that have none yet. From memory."""
        ...

    def expect(self, job: PipeTrainingJob, status: JobStatus) -> None:
        """The job's next status, which says what workers it will have: no other job is told of the room for them."""
        ...

    async def prepare(self, job: PipeTrainingJob) -> None:
        """Sees to what all workers of the job need, before some are created. Those that run need it as well: another
        operator may have written it.

        Raises:
            Refused: the cluster does not take it; the message says why.
            Unavailable: it cannot be written now.
        """
        ...

    async def create(self, job: PipeTrainingJob, worker_id: int, status: JobStatus) -> None:
        """Starts a worker; one that is there already is left alone.

        Raises:
            NameConflict: its name is taken.
            Refused: the cluster does not take such a worker, as it is or for now; the message says why.
            Unavailable: it cannot be created now; the message says why.
        """
        ...

    async def protect(self, job: PipeTrainingJob, min_available: int | None, *, keeps_unready: bool) -> None:
        """Lets others take workers away only as long as `min_available` stay, and lets nobody else connect to them.

        None: how many may be taken away is left as it is. With `keeps_unready` they are kept as well whose pods run and
        are not ready.

        Raises:
            Refused: the cluster does not take what protects them; the message says why.
            Unavailable: it cannot be written now.
        """
        ...

    def doubt(self, job: PipeTrainingJob, silent: Mapping[str, datetime], unfit: Mapping[str, datetime]) -> None:
        """The job's workers on these nodes fell silent, or could not run there: its others had better run elsewhere
        until the time given, and so had other jobs', away from unfit nodes for a shorter time."""
        ...

    def blame(self, broken: Mapping[str, str]) -> None:
        """The accelerators of workers failed: by the worker's uid, on which node. Where that happens twice, no worker
        of any job is sent for an hour."""
        ...

    async def delete(self, job: PipeTrainingJob, name: str, uid: str) -> None:
        """Asks the worker to end, if it is still the one with `uid`; it may be gone already.

        Raises:
            Refused: the cluster keeps it; the message says why.
            Unavailable: it cannot be deleted now.
        """
        ...


class Quota(Protocol):
    """Whom jobs ask for their workers, where a queue decides."""

    def observe(self, job: PipeTrainingJob) -> Queue | None:
        """What is known of the job's queue; None when it asks none. From memory."""
        ...

    async def apply(self, job: PipeTrainingJob, status: JobStatus) -> None:
        """Asks for what the status says, and gives back what it says; nothing else is kept.

        Raises:
            Conflict: a request changed since it was observed.
            Refused: a request is not accepted as it is; `observe` says why.
            Unavailable: not now.
        """
        ...


class TurnResult(StrEnum):
    """How a turn of a job's loop ended."""

    DONE = "Done"
    CONFLICT = "Conflict"  #: the job had changed meanwhile; another turn follows, soon at first
    UNAVAILABLE = "Unavailable"  #: the other side did not take a write; tried again later
    ERROR = "Error"  #: a fault of ours; tried again later


class LoopMetrics:
    """Is told what the loops do, for figures; nothing depends on it. This one forgets."""

    def on_decided(self, job: PipeTrainingJob, observed: Observed, plan: Plan, seconds: float) -> None:
        """A plan's status is durable. `job` and `observed` are what it was made from, in so many seconds."""

    def on_turned(self, result: TurnResult, seconds: float) -> None:
        """A turn has ended."""

    def on_gone(self, key: JobKey) -> None:
        """The job is gone, or another has its name."""
