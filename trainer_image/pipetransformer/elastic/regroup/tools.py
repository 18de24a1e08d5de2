"""What a regroup needs of the worker: the job, the storage, and steps that are not settled."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from pipetransformer.elastic.generations.rendezvous import GenerationRendezvousHandler
from pipetransformer.elastic.transport.barrier import Barrier
from pipetransformer.elastic.transport.groups import Transport
from pipetransformer.elastic.transport.watchdog import Watchdog
from pipetransformer.hooks import Hooks
from pipetransformer.partition import Cut, ModelCosts
from pipetransformer.state.control import Control
from pipetransformer.state.worker_state import WorkerState

from .assemble import CheckpointReader, StateSources, UnitMaker
from .state_map import MapOf, no_map
from .transfer_plan import DurablePoint


class ElasticJob(UnitMaker, Protocol):
    """What a regroup needs of a job; `job.Job`."""

    def at(self, visit: int) -> "ElasticJob":
        """The job as it is in a visit of one of its levels, which may have another model."""
        ...

    @property
    def data_digest(self) -> str:
        """Digest of the data that this worker sees; it must be the same on all workers."""
        ...

    def cut(self, boundary: int, stages: int, pipelines: int, costs: ModelCosts | None, cached_layers: int = 0) -> Cut:
        """Stages and micro-batches of a layout."""
        ...


class RegroupStorage(CheckpointReader, Protocol):
    """The storage of checkpoints, such as `checkpoint.Checkpointer`. Only the leader reads it, if a unit is lost."""

    def durable(self) -> DurablePoint | None:
        """The newest durable checkpoint."""
        ...

    def kept_step(self) -> int:
        """The step of the best model that the storage keeps, 0 for none."""
        ...

    def newest_generation(self) -> int:
        """The highest layout generation that has written to the storage, 0 for none."""
        ...


class Unsettled(Protocol):
    """Work that the other workers may have committed; this worker's group broke before it could know."""

    @property
    def pending(self) -> int | None:
        """The lasting generation that gave this worker complete gradients of a step it has not committed; None if there
        is no such step."""
        ...

    @property
    def pending_steps(self) -> int:
        """Number of steps that are pending: all of a round."""
        ...

    @property
    def in_doubt(self) -> WorkerState | None:
        """The state that this worker assembled for a generation whose vote broke; None if there is none."""
        ...

    def commit_late(self, control: Control) -> None:
        """Commit the pending steps as the workers did that have this control state."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RegroupTools(StateSources):
    """A worker's means to regroup, the same for all its generations.

    Attributes:
        handler: meets the members of a generation.
        transport: connects the groups.
        job: the job that trains.
        checkpoints: asked when a unit is lost.
        run_dir: folder of the record, which names the generations of earlier jobs.
        barrier: has all workers wait for storage.
        watchdog: ends an attempt that takes too long, or that a newer generation has made void.
        hooks: told of hook points.
        map_of: the map for a regroup from a control state into pipelines of so many stages.
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
        """These tools for the model of a visit."""
        job = self.job.at(visit)
        return self if job is self.job else replace(self, job=job)


def catch_up(state: WorkerState, control: Control, unsettled: Unsettled) -> None:
    """Commit the round, or take over the decision after it, that other workers made before this worker's group broke.
    Then what this worker sends is what they expect. A worker that is further behind, or took the round in another
    generation, receives all that it needs and sends nothing.

    Args:
        state: what this worker holds.
        control: the control state that the plan starts from.
        unsettled: holds the steps after this worker's last one, if they are pending.
    """
    present = state.control
    if (present.step + unsettled.pending_steps, unsettled.pending, present.visit) == control.point:
        unsettled.commit_late(control)
    elif present.point == control.point and present.decided_step != control.decided_step:
        state.go_on_from(control)
