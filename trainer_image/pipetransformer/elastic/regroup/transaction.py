"""Takes a worker from one generation to the next, as a transaction. A job's first generation takes the same path.

The workers meet, make groups beside the old ones, and agree on the leader's plan. They follow it: they move units into
new buffers, and vote. A failure before the vote costs only time, because state and old groups are unchanged. But if the
plan returns to an earlier state, the present one is dropped first. A worker whose connections break in the vote cannot
know its result. It keeps both its old and its assembled state, until the next regroup or round shows which one counts.
"""

import math
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from pipetransformer.elastic.generations.rendezvous import GenerationRendezvousHandler, LeaverError
from pipetransformer.elastic.transport.barrier import Work
from pipetransformer.elastic.transport.exchange import Exchange
from pipetransformer.elastic.transport.groups import GenerationGroups, PrefixStore, Store
from pipetransformer.elastic.transport.watchdog import ROUND, Deadline
from pipetransformer.hooks import HookPoint
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer_contract.messages import Generation, ResizeReason

from .agreement import Agreement, RegroupError
from .assemble import Assembly, units_of
from .from_storage import AssemblyWithoutPeers
from .phases import Phases
from .state_map import StateMap
from .tools import Precondition, RegroupTools, Unsettled
from .transfer import TransferListener
from .transfer_plan import Origin, TransferPlan

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Regrouped:
    """A committed generation, on this worker.

    Attributes:
        generation: the generation.
        layout: this worker's part of the layout; None for a leaver, which may now leave.
        state: the state of this worker's new role.
        groups: process groups of the generation.
        store: key-value store that all participants of the generation share.
        transfers: (source rank, target rank, bytes) of the state that moved, for each pair of participants.
        phases: seconds of the regroup by phase. The caller adds the first step.
    """

    generation: Generation
    layout: StageLayout | None
    state: WorkerState
    groups: GenerationGroups
    store: Store
    transfers: list[tuple[int, int, int]]
    phases: Phases


def regroup(tools: RegroupTools, state: WorkerState, unsettled: Unsettled, *, in_group: bool) -> Regrouped:
    """Wait for the next generation, meet its participants, get the state of this worker's new role, and commit.

    Args:
        tools: what this worker regroups with.
        state: what this worker holds. It changes if this worker catches up with others (`_catch_up`). It is dropped if
            the plan returns to an earlier state.
        unsettled: work that other workers may have committed.
        in_group: whether the present generation is whole, so that its members rely on this worker. If not, this worker
            leaves the rendezvous once the job has ended, and may drop its state.

    Raises:
        RegroupError: this worker did not commit the generation; `__cause__` has the reason.
        WorkersDifferError: raised on the leader only. The job cannot continue, because workers that hold state see
            different data. Or no worker holds state yet, and the members see different data.
        RendezvousClosedError: the job has ended.
        StorageError: the storage cannot be read.
        RuntimeError, OSError, LookupError, ValueError: the attempt failed, and this worker is the only participant.
    """
    handler = tools.handler
    generation = handler.find_next()
    phases = Phases()
    tools.hooks.on_point(HookPoint.FOUND, generation.layout_generation)
    # Members come within the time of a round. A joiner cannot know how long they take, because they may be evaluating.
    # So a joiner waits without a limit, also if it has state in doubt. After the rendezvous there is a limit again.
    handler.patient = not state.units and generation.reason is not ResizeReason.START
    deadline = Deadline("regroup", math.inf if handler.patient else tools.watchdog.limit(ROUND))
    rank, store = _rendezvous(tools, deadline, in_group=in_group)
    phases.lap("rendezvous")
    if handler.patient:
        deadline.put_off(tools.watchdog.limit(ROUND))
    with tools.watchdog.watching(handler.connections, _AttemptLimit(handler, deadline)):
        groups = GenerationGroups(connections=handler.connections)
        attempt = _Attempt(
            tools, state, unsettled, generation, rank, store, groups, phases, deadline, in_group=in_group
        )  # fmt: skip
        return attempt.enter()


