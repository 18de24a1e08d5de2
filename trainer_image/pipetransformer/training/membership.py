"""The objects that a worker holds while it belongs to a generation, and how it releases them."""

import gc
import logging
import threading
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from pipetransformer.cache import ActivationCache
from pipetransformer.data import MicroBatch, Readers
from pipetransformer.elastic.regroup.phases import Phases
from pipetransformer.elastic.transport.groups import GenerationGroups, Store, drop_groups
from pipetransformer.freeze.boundary import first_trainable
from pipetransformer.job.job import Job
from pipetransformer.pipeline import StageRunner, StageSpec
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState

from .commit import Committer
from .gradients import GradientReducer
from .leader import Leader

logger = logging.getLogger(__name__)


@dataclass
class Membership:
    """One worker's membership in a generation. It begins when the generation is committed. It ends when the next
    generation is committed, when a connection breaks, or when the job changes its level.

    Attributes:
        layout: layout of the generation.
        groups: process groups of the generation.
        store: key-value store that all members of the generation share.
        transfers: (source rank, target rank, bytes) of the state that moved for this generation.
        phases: seconds of the regroup by phase, up to the end of the first step.
        paused_at: wall clock at the start of the pause: the end of the last step before the generation. At a start it
            is the time when this worker knew of the generation.
        first_step: number of committed steps when this membership began.
        outgrown: process groups of the generation before, or from before a level change, until `drop_outgrown` closes
            them.
        level_change: whether this membership began with a level change, after a step of the same generation.
        stepped: whether a step was committed in this membership.
        placed_for: the value of `Control.cached_layers` when units last moved to host memory or back.
        leader: reports what happens in the generation; None on all members except the leader.
        runner: runs the worker's stage; made by `equip`.
        reducer: sums gradients over the pipelines; made by `equip`.
        copied_units: number of leading units whose copies are still valid. Workers of the pipeline that run frozen
            forwards ahead hold these copies. A unit that has trained since it was copied does not count.
    """

    layout: StageLayout
    groups: GenerationGroups
    store: Store
    transfers: list[tuple[int, int, int]]
    phases: Phases
    paused_at: float
    first_step: int
    outgrown: list[dist.ProcessGroup]
    level_change: bool = False
    stepped: bool = False
    placed_for: int = 0
    leader: Leader | None = None
    runner: StageRunner = field(init=False)
    reducer: GradientReducer | None = None
    copied_units: int = field(init=False)

    def __post_init__(self) -> None:
        self.copied_units = self.layout.cut.ahead_units

    @property
    def world(self) -> dist.ProcessGroup:
        assert self.groups.world is not None
        return self.groups.world

    def equip(
        self,
        job: Job,
        state: WorkerState,
        committer: Committer,
        activations: ActivationCache | None,
        readers: Readers | None,
        device: torch.device,
    ) -> None:
        """Make the parts that depend on the present boundary: the runner, the optimizer and the reduction of gradients.
        This sends and receives nothing.

        Args:
            job: the job that trains.
            state: holds the units of the stage.
            committer: makes and holds the optimizer.
            activations: the worker's cache; None without one.
            readers: processes that read samples ahead; None without any.
            device: where training runs.
        """
        layout = self.layout
        assert self.groups.pipeline is not None
        spec = StageSpec(
            worker=layout.stage,
            spans=layout.spans,
            owners=layout.owners,
            boundary=state.control.boundary,
            schedule=job.layouts.schedule_of(layout.cut),
            group=self.groups.pipeline,
            device=device,
            dtype=job.dtype,
            autocast=job.autocast,
            recompute=job.spec.training.activation_checkpointing,
            token_slices=job.layouts.token_slices(state.control, layout.cut, layout.pipelines),
        )
        if spec.token_slices:
            logger.info("the longest samples run in slices of %s tokens", ", ".join(map(str, spec.token_slices)))
        units = [state.units[index] for index in layout.units]

        def micro_batches_of(step: int) -> list[MicroBatch]:
            return job.dealer.train(step, layout.pipelines, layout.micro_batch_size)[layout.pipeline]

        self.runner = StageRunner(spec, job.model, units, activations, micro_batches_of, readers)
        self._run_ahead(job, state, cached=activations is not None)
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None  # the old reducer refers to gradients that the committer may replace
        self.reducer = GradientReducer(committer.equip(job, state, layout), state, layout, self.groups)

    def _run_ahead(self, job: Job, state: WorkerState, *, cached: bool) -> None:
        """Let the runner compute frozen forwards one round ahead, if the layout is cut for that.

        Each worker that runs them needs copies of all frozen units. Copies of units that freeze later are missing until
        the next regroup. Until then frozen forwards run in place, as part of their own round.
        """
        cut, boundary = self.layout.cut, state.control.boundary
        ahead = job.layouts.ahead(cut, state.control)
        frozen = 0 if ahead is None else first_trainable(boundary)
        if frozen > self.copied_units:
            logger.info("%d layers are frozen: the frozen forwards run in place until the next regroup", boundary)
            return
        self.copied_units = frozen
        if ahead is None or not frozen:
            return
        held = state.held
        units = [held[unit] for unit in range(frozen)] if self.layout.stage in ahead.holders else []
        self.runner.run_ahead(ahead, units, cached=cached)

    def leave_out_of_pause(self, seconds: float) -> None:
        """Exclude `seconds` from the pause, because they went into work that was needed without the regroup too."""
        self.paused_at += seconds
        self.phases.leave_out(seconds)

    def release(self) -> list[dist.ProcessGroup]:
        """Drop the stage with its units and gradients. Otherwise they would keep their memory, if the frame of an
        exception still refers to this membership.

        Returns:
            All process groups. The caller must drop them.
        """
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None
        vars(self).pop("runner", None)
        return [*self.groups.release(), *self.outgrown]

    def drop_outgrown(self) -> None:
        """Close the process groups of the generation before. This runs in a thread, because each takes up to 20 ms."""
        outgrown, self.outgrown = self.outgrown, []
        threading.Thread(target=drop_all, args=(outgrown,), name="drop-groups").start()


def drop_all(groups: list[dist.ProcessGroup]) -> None:
    """Drop process groups, also those that an exception holds in a reference cycle, and empty the list `groups`."""
    drop_groups(groups)
    gc.collect()
