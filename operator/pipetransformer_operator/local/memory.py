"""The job of a local run, kept in memory (`JobStore`)."""

from collections.abc import Callable

from pipetransformer_contract.api import JobStatus, PipeTrainingJob
from pipetransformer_operator.controller.ports import Conflict, JobKey
from pipetransformer_operator.plan import PlanEvent


class MemoryStore:
    """Keeps one job; `last` is its last state, also when it was deleted.

    Args:
        job: as validated.
        changed: called with the job after each write of its status.
        told: called with each event.
    """

    def __init__(
        self, job: PipeTrainingJob, changed: Callable[[PipeTrainingJob], None], told: Callable[[PlanEvent], None]
    ) -> None:
        self.last = job
        self._deleted = False
        self._changed = changed
        self._told = told

    def read(self, key: JobKey) -> PipeTrainingJob | None:
        """See `JobStore`."""
        return None if self._deleted else self.last

    async def write_status(self, job: PipeTrainingJob, status: JobStatus) -> None:
        """See `JobStore`."""
        if self.last is not job:
            raise Conflict("the job was written since it was read")
        self.last = job.model_copy(update={"status": status})
        self._changed(self.last)

    async def delete(self, job: PipeTrainingJob) -> None:
        """See `JobStore`."""
        self._deleted = True

    async def tell(self, job: PipeTrainingJob, event: PlanEvent) -> None:
        """See `JobStore`."""
        self._told(event)