def change_level(
    tools: RegroupTools,
    state: WorkerState,
    unsettled: Unsettled,
    layout: StageLayout,
    store: Store,
    present: GenerationGroups,
    precondition: Precondition | None,
) -> Regrouped | None:
    """Begin the next visit of the job's levels within the present generation. All its members call this.

    They do the same as in a regroup after they have met: plan with the map to the next level's units, make the groups
    that the plan asks for, move units into new buffers, and vote. The number of the generation stays the same.

    Args:
        tools: what this worker regroups with.
        state: what this worker holds. It is not changed.
        unsettled: work that other workers may have committed. Empty unless an earlier change broke.
        layout: the present layout.
        store: the store of the present generation.
        present: the groups of the present generation. The members meet in its `world`, which the result shares.
        precondition: what the members wait for before they vote; None if they wait for nothing.

    Returns:
        The generation with the new state. None if the precondition cannot be met; then nothing has changed.

    Raises:
        RegroupError: this worker did not commit the change; `__cause__` has the reason. `world` is dropped.
        StorageError: the storage cannot be read.
        RuntimeError, OSError, LookupError, ValueError: the attempt failed, and this worker is the only member.
    """
    members_alone = layout.generation.model_copy(update={"leavers": []})
    own_keys = PrefixStore(f"visit-{state.control.visit + 1}", store)
    deadline = Deadline("level change", tools.watchdog.limit(ROUND))
    with tools.watchdog.watching(present.connections, _AttemptLimit(tools.handler, deadline)):
        groups = present.with_new_roles()
        attempt = _Attempt(
            tools, state, unsettled, members_alone, layout.rank, own_keys, groups, Phases(), deadline, precondition
        )  # fmt: skip
        try:
            return attempt.enter()
        except _UnmetError:
            pass
    present.undo_new_roles(groups)
    return None


class _UnmetError(Exception):
    """The precondition of a level change cannot be met. All members raise this before they vote."""


@dataclass(frozen=True, slots=True)
class _AttemptLimit:
    """Ends an attempt once a newer generation is published or the deadline is past. Implements `Limit`.

    Attributes:
        handler: knows of newer generations, and whether the job has ended.
        deadline: when the attempt ends.
        leaves_a_closed_job: whether the end of the job ends the attempt, too.
    """

    handler: GenerationRendezvousHandler
    deadline: Deadline
    leaves_a_closed_job: bool = False

    def why_past(self) -> str:
        if self.handler.is_superseded():
            return "a newer generation is published"
        return self.deadline.why_past() or ("the job has ended" if self.leaves else "")

    @property
    def leaves(self) -> bool:
        """Whether this worker leaves the rendezvous, because the job has ended and no group relies on this worker."""
        return self.leaves_a_closed_job and self.handler.is_closed()


def _rendezvous(tools: RegroupTools, deadline: Deadline, *, in_group: bool) -> tuple[int, Store]:
    """Meet the other participants. If this worker leaves instead, it tells them so in the generation's store.

    Returns:
        The rank among the participants, and the generation's store.

    Raises:
        RegroupError: the rendezvous failed.
    """
    handler = tools.handler
    limit = _AttemptLimit(handler, deadline, leaves_a_closed_job=not in_group)
    try:
        with tools.watchdog.watching(handler.connections, limit):
            return _meet(handler)
    except RegroupError:
        if limit.leaves:
            handler.take_leave()
        raise


def _meet(handler: GenerationRendezvousHandler) -> tuple[int, Store]:
    """Meet the other participants. Returns as `_rendezvous` does."""
    try:
        info = handler.next_rendezvous()
    except LeaverError as leaving:
        return leaving.rank, leaving.store
    except (RendezvousTimeoutError, RendezvousConnectionError, RendezvousStateError) as error:
        raise RegroupError(f"rendezvous failed: {error}") from error
    return info.rank, info.store


