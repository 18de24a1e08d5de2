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
from pathlib import Path
from typing import Protocol, TypeVar

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
from pipetransformer.hooks import HookPoint, Hooks
from pipetransformer.partition import Cut, ModelCosts
from pipetransformer.record import newest_generation
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer_contract.messages import Generation, ResizeReason

from .assemble import Assembly, CheckpointReader, StateSources, UnitMaker, units_of
from .from_storage import Alone
from .phases import Phases
from .state_map import MapOf, StateMap, no_map
from .transfer import Progress
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


class ElasticJob(UnitMaker, Protocol):
    """What a regroup needs of a job; `job.Job`."""

    @property
    def data_digest(self) -> str:
        """Of the data, the same on all workers."""
        ...

    def cut(self, boundary: int, stages: int, pipelines: int, costs: ModelCosts | None) -> Cut:
        """Stages and micro-batches of a layout."""
        ...


class RegroupStorage(CheckpointReader, Protocol):
    """What only the leader asks the storage, and only when a unit is lost; `checkpoint.Checkpointer`."""

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
    """Work of this worker of which it does not know whether others have committed it."""

    @property
    def pending(self) -> int | None:
        """The lasting generation in which this worker got complete gradients of a step that it has not committed; None
        for none."""
        ...

    @property
    def in_doubt(self) -> WorkerState | None:
        """The state that it has assembled for a generation whose vote broke."""
        ...

    def commit_late(self, control: Control) -> None:
        """Commit the pending step as the workers did that have this control state."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RegroupTools(StateSources):
    """A worker's means to regroup, the same for all its generations.

    Attributes:
        handler: meets the members of a generation.
        transport: reaches them.
        job: that trains.
        checkpoints: asked when a unit is lost.
        run_dir: of the record, which knows the generations of earlier jobs.
        barrier: behind storage.
        watchdog: ends an attempt that a newer generation has made void, or that takes too long.
        hooks: told of points.
        map_of: the map of a regroup that follows a control state.
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


def regroup(tools: RegroupTools, state: WorkerState, unsettled: Unsettled, *, in_group: bool) -> Regrouped:
    """Meet the next generation, receive what this worker's new role needs, and commit.

    Args:
        tools: see there.
        state: what this worker holds; changed only by a late commit of a step that others have committed.
        unsettled: what this worker does not know the end of.
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
    tools.hooks.on_point(HookPoint.FOUND, generation.layout_generation)
    # All come within a round, and watch each other. A joiner does not know how long an evaluation takes that may be
    # under way, also where it has state in doubt. How long the rest may take, the plan tells.
    handler.patient = not state.units and generation.reason is not ResizeReason.START
    deadline = Deadline(math.inf if handler.patient else tools.watchdog.limit(ROUND))
    rank, store = _rendezvous(tools, deadline, in_group=in_group)
    phases.lap("rendezvous")
    if handler.patient:
        deadline.put_off(tools.watchdog.limit(ROUND))
    with tools.watchdog.watching(handler.connections, _Void(handler, deadline)):
        groups = GenerationGroups(connections=handler.connections)
        joined = state.joined(unsettled.in_doubt)
        attempt = _Attempt(tools, joined, unsettled, generation, rank, store, groups, phases, deadline)
        try:
            plan, new_state = attempt.run()
        except (RuntimeError, OSError, LookupError, ValueError) as error:
            attempt.failed.set()
            attempt.groups.drop()
            if len(generation.members) + len(generation.leavers) == 1 and not handler.given_up():
                raise  # there is no other worker whose connection could have broken
            message = f"generation {generation.layout_generation} was not committed: {error}"
            raise RegroupError(message, attempt.assembled) from error
    tools.hooks.on_point(HookPoint.AGREED, generation.layout_generation)
    layout = None
    if attempt.is_member:
        spans = [range(start, stop) for start, stop in plan.spans]
        layout = StageLayout(generation, rank, [(p, s) for p, s in plan.roles], spans, plan.micro_batch_size)
    return Regrouped(generation, layout, new_state, attempt.groups, store, attempt.transfers, phases)


@dataclass(frozen=True, slots=True)
class _Void:
    """Whether an attempt is not worth going on with: a newer generation is published, or it takes too long."""

    handler: GenerationRendezvousHandler
    deadline: Deadline
    leaves_a_closed_job: bool = False

    def is_past(self) -> bool:
        return self.handler.given_up() or self.deadline.is_past() or self.leaves

    @property
    def leaves(self) -> bool:
        """Whether this worker leaves the rendezvous, because the job has ended and no group counts on it."""
        return self.leaves_a_closed_job and self.handler.is_closed()


def _rendezvous(tools: RegroupTools, deadline: Deadline, *, in_group: bool) -> tuple[int, Store]:
    """Meet the others. A worker that leaves instead says so in the generation's store."""
    handler = tools.handler
    void = _Void(handler, deadline, leaves_a_closed_job=not in_group)
    try:
        with tools.watchdog.watching(handler.connections, void):
            return _meet(handler)
    except RegroupError:
        if void.leaves:
            handler.take_leave()
        raise


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
class _Attempt(Progress):
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
    unsettled: Unsettled
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

    def run(self) -> tuple[TransferPlan, WorkerState]:
        """Everything from the rendezvous to the vote."""
        tools, number = self.tools, self.generation.layout_generation
        num_members, num_leavers = len(self.generation.members), len(self.generation.leavers)
        tools.hooks.on_point(HookPoint.MET, number)
        self.groups.meet(self.store, self.rank, num_members, num_leavers, tools.transport)
        self.phases.lap("groups")
        plan = self._agree()
        self.phases.lap("plan")
        self._expect(plan)
        if plan.origin is Origin.PEERS and self.state.units:
            catch_up(self.state, Control.from_dict(plan.control), self.unsettled)
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
        tools.hooks.on_point(HookPoint.ASSEMBLED, number)
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
            transfer = self.groups.transfer
            return Assembly(tools, state, plan, self.rank, transfer, device, state_map, progress=self).assemble()
        self.on_started()
        new = WorkerState(state.num_layers, state.ties)
        made = self.pass_barrier(Alone(tools, new, plan, units_of(plan, self.rank), device, self.failed).make)
        assert made is not None
        return made

    def on_started(self) -> None:
        self.tools.hooks.on_point(HookPoint.MOVING, self.generation.layout_generation)

    def on_moved(self) -> None:
        self.phases.lap("move")

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

    def _agree(self) -> TransferPlan:
        """Tell the leader what this worker brings, and get the plan that the leader makes of everyone's."""
        tools, state, store = self.tools, self.state, self.store
        control = state.control
        inventory = Inventory(
            units=sorted(state.units),
            step=control.step if state.units else -1,
            pending=self.unsettled.pending,
            control=control.to_dict(),
            data=tools.job.data_digest,
            mirrors=tools.mirrors.describe(),
            frozen={index: read.step for index, read in dict(tools.read_ahead.units).items()},
        )
        store.set(f"inventory/{self.rank}", inventory.model_dump_json())
        if self._leads:
            return self.plan_for_all()
        content = store.get(_PLAN).decode()
        if content.startswith(_NO_PLAN):
            raise RegroupError(content.removeprefix(_NO_PLAN))
        if not content:
            self.pass_barrier(None)
            content = store.get(_PLAN_BY_STORAGE).decode()
        return TransferPlan.model_validate_json(content)

    def plan_for_all(self) -> TransferPlan:
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
        sources = _LeadersSources(self)
        plan = make_plan(
            inventories,
            sources,
            num_members=len(generation.members),
            pipelines=generation.pipelines,
            num_units=len(tools.shells),
        )
        plan.kept_step, plan.earlier_generations = sources.kept_step, sources.earlier_generations
        if plan.control and sources.asked_storage:  # an earlier state than the newest, whose best may be gone
            plan.control["kept_step"] = sources.kept_step
        store.set(_PLAN_BY_STORAGE if sources.asked_storage else _PLAN, plan.model_dump_json())
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

    def pass_barrier(self, work: Callable[[], T] | None) -> T | None:
        """Do what takes nobody knows how long, in a thread, while all participants vote on whether anybody is still at
        it."""
        transfer = self.groups.transfer
        assert transfer is not None
        return self.tools.barrier.pass_within(work, transfer, self.deadline)


