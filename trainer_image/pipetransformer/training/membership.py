"""What a worker has while it belongs to a generation, and how it lets go of it."""

import gc
import threading
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from pipetransformer.cache import ActivationCache
from pipetransformer.data import Readers
from pipetransformer.elastic.regroup.phases import Phases
from pipetransformer.elastic.transport.exchange import BALLOTS, Exchange
from pipetransformer.elastic.transport.groups import GenerationGroups, Store, drop_group
from pipetransformer.job.job import Job
from pipetransformer.pipeline import StageRunner, StageSpec
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState

from .commit import Committer
from .gradient_reduction import GradientReducer
from .leader import Leader
from .vote import Vote


@dataclass
class Membership:
    """Begins when a generation is committed, ends when the next one is or when it breaks.

    Attributes:
        leader: None on all workers but one.
        transfers: (source, target, bytes) of the state that moved for this generation.
        phases: of its regroup; they end with its first step.
        paused_at: wall clock from which its pause counts: the end of the last step before it; at a start, when this
            worker knew of it.
        first_step: steps that were committed before it.
        outgrown: groups that it came from, until `drop_outgrown`.
        stepped: whether it has committed a step.
        ballots: of its votes.
        runner, reducer: made by `equip`.
    """

    layout: StageLayout
    groups: GenerationGroups
    store: Store
    transfers: list[tuple[int, int, int]]
    phases: Phases
    paused_at: float
    first_step: int
    outgrown: list[dist.ProcessGroup]
    stepped: bool = False
    leader: Leader | None = None
    ballots: Exchange = field(init=False)
    runner: StageRunner = field(init=False)
    reducer: GradientReducer | None = None

    def __post_init__(self) -> None:
        self.ballots = Exchange(self.world, Vote.length(self.layout.spans[-1].stop), BALLOTS)

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
        """Make what depends on the present boundary: the runner, the optimizer, the reduction of gradients. Nothing is
        sent or received.

        Args:
            job: of all generations.
            state: that trains.
            committer: of the worker, which has the optimizer.
            activations: the worker's cache.
            readers: of its samples.
            device: of training.
        """
        layout = self.layout
        assert self.groups.pipeline is not None
        spec = StageSpec(
            stage=layout.stage,
            stages=layout.stages,
            span=layout.span,
            boundary=state.control.boundary,
            schedule=job.schedule,
            group=self.groups.pipeline,
            device=device,
            dtype=job.dtype,
            autocast=job.autocast,
            recompute=job.spec.training.activation_checkpointing,
        )
        units = [state.units[index] for index in layout.span]
        self.runner = StageRunner(
            spec, job.model, units, activations, lambda step: job.training_samples(step, layout), readers
        )
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None  # it refers to gradients that the committer may replace
        self.reducer = GradientReducer(committer.equip(state, layout), state, layout, self.groups)
        if self.reducer.sums:
            self.runner.tell(self.reducer.passed)

    def leave_out_of_pause(self, seconds: float) -> None:
        """What took so long before the first step of the generation would have had to be done without it, too."""
        self.paused_at += seconds
        self.phases.leave_out(seconds)

    def release(self) -> list[dist.ProcessGroup]:
        """Let go of the stage with its units and gradients, because a frame may still refer to this; and of all groups,
        which the caller drops."""
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None
        del self.ballots  # it has a reference
        vars(self).pop("runner", None)
        return [*self.groups.release(), *self.outgrown]

    def drop_outgrown(self) -> None:
        """Drop the groups that the generation came from. Each takes up to 20 ms to close, so a thread does it, and not
        in the pause."""
        outgrown, self.outgrown = self.outgrown, []
        threading.Thread(target=drop_groups, args=(outgrown,), name="drop-groups").start()


def drop_groups(groups: list[dist.ProcessGroup]) -> None:
    """Drop groups, of which the caller keeps no other reference: their sockets close with the last one."""
    while groups:
        drop_group(groups.pop())
    gc.collect()  # what broke in the middle may hang in a cycle with one of them
