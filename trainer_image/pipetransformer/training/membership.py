"""What a worker holds while it belongs to a generation, and how it releases it."""

import gc
import logging
import threading
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from pipetransformer.cache import ActivationCache
from pipetransformer.data import Readers
from pipetransformer.elastic.regroup.phases import Phases
from pipetransformer.elastic.transport.exchange import BALLOTS, Exchange
from pipetransformer.elastic.transport.groups import GenerationGroups, Store, drop_group
from pipetransformer.freeze.boundary import first_trainable
from pipetransformer.job.job import Job
from pipetransformer.pipeline import StageRunner, StageSpec
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState

from .commit import Committer
from .gradient_reduction import GradientReducer
from .leader import Leader
from .vote import Vote

logger = logging.getLogger(__name__)


@dataclass
class Membership:
    """Begins when a generation is committed. Ends when the next one is committed or the group breaks.

    Attributes:
        layout: of the generation.
        groups: of the generation.
        store: of the generation.
        transfers: (source, target, bytes) of the state that moved for this generation.
        phases: times of the regroup, up to the first step.
        paused_at: wall clock at the start of the pause: the end of the last step before the generation, or at a start
            the time when this worker knew of it.
        first_step: steps that were committed before the generation.
        outgrown: groups of the generation before, until `drop_outgrown`.
        most_steps: most steps of a round.
        level_change: whether it continues the generation with another level's model.
        stepped: whether the generation has committed a step.
        placed_for: `Control.cached_layers` when units were last moved off the device or back.
        leader: None except on the leader.
        ballots: exchange of the votes.
        runner: runs the stage; made by `equip`.
        reducer: sums gradients; made by `equip`.
        copied_units: number of leading units that have been frozen since the generation began, up to those that its
            holders have copies of.
    """

    layout: StageLayout
    groups: GenerationGroups
    store: Store
    transfers: list[tuple[int, int, int]]
    phases: Phases
    paused_at: float
    first_step: int
    outgrown: list[dist.ProcessGroup]
    most_steps: int = 1
    level_change: bool = False
    stepped: bool = False
    placed_for: int = 0
    leader: Leader | None = None
    ballots: Exchange = field(init=False)
    runner: StageRunner = field(init=False)
    reducer: GradientReducer | None = None
    copied_units: int = field(init=False)

    def __post_init__(self) -> None:
        self.copied_units = self.layout.cut.ahead_units
        self.ballots = Exchange(self.world, Vote.length(self.layout.cut.num_units, self.most_steps), BALLOTS)

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
        """Make what depends on the present boundary: the runner, the optimizer and the reduction of gradients. Nothing
        is sent or received.

        Args:
            job: the job that trains.
            state: holds the units of the stage.
            committer: holds the optimizer.
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
            schedule=job.schedule_of(layout.cut),
            group=self.groups.pipeline,
            device=device,
            dtype=job.dtype,
            autocast=job.autocast,
            recompute=job.spec.training.activation_checkpointing,
            token_slices=job.token_slices(state.control, layout.cut, layout.pipelines),
        )
        if spec.token_slices:
            logger.info("the longest samples run in slices of %s tokens", ", ".join(map(str, spec.token_slices)))
        units = [state.units[index] for index in layout.units]
        self.runner = StageRunner(
            spec, job.model, units, activations, lambda step: job.training_share(step, layout), readers
        )
        self._run_ahead(job, state, cached=activations is not None)
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None  # it refers to gradients that the committer may replace
        self.reducer = GradientReducer(committer.equip(job, state, layout), state, layout, self.groups)

    def _run_ahead(self, job: Job, state: WorkerState, *, cached: bool) -> None:
        """Let the runner compute frozen forwards one round ahead, if the layout wants it and all holders have all
        frozen units. After a freeze they lack some, so forwards run in place until the next regroup."""
        cut, boundary = self.layout.cut, state.control.boundary
        ahead = job.ahead(cut, state.control)
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
        """Exclude `seconds` from the pause, for work that was needed without the regroup too."""
        self.paused_at += seconds
        self.phases.leave_out(seconds)

    def release(self) -> list[dist.ProcessGroup]:
        """Drop the stage with its units and gradients, because a frame may still refer to this membership. Returns all
        groups, for the caller to drop."""
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None
        del self.ballots  # it has a reference
        vars(self).pop("runner", None)
        return [*self.groups.release(), *self.outgrown]

    def drop_outgrown(self) -> None:
        """Drop the groups of the generation before, in a thread: each takes up to 20 ms to close."""
        outgrown, self.outgrown = self.outgrown, []
        threading.Thread(target=drop_groups, args=(outgrown,), name="drop-groups").start()


def drop_groups(groups: list[dist.ProcessGroup]) -> None:
    """Drop groups. The caller must keep no other reference, because sockets close with the last one."""
    while groups:
        drop_group(groups.pop())
    gc.collect()  # an exception may keep one of them in a reference cycle
