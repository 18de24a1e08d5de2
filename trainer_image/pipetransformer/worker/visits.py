"""Takes a worker from one visit to the next: with `multiLevel`, a visit is the period in which one level trains.

A visit ends at a step that the spec fixes. If all members hold the next model, they change the level within their
generation. Otherwise the next generation begins the visit.
"""

from contextlib import ExitStack
from enum import Enum

from pipetransformer.checkpoint.level_weights import LevelWeights
from pipetransformer.checkpoint.weights_saving import WeightsSaving
from pipetransformer.elastic.regroup.agreement import RegroupError
from pipetransformer.elastic.regroup.state_map import StateMap
from pipetransformer.elastic.regroup.tools import RegroupTools
from pipetransformer.elastic.regroup.transaction import Regrouped, change_level
from pipetransformer.elastic.transport.watchdog import ROUND
from pipetransformer.errors import fault_of
from pipetransformer.job.levels import next_level
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.training.between_rounds import BetweenRounds
from pipetransformer.training.clock import wall_clock
from pipetransformer.training.kit import Kit
from pipetransformer.training.membership import Membership
from pipetransformer.training.round import Rounds

#: Steps before a level change during which weights that the next level kept are read. They take host memory meanwhile.
_READ_AHEAD_STEPS = 10


class Instead(Enum):
    """What a worker does if its level did not change."""

    LEAVE = "Leave"  #: a member was told to stop
    REGROUP = "Regroup"  #: a newer generation exists, which begins the visit
    WAIT = "Wait"  #: the job waits for longer pipelines: ask again


class Visits:
    """Ends and begins visits on one worker, through all generations."""

    def __init__(self, kit: Kit, rounds: Rounds, between: BetweenRounds) -> None:
        self._kit, self._rounds, self._between = kit, rounds, between
        self._weights = LevelWeights(kit.job)

    def map_of(self, control: Control, stages: int) -> StateMap | None:
        """Implements `RegroupTools.map_of`."""
        return next_level(self._kit.job, self._weights, control, stages)

    def read_ahead(self, control: Control, layout: StageLayout) -> None:
        """In the last steps before the model grows, begin to read what the next level keeps of this worker's units."""
        job = self._kit.job
        larger, multi_level = job.grows_into(control.visit), job.spec.multi_level
        if larger is None or multi_level is None or multi_level.alpha == 1 or not larger.layouts.fits(layout.stages):
            return
        if control.step >= job.visits[control.visit].end - _READ_AHEAD_STEPS:
            cut = larger.layouts.cut(0, layout.stages, layout.pipelines, None)
            self._weights.read_ahead(larger.level, cut.held_by(layout.stage))

    def forget(self) -> None:
        """Forget what was read ahead."""
        self._weights.forget()

    def begin_next(self, tools: RegroupTools, state: WorkerState, member: Membership) -> Regrouped | Instead:
        """Begin the next visit. If its model is larger and does not fit, make no step until a generation comes whose
        pipelines hold it, so that what is trained never depends on the cluster.

        Raises:
            RuntimeError: the change of the level failed. Then the next generation begins the visit.
            StorageError: the kept weights cannot be written or read.
        """
        kit, between = self._kit, self._between
        larger = kit.job.grows_into(state.control.visit)
        fits = larger is None or larger.layouts.fits(member.layout.stages)
        saving = between.begin_to_keep(state, member) if fits else None
        with ExitStack() as unless_used:
            if saving is not None:
                unless_used.callback(saving.cancel)
            with kit.watchdog.timing("agreement", member.groups.connections, ROUND):
                vote = self._rounds.agree(state.control, member, waits=not fits)
            if not vote.leaving:
                unless_used.pop_all()
        if vote.leaving:
            return Instead.LEAVE
        if vote.saw_next:  # with the next visit, if the larger model fits
            ends = fits and between.end_visit(state, member, saving)
            return Instead.REGROUP if ends or not fits else Instead.LEAVE
        if fits:
            return self._change_level(tools, state, member, saving)
        between.continue_saving(state, member, vote)
        state.control.round_ended_at = wall_clock()  # the wait is no part of the pause that ends it
        return Instead.WAIT

    def _change_level(
        self, tools: RegroupTools, state: WorkerState, member: Membership, saving: WeightsSaving | None
    ) -> Regrouped | Instead:
        """Begin the next visit, with another level's model, in the same generation.

        Args:
            tools: what this worker regroups with.
            state: what this worker holds.
            member: of the generation.
            saving: saves the weights that the level needs when it returns; None if they need not be saved.

        Raises:
            RuntimeError: it failed, so the generation is over.
        """
        control, committer = state.control, self._kit.committer
        control.visit_done = True  # the plan needs this
        try:
            result = change_level(tools, state, committer, member.layout, member.store, member.groups, saving)
        except RegroupError as error:
            if fault := fault_of(error, in_regroup=True):
                raise fault from fault.__cause__
            committer.doubt(error.in_doubt)
            raise
        finally:
            # If the change failed, a regroup may leave this level only if its weights are durable.
            control.visit_done = saving is None or saving.is_durable
        return Instead.LEAVE if result is None else result
