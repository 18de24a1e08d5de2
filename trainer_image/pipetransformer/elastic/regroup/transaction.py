"""The transaction that takes a worker from one generation to the next.

Rendezvous, groups beside the old ones, inventory, the leader's plan, units into new buffers, and a commit vote of
members and leavers. Until that vote the worker's state and its old groups are as they were, so any failure before it
costs time only. A worker whose connections break during the vote cannot know how it went, so it keeps both what it had
and what it had assembled until the next regroup or round settles the matter. The first generation of a job is the same
path with nothing in the inventory.
"""

import contextlib
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from pipetransformer.elastic.generations.rendezvous import GenerationRendezvousHandler, LeaverError
from pipetransformer.elastic.transport.barrier import Barrier
from pipetransformer.elastic.transport.groups import GenerationGroups, Store, Transport
from pipetransformer.elastic.transport.watchdog import ROUND, Deadline, Watchdog
from pipetransformer.errors import WorkersDifferError
from pipetransformer.hooks import HookPoint, Reached
from pipetransformer.partition import Cut, ModelCosts
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer_contract.messages import Generation, ResizeReason

from .assemble import Assembly, StateSources, units_of
from .from_storage import Alone
from .phases import Phases
from .state_map import MapOf, StateMap, no_map
from .transfer_plan import DurablePoint, Inventory, Origin, TransferPlan, make_plan, who_differs

T = TypeVar("T")

#: The leader's plan in the store; empty where the leader asks the storage before it makes one, or why there is none.
_PLAN = "plan"
_NO_PLAN = "none: "
_PLAN_BY_STORAGE = "plan/by-storage"


class RegroupError(RuntimeError):
    """The generation was not committed here; the worker's state is what it was.

    Attributes:
        in_doubt: what this worker had assembled, if it broke in the vote: others may have committed it.
    """

    def __init__(self, message: str, in_doubt: WorkerState | None = None) -> None:
        super().__init__(message)
        self.in_doubt = in_doubt


@dataclass(frozen=True, slots=True, kw_only=True)
class RegroupTools(StateSources):
    """What a regroup needs besides the worker's state.

    Attributes:
        durable: the newest durable checkpoint; only the leader asks.
        kept_step: the step of the best model that the storage keeps, 0 for none; only the leader asks.
        newest_generation: the highest layout generation in storage or record; only the leader asks.
        cut_at: stages and micro-batches for (boundary, stages, pipelines, measured costs).
        commit_late: commits the pending step as those did who have this control state.
        barrier: behind storage.
        watchdog: ends an attempt that a newer generation has made void, or that takes too long.
        reached: told of moments.
        data: digest of the data, the same on all workers.
        map_of: the map of a regroup that follows a control state.
    """

    handler: GenerationRendezvousHandler
    transport: Transport
    data: str
    durable: Callable[[], DurablePoint | None]
    kept_step: Callable[[], int]
    newest_generation: Callable[[], int]
    cut_at: Callable[[int, int, int, ModelCosts | None], Cut]
    commit_late: Callable[[Control], None]
    barrier: Barrier
    watchdog: Watchdog
    reached: Reached
    map_of: MapOf = no_map


@dataclass(frozen=True, slots=True)
class Regrouped:
    """A committed generation.

    Attributes:
        layout: None for a leaver, which is now free to go.
        transfers: (source, target, bytes) between ranks of the transfer group, all workers'.
        phases: goes on until the first step.
    """

    generation: Generation
    layout: StageLayout | None
    state: WorkerState
    groups: GenerationGroups
    store: Store
    transfers: list[tuple[int, int, int]]
    phases: Phases


