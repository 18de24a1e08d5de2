"""Several jobs' loops over one simulated cluster."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from pipetransformer_contract.api import JobStatus, PipeTrainingJob
from pipetransformer_operator.controller.loop import Pace
from pipetransformer_operator.controller.ports import JobKey, Room
from pipetransformer_operator.plan import UNSEEN, DisruptionBudget, PlanEvent, Worker, WorkerPhase, worker_name

PACE = Pace(debounce=0.001, sharing=0.01)


class Cluster:
    """Job store and worker pool in memory, with room for so many workers and a clock that the test moves."""

    sees_drains = False
    nodes = UNSEEN

    def __init__(self, size: int, *jobs: PipeTrainingJob) -> None:
        self.jobs = {JobKey("default", job.metadata.name): job for job in jobs}
        self.workers: dict[str, list[Worker]] = {job.metadata.name: [] for job in jobs}
        self.size = size
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.changed = asyncio.Event()

    def read(self, key: JobKey) -> PipeTrainingJob | None:
        return self.jobs.get(key)

    async def write_status(self, job: PipeTrainingJob, status: JobStatus) -> None:
        key = JobKey("default", job.metadata.name)
        self.jobs[key] = job.model_copy(update={"status": status})
        self.changed.set()

    async def delete(self, job: PipeTrainingJob, name: str = "", uid: str = "") -> None:
        mine = self.workers[job.metadata.name]
        mine[:] = [worker for worker in mine if worker.name != name]
        self.changed.set()

    async def tell(self, job: PipeTrainingJob, event: PlanEvent) -> None:
        """Nobody listens."""

    def list(self, job: PipeTrainingJob) -> tuple[Worker, ...]:
        return tuple(self.workers[job.metadata.name])

    def room(self, job: PipeTrainingJob) -> Room:
        return Room(None, None)

    def reserve_room(self, job: PipeTrainingJob, status: JobStatus) -> None:
        """Any number of jobs may look at the same room."""

    async def prepare(self, job: PipeTrainingJob, status: JobStatus, new: Sequence[int]) -> None:
        """Workers need nothing."""

    async def create(self, job: PipeTrainingJob, worker_id: int, status: JobStatus) -> None:
        placed = sum(worker.scheduled for workers in self.workers.values() for worker in workers) < self.size
        name = worker_name(job.metadata.name, worker_id)
        phase = WorkerPhase.RUNNING if placed else WorkerPhase.PENDING
        self.workers[job.metadata.name].append(Worker(worker_id, name, f"uid-{name}", phase, scheduled=placed))
        self.changed.set()

    async def protect(self, job: PipeTrainingJob, budget: DisruptionBudget | None) -> None:
        """Nobody takes workers away."""

    def doubt(self, job: PipeTrainingJob, silent: Mapping[str, datetime], unfit: Mapping[str, datetime]) -> None:
        """Nodes are well."""

    def blame(self, failed_devices: Mapping[str, str]) -> None:
        """Nodes are well."""

    async def next_change(self) -> None:
        """Waits for the next write."""
        self.changed.clear()
        await self.changed.wait()

    def status(self, name: str) -> JobStatus:
        return self.jobs[JobKey("default", name)].status
