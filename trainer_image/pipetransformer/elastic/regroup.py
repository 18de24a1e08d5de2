"""The transaction that takes a worker from one generation to the next.

Rendezvous, groups beside the old ones, inventory, the leader's plan, units into new buffers, and a commit vote of
members and leavers. Until that vote the worker's state and its old groups are as they were, so any failure before it
costs time only. The first generation of a job is the same path with nothing in the inventory.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from pipetransformer_contract.messages import Generation

from ..layout import StageLayout
from ..state import Control, UnitCodec, WorkerState
from .groups import GenerationGroups, Store, Transport
from .plan import DurablePoint, Inventory, Origin, RegroupPlan, make_plan
from .rendezvous import GenerationRendezvousHandler, LeaverError
from .transfer import move_units, moved_bytes


class RegroupError(RuntimeError):
    """The generation was not committed; the worker's state is what it was."""


@dataclass(frozen=True, slots=True)
class RegroupTools:
    """What a regroup needs besides the worker's state.

    Attributes:
        build_unit: a fresh unit by index, on the CPU.
        load_unit: fills a unit of the state from the checkpoint that `durable` described.
        load_control: the control state of that checkpoint.
        durable: the newest durable checkpoint; only the leader asks.
        spans_at: the units of each stage for (boundary, stages).
        commit_late: commits the pending step with the sums of the vote that others committed it with.
        shells: every unit, for shapes only.
    """

    handler: GenerationRendezvousHandler
    transport: Transport
    codec: UnitCodec
    shells: Sequence[nn.Module]
    build_unit: Callable[[int], nn.Module]
    load_unit: Callable[[WorkerState, int], None]
    load_control: Callable[[], Control]
    durable: Callable[[], DurablePoint | None]
    spans_at: Callable[[int, int], list[range]]
    commit_late: Callable[[list[float]], None]


@dataclass(frozen=True, slots=True)
class Regrouped:
    """A committed generation. `layout` is None for a leaver, which is now free to go."""

    generation: Generation
    layout: StageLayout | None
    state: WorkerState
    groups: GenerationGroups
    store: Store
    bytes_moved: int
    seconds: float


def regroup(tools: RegroupTools, state: WorkerState, *, pending: bool) -> Regrouped:
    """Meet the next generation, receive what this worker's new role needs, and commit.

    Args:
        tools: see there.
        state: what this worker holds; changed only by a late commit of a step that others have committed.
        pending: whether this worker holds complete gradients of a step that it has not committed.

    Raises:
        RegroupError: it was not committed, for the reason in `__cause__`.
        RendezvousClosedError: the job has ended.
    """
    try:
        info = tools.handler.next_rendezvous()
        rank, store = info.rank, info.store
    except LeaverError as leaving:
        rank, store = leaving.rank, leaving.store
    except (RendezvousTimeoutError, RendezvousConnectionError, RendezvousStateError) as error:
        raise RegroupError(f"rendezvous failed: {error}") from error
    generation = tools.handler.generation
    assert generation is not None
    started = time.perf_counter()
    num_members = len(generation.members)
    groups = GenerationGroups(None, None)
    try:
        groups = GenerationGroups.meet(store, rank, num_members, len(generation.leavers), tools.transport)
        plan = _agree(tools, state, store, rank, generation, pending)
        if plan.origin is Origin.PEERS and state.units and state.control.step == plan.step - 1:
            tools.commit_late(plan.control["last_vote"])
        if rank < num_members:
            spans = [range(start, stop) for start, stop in plan.spans]
            groups.assign(store, plan.roles, rank, tools.transport, [tie.stages(spans) for tie in state.ties.all])
        new_state = _assemble(tools, state, plan, rank if rank < num_members else None, groups, rank)
        assert groups.transfer is not None
        _commit(groups.transfer)
    except (RuntimeError, OSError, LookupError, ValueError) as error:
        groups.drop()
        raise RegroupError(f"generation {generation.layout_generation} was not committed: {error}") from error
    groups.drop_transfer()
    layout = None
    if rank < num_members:
        spans = [range(start, stop) for start, stop in plan.spans]
        layout = StageLayout(generation, rank, [(p, s) for p, s in plan.roles], spans)
    boundary = new_state.control.boundary
    return Regrouped(
        generation,
        layout,
        new_state,
        groups,
        store,
        moved_bytes(plan.moves, tools.codec, tools.shells, boundary),
        time.perf_counter() - started,
    )


def _agree(
    tools: RegroupTools, state: WorkerState, store: Store, rank: int, generation: Generation, pending: bool
) -> RegroupPlan:
    """Tell the leader what this worker brings, and get the plan that the leader makes of everyone's."""
    control = state.control
    inventory = Inventory(
        units=sorted(state.units),
        step=control.step if state.units else -1,
        pending=pending,
        control=control.to_dict(),
    )
    store.set(f"inventory/{rank}", inventory.model_dump_json())
    if rank == [member.name for member in generation.members].index(generation.leader):
        total = len(generation.members) + len(generation.leavers)
        inventories = [
            Inventory.model_validate_json(content)
            for content in store.multi_get([f"inventory/{other}" for other in range(total)])
        ]
        plan = make_plan(
            inventories,
            len(generation.members),
            lambda boundary: tools.spans_at(boundary, generation.stages),
            generation.pipelines,
            [tools.codec.size(index, shell, 0) for index, shell in enumerate(tools.shells)],
            durable=tools.durable(),
        )
        store.set("plan", plan.model_dump_json())
        return plan
    return RegroupPlan.model_validate_json(store.get("plan"))


def _assemble(
    tools: RegroupTools,
    state: WorkerState,
    plan: RegroupPlan,
    member_rank: int | None,
    groups: GenerationGroups,
    transfer_rank: int,
) -> WorkerState:
    """The state of the new role, in new objects except for units that stay; a leaver only gives."""
    device = tools.transport.device
    wanted: set[int] = set()
    if member_rank is not None:
        start, stop = plan.spans[plan.roles[member_rank][1]]
        wanted = set(range(start, stop))
    new = WorkerState(state.num_layers, state.ties)
    match plan.origin:
        case Origin.FRESH:
            new.units = {index: tools.build_unit(index).to(device) for index in sorted(wanted)}
        case Origin.CHECKPOINT:
            new.control = tools.load_control()
            for index in sorted(wanted):
                new.units[index] = tools.build_unit(index).to(device)
                tools.load_unit(new, index)
        case Origin.PEERS:
            assert groups.transfer is not None
            new.control = Control.from_dict(plan.control)
            boundary = new.control.boundary
            received = move_units(
                plan.moves, transfer_rank, groups.transfer, state, tools.codec, tools.shells, boundary, device
            )
            for index in sorted(wanted):
                if index in received:
                    unit = tools.build_unit(index).to(device)
                    new.put_unit(index, unit, tools.codec.unpack(received[index], index, unit, boundary))
                else:
                    new.units[index] = state.units[index]
                    for name, _ in new.named_parameters(index):
                        new.moments[name] = state.moments.get(name, {})
    new.apply_boundary()
    return new


def _commit(transfer: dist.ProcessGroup) -> None:
    """Members and leavers say that they have all they need; after this nobody goes back."""
    votes = torch.ones(1)
    dist.all_reduce(votes, group=transfer)
    if int(votes.item()) != transfer.size():
        raise RegroupError(f"{int(votes.item())} of {transfer.size()} participants are ready")