def regroup(
    tools: RegroupTools,
    state: WorkerState,
    *,
    in_doubt: WorkerState | None = None,
    pending: int | None,
    in_group: bool,
) -> Regrouped:
    """Meet the next generation, receive what this worker's new role needs, and commit.

    Args:
        tools: see there.
        state: what this worker holds; changed only by a late commit of a step that others have committed.
        in_doubt: what it has assembled for a generation of which it does not know whether others committed it.
        pending: the lasting generation in which this worker got complete gradients of a step that it has not committed;
            None for none.
        in_group: whether its present generation is whole, which others count on in the next one, or for a checkpoint.
            Who is in none leaves the rendezvous of a job that has ended.

    Raises:
        RegroupError: it was not committed, for the reason in `__cause__`.
        WorkersDifferError: on the leader, the job cannot go on: those who hold state see different data, or nobody
            holds any yet.
        RendezvousClosedError: the job has ended.
    """
    handler = tools.handler
    generation = handler.find_next()
    phases = Phases()
    tools.reached(HookPoint.FOUND, generation.layout_generation)
    # All come within a round, and watch each other. A joiner does not know how long an evaluation takes that may be
    # under way, also where it has state in doubt. How long the rest may take, the plan tells.
    handler.patient = not state.units and generation.reason is not ResizeReason.START
    deadline = Deadline(math.inf if handler.patient else tools.watchdog.limit(ROUND))

    def is_void() -> bool:
        return handler.given_up() or deadline.is_past()

    def leaves() -> bool:
        return handler.is_closed() and not in_group

    try:
        with tools.watchdog.watching(handler.connections, lambda: is_void() or leaves()):
            rank, store = _meet(handler)
    except RegroupError:
        if leaves():
            handler.take_leave()
        raise
    phases.lap("rendezvous")
    if handler.patient:
        deadline.put_off(tools.watchdog.limit(ROUND))
    with tools.watchdog.watching(handler.connections, is_void):
        groups = GenerationGroups(connections=handler.connections)
        attempt = _Attempt(tools, state.joined(in_doubt), generation, rank, store, groups, phases, deadline)
        try:
            plan, new_state = attempt.run(pending=pending)
        except (RuntimeError, OSError, LookupError, ValueError) as error:
            attempt.failed.set()
            attempt.groups.drop()
            if len(generation.members) + len(generation.leavers) == 1 and not handler.given_up():
                raise  # there is nobody whose connection could have broken
            message = f"generation {generation.layout_generation} was not committed: {error}"
            raise RegroupError(message, attempt.assembled) from error
    tools.reached(HookPoint.AGREED, generation.layout_generation)
    layout = None
    if attempt.is_member:
        spans = [range(start, stop) for start, stop in plan.spans]
        layout = StageLayout(generation, rank, [(p, s) for p, s in plan.roles], spans, plan.micro_batch_size)
    return Regrouped(
        generation,
        layout,
        new_state,
        attempt.groups,
        store,
        attempt.transfers,
        phases,
    )


def _meet(handler: GenerationRendezvousHandler) -> tuple[int, Store]:
    """Rank in the transfer group, and the generation's store."""
    try:
        info = handler.next_rendezvous()
    except LeaverError as leaving:
        return leaving.rank, leaving.store
    except (RendezvousTimeoutError, RendezvousConnectionError, RendezvousStateError) as error:
        raise RegroupError(f"rendezvous failed: {error}") from error
    return info.rank, info.store