class _LeadersSources:
    """What the leader looks up while it plans (`PlanSources`).

    Attributes:
        asked_storage: whether a unit was lost, so that the storage was asked.
        kept_step: as the storage says.
        earlier_generations: as storage and record say.
    """

    def __init__(self, attempt: _Attempt) -> None:
        self._attempt = attempt
        self._tools, self._generation = attempt.tools, attempt.generation
        self.asked_storage = False
        self.kept_step = self.earlier_generations = 0

    def cut(self, boundary: int, costs: ModelCosts | None) -> Cut:
        return self._tools.job.cut(boundary, self._generation.stages, self._generation.pipelines, costs)

    def unit_bytes(self, boundary: int) -> Sequence[int]:
        codec, shells = self._tools.codec, self._tools.shells
        return [codec.size(index, shell, boundary) for index, shell in enumerate(shells)]

    def durable(self) -> DurablePoint | None:
        """The others are told to wait first, because storage may be slow."""
        self._attempt.store.set(_PLAN, "")
        self.asked_storage = True
        asked = self._attempt.pass_barrier(self._ask)
        assert asked is not None
        found, self.kept_step, self.earlier_generations = asked
        return found

    def map_of(self, control: Control) -> StateMap | None:
        return self._tools.map_of(control)

    def _ask(self) -> tuple[DurablePoint | None, int, int]:
        checkpoints = self._tools.checkpoints
        found, kept_step, generation = checkpoints.durable(), checkpoints.kept_step(), checkpoints.newest_generation()
        # The record also knows generations that left nothing in the storage; without a checkpoint it is another run's.
        return found, kept_step, max(generation, newest_generation(self._tools.run_dir)) if generation else 0


def catch_up(state: WorkerState, control: Control, unsettled: Unsettled) -> None:
    """Do what others have done and this worker broke before: commit the step, decide what follows it. What it sends is
    then as those expect it who have. A worker that is further behind, or has done the step in another generation, is
    sent all that it needs, and gives nothing.

    Args:
        state: of this worker.
        control: what the plan goes on from.
        unsettled: has the step after this worker's last, if it is pending.
    """
    present = state.control
    if (present.step + 1, unsettled.pending) == control.point:
        unsettled.commit_late(control)
    elif present.point == control.point and present.decided_step != control.decided_step:
        state.go_on_from(control)


def _commit(transfer: dist.ProcessGroup) -> None:
    """Members and leavers say that they have all they need; after this nobody goes back."""
    votes = torch.ones(1, dtype=torch.float32)
    dist.all_reduce(votes, group=transfer)
    if int(votes.item()) != transfer.size():
        raise RegroupError(f"{int(votes.item())} of {transfer.size()} participants are ready")
