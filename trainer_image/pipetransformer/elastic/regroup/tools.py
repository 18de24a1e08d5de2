"""What a regroup needs from its worker: the job, the storage, and work that other workers may have committed."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from pipetransformer.elastic.generations.rendezvous import GenerationRendezvousHandler
from pipetransformer.elastic.transport.barrier import Barrier, SumBarrier
from pipetransformer.elastic.transport.groups import Transport
from pipetransformer.elastic.transport.watchdog import Watchdog
from pipetransformer.hooks import Hooks
from pipetransformer.partition import Cut, ModelCosts
from pipetransformer.state.control import Control
from pipetransformer.state.worker_state import WorkerState

from .assemble import CheckpointReader, StateSources, UnitMaker
from .state_map import MapOf, no_map
from .transfer_plan import DurablePoint


class Cutter(Protocol):
    """Cuts a job's model. `job.Layouts` implements it."""

    def cut(self, boundary: int, stages: int, pipelines: int, costs: ModelCosts | None, cached_layers: int = 0) -> Cut:
        """Cut the model into stages, and choose micro-batches.

        Args:
            boundary: number of frozen layers.
            stages: number of stages.
            pipelines: number of pipelines.
            costs: measured costs of units; None before the measurement.
            cached_layers: as in `Control`.
        """
        ...


class ElasticJob(UnitMaker, Protocol):
    """What a regroup needs from a job. `job.Job` implements it."""

    def at(self, visit: int) -> "ElasticJob":
        """The job in this visit of one of its levels, which may have another model."""
        ...

    @property
    def data_digest(self) -> str:
        """Digest of the data that this worker sees. It must be the same on all workers."""
        ...

    @property
    def first_sums(self) -> list[float]:
        """Sums of the weights that this worker's program built, by unit. Before a start they are compared."""
        ...

    @property
    def inputs_change(self) -> bool:
        """Whether this or another worker saw inputs change between two reads, so that no worker caches."""
        ...

    def expect_changes(self) -> None:
        """From now on let `inputs_change` be true, because another worker saw it."""
        ...

    @property
    def layouts(self) -> Cutter:
        """Cuts the model for a layout."""
        ...


class RegroupStorage(CheckpointReader, Protocol):
    """The storage of checkpoints. `checkpoint.Checkpointer` implements it.

    Only the leader calls these methods, if the workers together do not hold all units. Each raises `StorageError` if
    the storage cannot be read.
    """

    def durable(self) -> DurablePoint | None:
        """The newest durable checkpoint; None without one."""
        ...

    def kept_step(self) -> int:
        """Committed steps of the best model that the storage keeps; 0 without one."""
        ...

    def newest_generation(self) -> int:
        """The highest layout generation that has written to the storage; 0 if none has."""
        ...


class Unsettled(Protocol):
    """Work of this worker that other workers may have committed. Its group broke before it could know."""

    @property
    def pending(self) -> int | None:
        """Lasting number (`Control.lasting_generation`) of the generation whose steps are pending. A step is pending if
        this worker has its complete gradients but has not committed it. None if no step is pending."""
        ...

    @property
    def pending_steps(self) -> int:
        """Number of pending steps: all steps of a round."""
        ...

    @property
    def in_doubt(self) -> WorkerState | None:
        """The state that this worker assembled for a generation whose vote broke; None if there is no such state."""
        ...

    def commit_late(self, state: WorkerState, control: Control) -> None:
        """Commit the pending steps of `state`, because other workers have. `control` is the control state of these
        workers."""
        ...

    def drop(self, state: WorkerState) -> None:
        """Free what this worker holds: `state`, gradients, optimizer, pending steps and the state in doubt."""
        ...


class Precondition(Protocol):
    """What must be so before the members vote for a level change. `checkpoint.WeightsSaving` implements it."""

    def wait(self, sum_barrier: SumBarrier) -> bool:
        """Wait until it is so. All members call this. Returns False, on all of them, if it cannot be so."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RegroupTools(StateSources):
    """What a worker regroups with, in all its generations.

    Attributes:
        handler: meets the participants of a generation.
        transport: connects the groups.
        job: the job that trains.
        checkpoints: read if the workers together do not hold all units.
        run_dir: folder of the run's record, which also names the generations of earlier jobs.
        barrier: lets all workers wait for the storage.
        watchdog: ends an attempt that takes too long, or that a newer generation has made void.
        hooks: told of hook points.
        map_of: returns the state map of a regroup.
    """

    handler: GenerationRendezvousHandler
    transport: Transport
    job: ElasticJob
    checkpoints: RegroupStorage
    run_dir: Path
    barrier: Barrier
    watchdog: Watchdog
    hooks: Hooks
    map_of: MapOf = no_map

    def at(self, visit: int) -> "RegroupTools":
        """The same tools for the model of this visit."""
        job = self.job.at(visit)
        return self if job is self.job else replace(self, job=job)
