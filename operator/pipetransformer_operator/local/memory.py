"""The job of a local run, kept in memory (`JobStore`)."""

from typing import Protocol

from pipetransformer_contract.api import JobStatus, PipeTrainingJob
from pipetransformer_operator.controller.ports import Conflict, JobKey
from pipetransformer_operator.plan import PlanEvent


class JobListener(Protocol):
    """Is told of the job of a local run."""

    def on_status(self, job: PipeTrainingJob) -> None:
        """The status of the job changed."""
        ...

    def on_event(self, event: PlanEvent) -> None:
        """The operator decided something."""
        ...


class MemoryStore:
    """Keeps one job.

    Args:
        job: the job, which was validated.
        listener: is told of each write of the status, and of each event.

    Attributes:
        last: the newest state of the job, even after it was deleted.
    """

    def __init__(self, job: PipeTrainingJob, listener: JobListener) -> None:
        self.last = job
        self._deleted = False
        self._listener = listener

    def read(self, key: JobKey) -> PipeTrainingJob | None:
        """See `JobStore`."""
        return None if self._deleted else self.last

    async def write_status(self, job: PipeTrainingJob, status: JobStatus) -> None:
        """See `JobStore`."""
        if self.last is not job:
            raise Conflict("the job was written after it was read")
        self.last = job.model_copy(update={"status": status})
        self._listener.on_status(self.last)

    async def delete(self, job: PipeTrainingJob) -> None:
        """See `JobStore`."""
        self._deleted = True

    async def tell(self, job: PipeTrainingJob, event: PlanEvent) -> None:
        """See `JobStore`."""
        self._listener.on_event(event)