@dataclass(slots=True)
class _Attempt(TransferListener):
    """One attempt of a worker to enter a generation, or the next visit within its generation.

    Attributes:
        tools: what this worker regroups with. Once there is a plan, for the model that the plan starts from.
        state: what this worker holds. Once there is a plan, what it holds of that model.
        unsettled: work that other workers may have committed.
        generation: the generation.
        rank: rank among the participants: the members come first, then the leavers.
        store: key-value store that all participants share.
        groups: process groups of the generation, made in the attempt. A level change begins with those of the members.
        phases: times the attempt.
        deadline: when the watchdog ends the attempt.
        precondition: what the members of a level change wait for before they vote; otherwise None.
        in_group: as for `regroup`.
        transfers: (source rank, target rank, bytes) for each pair of ranks between which units move.
        failed: set when the attempt has failed.
        assembled: the state of the new role; None until this worker votes.
    """

    tools: RegroupTools
    state: WorkerState
    unsettled: Unsettled
    generation: Generation
    rank: int
    store: Store
    groups: GenerationGroups
    phases: Phases
    deadline: Deadline
    precondition: Precondition | None = None
    in_group: bool = True
    transfers: list[tuple[int, int, int]] = field(default_factory=list)
    failed: threading.Event = field(default_factory=threading.Event)
    assembled: WorkerState | None = None

    @property
    def is_member(self) -> bool:
        return self.rank < len(self.generation.members)

    def enter(self) -> Regrouped:
        """Do everything after the rendezvous. Raises as `regroup` does."""
        generation, handler = self.generation, self.tools.handler
        try:
            plan, new_state = self._run()
        except (RuntimeError, OSError, LookupError, ValueError) as error:
            self.failed.set()
            self.groups.drop()
            if len(generation.members) + len(generation.leavers) == 1 and not handler.is_superseded():
                raise  # without other workers, no connection can have broken
            message = f"generation {generation.layout_generation} was not committed: {error}"
            raise RegroupError(message, self.assembled) from error
        self.tools.hooks.on_point(HookPoint.AGREED, generation.layout_generation)
        layout = None
        if self.is_member:
            layout = StageLayout(generation, self.rank, [(p, s) for p, s in plan.roles], plan.cut)
        return Regrouped(generation, layout, new_state, self.groups, self.store, self.transfers, self.phases)

    def _run(self) -> tuple[TransferPlan, WorkerState]:
        """Do everything after the rendezvous, up to and including the vote. Returns the plan and the new state."""
        tools, number = self.tools, self.generation.layout_generation
        own = self.state
        self.state = own.joined(self.unsettled.in_doubt)
        only_in_doubt = self.state.held.keys() - own.held.keys()
        # Make the groups that do not depend on the plan. A level change has them.
        num_members, num_leavers = len(self.generation.members), len(self.generation.leavers)
        tools.hooks.on_point(HookPoint.MET, number)
        if self.groups.world is None:
            self.groups.meet(self.store, self.rank, num_members, num_leavers, tools.transport)
        self.phases.lap("groups")
        # Agree on a plan. Use the model that it starts from, and catch up with the state that it starts from.
        agreement = Agreement(tools, self.generation, self.rank, self.store, self.groups, self.deadline)
        plan = agreement.reach(self.state, self.unsettled, only_in_doubt, self._doubted)
        self.phases.lap("plan")
        tools = self._turn_to(plan)
        state_map = None
        if plan.origin is Origin.PEERS:
            state_map = tools.map_of(Control.from_dict(plan.control), self.generation.stages)
        self._expect(plan, state_map)
        if plan.origin is Origin.PEERS and self.state.units:
            self.state = _catch_up(own, self.state, Control.from_dict(plan.control), self.unsettled)
        # Make the groups that depend on the plan.
        if any(move.source >= num_members for move in plan.moves):
            self.groups.take_in_leavers(self.store, self.rank, num_members + num_leavers, tools.transport)
        if self.is_member:
            ties = tools.codec.ties if state_map is None else state_map.ties
            tied_stages = [tie.stages(plan.cut.units_by_stage) for tie in ties.all]
            self.groups.assign(self.store, plan.roles, self.rank, tools.transport, tied_stages, plan.cut.pairs)
            self.phases.lap("groups")
        # Assemble the state of the new role, and commit.
        new_state = self._assemble(plan, state_map, own)
        new_state.control.begin_job(self.generation.job_uid, plan.earlier_generations, self.generation.layout)
        self.phases.lap("assemble")
        tools.hooks.on_point(HookPoint.ASSEMBLED, number)
        if self.precondition is not None:
            exchange, deadline = self.groups.participants, self.deadline
            sum_barrier = partial(tools.barrier.sum_within, exchange=exchange, deadline=deadline)
            if not self.precondition.wait(sum_barrier):
                raise _UnmetError
            self.phases.lap("keep")
        self.assembled = new_state
        _commit(self.groups.participants)
        agreement.forget_plan()
        self.phases.lap("vote")
        return plan, new_state

    def _turn_to(self, plan: TransferPlan) -> RegroupTools:
        """Switch to the model that the plan starts from, and to what this worker holds of it. Returns the tools."""
        self.tools = self.tools.at(plan.visit)
        if (doubted := self._doubted) is not None and doubted.control.visit == plan.visit:
            self.state = doubted
        return self.tools

    @property
    def _doubted(self) -> WorkerState | None:
        """The state in doubt if it is another model than `state`, at the same step; otherwise None. This worker made it
        in a level change whose vote broke."""
        doubted, control = self.unsettled.in_doubt, self.state.control
        if doubted is None or not doubted.units or doubted.control.point == control.point:
            return None
        return doubted if doubted.control.point[:-1] == control.point[:-1] else None

    def _assemble(self, plan: TransferPlan, state_map: StateMap | None, own: WorkerState) -> WorkerState:
        """Return the state of this worker's new role: from other workers, from the seed or from a checkpoint."""
        tools, state, device = self.tools, self.state, self.tools.transport.device
        if state_map is not None:
            self.pass_barrier(partial(state_map.prepare, units_of(plan, self.rank)))
        # The participants lack units of the present state, and its memory is needed.
        if plan.origin is not Origin.PEERS and not self.in_group:
            self.unsettled.drop(own)
            state.drop_units()
        if plan.origin not in (Origin.FRESH, Origin.CHECKPOINT):
            transfer = self.groups.transfer
            return Assembly(tools, state, plan, self.rank, transfer, device, state_map, listener=self).assemble()
        self.on_started()
        made = self.pass_barrier(AssemblyWithoutPeers(tools, plan, self.rank, device, self.failed).assemble)
        assert made is not None
        return made

    def on_started(self) -> None:
        self.tools.hooks.on_point(HookPoint.MOVING, self.generation.layout_generation)

    def on_moved(self) -> None:
        self.phases.lap("move")

    def _expect(self, plan: TransferPlan, state_map: StateMap | None) -> None:
        """Note what will move, and put the deadline off for it. All workers set the same deadline, because they wait
        for each other."""
        if plan.origin in (Origin.FRESH, Origin.CHECKPOINT):
            return  # the barrier puts the deadline off while a worker still reads
        codec, shells = self.tools.codec_for(state_map), self.tools.shells
        boundary = int(plan.control["boundary"])
        sizes = {unit: codec.size(unit, shells[unit], boundary) for unit in {move.unit for move in plan.moves}}
        totals: dict[tuple[int, int], int] = defaultdict(int)
        for move in plan.moves:
            totals[move.source, move.target] += sizes[move.unit]
        self.transfers = [(*pair, size) for pair, size in totals.items()]
        self.deadline.put_off(self.tools.watchdog.limit_to_move(sum(totals.values())))

    def pass_barrier(self, work: Work[T] | None) -> T | None:
        """Do `work` in a thread and return its result. Meanwhile all participants, which all call this, wait."""
        return self.tools.barrier.pass_within(work, self.groups.participants, self.deadline)


def _catch_up(own: WorkerState, joined: WorkerState, control: Control, unsettled: Unsettled) -> WorkerState:
    """Bring this worker up to `control` if it lacks only the end of a round, so that it can send its units.

    If other workers have committed this worker's pending steps as the last steps of `control`, it commits them too. If
    it has committed all steps but missed the decision after them, it takes over `control`. A worker that is further
    behind does not change: it sends nothing, and receives all units that it needs.

    Args:
        own: what this worker trained last. The pending steps are of this state.
        joined: `own` with the state in doubt.
        control: the control state that the plan starts from.
        unsettled: has the pending steps of this worker, if there are any.

    Returns:
        What this worker holds now: `own` after a late commit, because units in doubt lack the pending steps. Otherwise
        `joined`.
    """
    present = joined.control
    if (present.step + unsettled.pending_steps, unsettled.pending, present.visit) == control.point:
        unsettled.commit_late(own, control)
        return own
    if present.point == control.point and present.decided_step != control.decided_step:
        joined.take_over(control)
    return joined


def _commit(participants: Exchange) -> None:
    """Vote for the generation. A participant calls this once it has all that it needs. The vote commits the generation.

    Raises:
        RuntimeError: a connection broke.
    """
    participants.gather([1.0])