@dataclass(slots=True)
class _Attempt:
    """One try to enter a generation.

    Attributes:
        rank: in the transfer group: members, then leavers.
        deadline: past it the watchdog ends the attempt.
        transfers: (source, target, bytes) of all moves, once they are planned.
        failed: set when it has.
        assembled: the state of the new role, from when all of it is there until everybody has voted.
    """

    tools: RegroupTools
    state: WorkerState
    generation: Generation
    rank: int
    store: Store
    groups: GenerationGroups
    phases: Phases
    deadline: Deadline
    transfers: list[tuple[int, int, int]] = field(default_factory=list)
    failed: threading.Event = field(default_factory=threading.Event)
    assembled: WorkerState | None = None

    @property
    def is_member(self) -> bool:
        return self.rank < len(self.generation.members)

    @property
    def _leads(self) -> bool:
        return self.is_member and self.generation.members[self.rank].name == self.generation.leader

    def run(self, *, pending: int | None) -> tuple[TransferPlan, WorkerState]:
        """Everything from the rendezvous to the vote."""
        tools, number = self.tools, self.generation.layout_generation
        num_members, num_leavers = len(self.generation.members), len(self.generation.leavers)
        tools.reached(HookPoint.MET, number)
        self.groups.meet(self.store, self.rank, num_members, num_leavers, tools.transport)
        self.phases.lap("groups")
        plan = self._agree(pending)
        self.phases.lap("plan")
        self._expect(plan)
        if plan.origin is Origin.PEERS and self.state.units:
            catch_up(self.state, Control.from_dict(plan.control), pending=pending, commit_late=tools.commit_late)
        state_map = tools.map_of(Control.from_dict(plan.control)) if plan.origin is Origin.PEERS else None
        if self.is_member:
            spans = [range(start, stop) for start, stop in plan.spans]
            ties = self.state.ties if state_map is None else state_map.ties
            tied_stages = [tie.stages(spans) for tie in ties.all]
            self.groups.assign(self.store, plan.roles, self.rank, tools.transport, tied_stages)
            self.phases.lap("groups")
        self.assembled = new_state = self._assemble(plan, state_map)
        new_state.control.begin_job(self.generation.job_uid, plan.earlier_generations)
        self.phases.lap("assemble")
        tools.reached(HookPoint.ASSEMBLED, number)
        assert self.groups.transfer is not None
        _commit(self.groups.transfer)
        if self._leads:
            with contextlib.suppress(dist.DistError):  # the generation is committed all the same
                for key in (_PLAN, _PLAN_BY_STORAGE):
                    self.store.delete_key(key)
        self.phases.lap("vote")
        return plan, new_state

    def _assemble(self, plan: TransferPlan, state_map: StateMap | None) -> WorkerState:
        """The state of this worker's new role."""
        tools, state, device = self.tools, self.state, self.tools.transport.device
        assert self.groups.transfer is not None
        if plan.origin not in (Origin.FRESH, Origin.CHECKPOINT):
            return Assembly(
                tools,
                state,
                plan,
                self.rank,
                self.groups.transfer,
                device,
                state_map,
                started=self._moving,
                moved=lambda: self.phases.lap("move"),
            ).assemble()
        self._moving()
        new = WorkerState(state.num_layers, state.ties)
        made = self._pass(Alone(tools, new, plan, units_of(plan, self.rank), device, self.failed.is_set).make)
        assert made is not None
        return made

    def _moving(self) -> None:
        self.tools.reached(HookPoint.MOVING, self.generation.layout_generation)

    def _expect(self, plan: TransferPlan) -> None:
        """Note what will move, and so how long the vote may be away: alike on all, since they wait for each other."""
        if plan.origin in (Origin.FRESH, Origin.CHECKPOINT):
            return  # votes say meanwhile who is still at it
        codec, shells, boundary = self.tools.codec, self.tools.shells, int(plan.control["boundary"])
        sizes = {unit: codec.size(unit, shells[unit], boundary) for unit in {move.unit for move in plan.moves}}
        totals: dict[tuple[int, int], int] = defaultdict(int)
        for move in plan.moves:
            totals[move.source, move.target] += sizes[move.unit]
        self.transfers = [(*pair, size) for pair, size in totals.items()]
        self.deadline.put_off(self.tools.watchdog.limit_to_move(sum(totals.values())))

    def _agree(self, pending: int | None) -> TransferPlan:
        """Tell the leader what this worker brings, and get the plan that the leader makes of everyone's."""
        tools, state, store = self.tools, self.state, self.store
        control = state.control
        inventory = Inventory(
            units=sorted(state.units),
            step=control.step if state.units else -1,
            pending=pending,
            control=control.to_dict(),
            data=tools.data,
            mirrors=tools.mirrors.describe(),
            frozen={index: read.step for index, read in dict(tools.read_ahead).items()},
        )
        store.set(f"inventory/{self.rank}", inventory.model_dump_json())
        if self._leads:
            return self._plan()
        content = store.get(_PLAN).decode()
        if content.startswith(_NO_PLAN):
            raise RegroupError(content.removeprefix(_NO_PLAN))
        if not content:
            self._pass(None)
            content = store.get(_PLAN_BY_STORAGE).decode()
        return TransferPlan.model_validate_json(content)

    def _plan(self) -> TransferPlan:
        """On the leader: the plan, which the others then find in the store."""
        tools, generation, store = self.tools, self.generation, self.store
        total = len(generation.members) + len(generation.leavers)
        inventories = [
            Inventory.model_validate_json(content)
            for content in store.multi_get([f"inventory/{other}" for other in range(total)])
        ]
        for other in range(total):  # the store lives as long as this worker
            store.delete_key(f"inventory/{other}")
        self._compare_data(inventories)
        key, kept_step, earlier_generations = _PLAN, 0, 0

        def ask_storage() -> DurablePoint | None:
            nonlocal key, kept_step, earlier_generations
            store.set(_PLAN, "")
            key = _PLAN_BY_STORAGE
            asked = self._pass(lambda: (tools.durable(), tools.kept_step(), tools.newest_generation()))
            assert asked is not None
            found, kept_step, earlier_generations = asked
            return found

        plan = make_plan(
            inventories,
            len(generation.members),
            lambda boundary, costs: tools.cut_at(boundary, generation.stages, generation.pipelines, costs),
            generation.pipelines,
            len(tools.shells),
            lambda boundary: [tools.codec.size(index, shell, boundary) for index, shell in enumerate(tools.shells)],
            durable=ask_storage,
            map_of=tools.map_of,
        )
        plan.kept_step, plan.earlier_generations = kept_step, earlier_generations
        if plan.control and key == _PLAN_BY_STORAGE:  # an earlier state than the newest, whose best may be gone
            plan.control["kept_step"] = kept_step
        store.set(key, plan.model_dump_json())
        return plan

    def _compare_data(self, inventories: Sequence[Inventory]) -> None:
        """Nobody goes on where members see different data. A joiner ends no job that trains: who holds state goes back
        to where that came from."""
        generation = self.generation
        if not (differing := who_differs(inventories, len(generation.members))):
            return
        advice = (
            "targets or their order differ between processes: seed whatever draws at random for the data, and leave the"
            " checkpoints of a job that trains where they are"
        )
        if any(inventories[rank].units for rank in differing) or not any(each.units for each in inventories):
            raise WorkersDifferError(advice)
        names = ", ".join(generation.members[rank].name for rank in differing)
        why = f"{names} would train on other data than those who train already: {advice}"
        self.store.set(_PLAN, _NO_PLAN + why)
        raise RegroupError(why)

    def _pass(self, work: Callable[[], T] | None) -> T | None:
        """Do what takes nobody knows how long, in a thread, while all participants vote on whether anybody is still at
        it."""
        transfer = self.groups.transfer
        assert transfer is not None
        return self.tools.barrier.pass_within(work, transfer, self.deadline)


def catch_up(
    state: WorkerState, control: Control, *, pending: int | None, commit_late: Callable[[Control], None]
) -> None:
    """Do what others have done and this worker broke before: commit the step, decide what follows it. What it sends is
    then as those expect it who have. A worker that is further behind, or has done the step in another generation, is
    sent all that it needs, and gives nothing.

    Args:
        state: of this worker.
        control: what the plan goes on from.
        pending: the lasting generation in which this worker got complete gradients of the step after its last.
        commit_late: see `RegroupTools`.
    """
    present = state.control
    if (present.step + 1, pending) == control.point:
        commit_late(control)
    elif present.point == control.point and present.decided_step != control.decided_step:
        state.go_on_from(control)


def _commit(transfer: dist.ProcessGroup) -> None:
    """Members and leavers say that they have all they need; after this nobody goes back."""
    votes = torch.ones(1, dtype=torch.float32)
    dist.all_reduce(votes, group=transfer)
    if int(votes.item()) != transfer.size():
        raise RegroupError(f"{int(votes.item())} of {transfer.size()} participants are ready")
