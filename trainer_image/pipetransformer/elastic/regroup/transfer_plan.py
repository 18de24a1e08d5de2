"""Plans a regroup: which worker takes which role, and which units move between which workers.

The leader makes the plan from what the participants hold, and all of them follow it. The functions here are pure: they
use no store, no storage and no tensors, except through `PlanSources`.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict
from scipy.optimize import linear_sum_assignment

from pipetransformer.freeze.boundary import first_trainable
from pipetransformer.partition import Cut
from pipetransformer.state.control import Control

from .state_map import StateMap, sources_of


class Origin(StrEnum):
    """Where the state of a new generation comes from."""

    FRESH = "Fresh"  #: from the seed
    PEERS = "Peers"  #: from units that the participants hold in memory
    MIRROR = "Mirror"  #: from the participants' mirrors of an earlier step
    CHECKPOINT = "Checkpoint"  #: from the newest durable checkpoint


class _Message(BaseModel):
    """A message in JSON with control states. They may contain NaN or infinity, for example as a metric of no
    samples."""

    model_config = ConfigDict(ser_json_inf_nan="constants")


class OtherState(_Message):
    """A committed state that a participant has beside its own: a mirror, or the model of a level change in doubt.

    Attributes:
        step: number of committed steps.
        units: indices of the units that the participant has of that state.
        control: the control state, by field name.
    """

    step: int
    units: list[int]
    control: dict[str, Any]


class Inventory(_Message):
    """What one participant holds.

    Attributes:
        units: indices of the units that it holds, without copies.
        copies: indices of its copies of frozen units of other stages.
        step: number of committed steps of this state; -1 if it holds no units.
        pending: lasting number (`Control.lasting_generation`) of the generation whose steps are pending. A step is
            pending if the participant has its complete gradients but has not committed it. None if no step is pending.
        pending_steps: number of pending steps, from `step` on.
        only_in_doubt: those of `units` and `copies` that would lack the pending steps if they were committed.
        control: its control state, by field name.
        data: digest of the data that it sees.
        first_sums: of the model as its program built it (`PipelineModel.first_sums`).
        inputs_change: whether it knows that inputs change between two reads.
        mirrors: the copies of stages that it keeps in host memory.
        in_doubt: the model that it made in a level change whose vote broke. Other workers may have committed it. None
            if there is no such model.
        read_ahead: frozen units that it has read ahead from a checkpoint: by unit index, the checkpoint's
            `Control.fell_step`.
    """

    units: list[int]
    copies: list[int] = []
    step: int
    pending: int | None = None
    pending_steps: int = 1
    only_in_doubt: list[int] = []
    control: dict[str, Any] = {}
    data: str = ""
    first_sums: list[float] = []
    inputs_change: bool = False
    mirrors: list[OtherState] = []
    in_doubt: OtherState | None = None
    read_ahead: dict[int, int] = {}


class Move(BaseModel):
    """A unit moves from participant `source` to participant `target`. Both are ranks."""

    unit: int
    source: int
    target: int


class TransferPlan(_Message):
    """The leader's decision for one generation.

    Attributes:
        origin: where the state comes from.
        step: number of committed steps of that state.
        visit: visit of the job's levels that the state belongs to, before any map.
        control: the control state to resume from, before any map, by field name; empty for `Fresh` and `Checkpoint`.
        roles: (pipeline, stage) of each member, by rank.
        cut: the spans of the model, which stages own them, and how they run.
        moves: the units that move.
        checkpoint: name of the checkpoint to load for `Checkpoint`. All participants load the same one, even if a newer
            one becomes durable meanwhile.
        kept_step: committed steps of the best model that the storage keeps now; 0 without one. Set only if the
            storage was read. Otherwise `control` has it.
        earlier_generations: the highest layout generation of earlier jobs. Set only if the storage was read.
        cached_layers: `Control.cached_layers` of the state, which no checkpoint contains.
        inputs_change: whether any participant knows that inputs change between two reads. Then no worker caches.
        costs: `Control.costs` for `Fresh` and `Checkpoint`, because no checkpoint contains them.
        round_ended_at: `Control.round_ended_at` for `Fresh` and `Checkpoint`. A checkpoint has an older one, because
            the workers have trained since.
    """

    origin: Origin
    step: int
    visit: int = 0
    control: dict[str, Any]
    roles: list[tuple[int, int]]
    cut: Cut
    moves: list[Move]
    checkpoint: str = ""
    kept_step: int = 0
    earlier_generations: int = 0
    cached_layers: int = 0
    inputs_change: bool = False
    costs: dict[str, Any] | None = None
    round_ended_at: float = 0.0


@dataclass(frozen=True, slots=True)
class DurablePoint:
    """The newest durable checkpoint: its committed steps, frozen layers, name in the storage and visit of a level."""

    step: int
    boundary: int
    name: str = ""
    visit: int = 0


class PlanSources(Protocol):
    """What the leader looks up while it plans."""

    def cut(self, control: Control) -> Cut:
        """Cut the units into stages, for the boundary and visit of `control`, and by its measured costs if it has
        any."""
        ...

    def unit_bytes(self, control: Control) -> Sequence[int]:
        """Return how many bytes are sent for each unit, at the boundary and visit of `control`. Frozen units have no
        moments to send."""
        ...

    def durable(self) -> DurablePoint | None:
        """Return the newest checkpoint in the storage; None without one. Called only if the participants together
        do not hold all units of the newest state, because it may be slow."""
        ...

    def map_of(self, control: Control) -> StateMap | None:
        """Return the map to the units of another model, which `cut` then cuts; None if units stay the same."""
        ...


def assign_roles(
    held: Sequence[set[int]], needed: Sequence[Collection[int]], pipelines: int, unit_bytes: Sequence[int]
) -> list[tuple[int, int]]:
    """Give each member a role so that the fewest bytes move. This is an assignment problem, which scipy solves.

    Args:
        held: units that each member holds, by rank.
        needed: units that each stage needs.
        pipelines: number of pipelines.
        unit_bytes: bytes that are sent for each unit.

    Returns:
        (pipeline, stage) of each member, by rank.
    """
    roles = [(pipeline, stage) for pipeline in range(pipelines) for stage in range(len(needed))]
    missing = [[sum(unit_bytes[unit] for unit in stage if unit not in units) for stage in needed] for units in held]
    # Among assignments that move the same bytes, prefer roles in the order of ranks, as at a fresh start.
    cost = np.tile(np.array(missing, dtype=float), pipelines)
    order = np.abs(np.subtract.outer(np.arange(len(held)), np.arange(len(roles))))
    ranks, columns = linear_sum_assignment(cost * len(held) ** 2 + order)
    chosen = dict(zip(ranks.tolist(), columns.tolist(), strict=True))
    return [roles[chosen[rank]] for rank in range(len(held))]


def plan_moves(held: Sequence[set[int]], wanted: Sequence[set[int]], unit_bytes: Sequence[int]) -> list[Move]:
    """Plan a move for each unit that a member wants and does not hold. The sending is spread over the ranks that hold
    it.

    Args:
        held: units that each participant holds, by rank.
        wanted: units that each member wants, by rank.
        unit_bytes: bytes that are sent for each unit.

    Raises:
        LookupError: no rank holds a wanted unit.
    """
    sent = [0] * len(held)  # bytes that each rank will send by the moves planned so far
    moves = []
    for unit in range(len(unit_bytes)):
        holders = [rank for rank, units in enumerate(held) if unit in units]
        for rank, units in enumerate(wanted):
            if unit not in units or unit in held[rank]:
                continue
            if not holders:
                raise LookupError(f"no worker holds unit {unit}")
            source = min(holders, key=lambda rank: (sent[rank], rank))
            sent[source] += unit_bytes[unit]
            moves.append(Move(unit=unit, source=source, target=rank))
    return moves


def differing_members(inventories: Sequence[Inventory], num_members: int) -> list[int]:
    """Return the ranks of members whose data differ from the data of the workers that hold state.

    If no worker holds state, compare with the first one. If workers that hold state differ, return all members. Leavers
    are never returned.

    Args:
        inventories: what the members, then the leavers, hold.
        num_members: number of members among them.
    """
    held = {inventory.data for inventory in inventories if inventory.units} or {inventories[0].data}
    return [rank for rank, inventory in enumerate(inventories) if rank < num_members and {inventory.data} != held]


def make_plan(
    inventories: Sequence[Inventory],
    sources: PlanSources,
    *,
    num_members: int,
    pipelines: int,
) -> TransferPlan:
    """Plan a regroup of participants with these inventories.

    If one worker has committed a step, all have voted for it and have its complete gradients. The others then commit it
    late. Only gradients of the generation that committed the step count, because another generation sums them in
    another order. If no worker has committed the step, all redo it. If the workers do not hold all units, they
    return to the newest state that is complete: in memory, in mirrors, in a checkpoint, or at the start.

    Args:
        inventories: what the members, then the leavers, hold, in the order of ranks.
        sources: looks up cuts, sizes and the newest checkpoint.
        num_members: number of members among the participants.
        pipelines: number of pipelines.
    """
    # Take the newest complete state in memory or in mirrors. If no unit is lost, it is the newest state of all. Only
    # then may units be used that were read ahead.
    plan_from = partial(_plan_from_memory, sources=sources, num_members=num_members, pipelines=pipelines)
    found = next((each for each in _in_memory(inventories) if _whole(each, sources)), None)
    held = found if found is not None and found.origin is Origin.PEERS else None
    state_map = None if held is None else sources.map_of(Control.from_dict(held.control))
    if held is not None and held.step == max(inventory.step for inventory in inventories):
        return plan_from(held, [_still_frozen(each, held.control) for each in inventories], state_map=state_map)
    # Otherwise a checkpoint may be newer. Without one, return to the state that was found.
    checkpoint = sources.durable()
    workers = [Control.from_dict(inventory.control) for inventory in inventories]
    if found is not None and (checkpoint is None or checkpoint.step <= found.step):
        control = Control.from_dict(found.control)
        control.return_with(workers)
        found = replace(found, control=control.to_dict())
        return plan_from(found, [set[int]() for _ in inventories], state_map=state_map)
    # Begin from the checkpoint, or from the seed.
    durable = checkpoint or DurablePoint(0, 0)
    start = Control(step=durable.step, boundary=durable.boundary, visit=durable.visit)
    start.return_with(workers)
    cut = sources.cut(start)
    needed = [cut.held_by(stage) for stage in range(cut.stages)]
    return TransferPlan(
        origin=Origin.FRESH if checkpoint is None else Origin.CHECKPOINT,
        step=start.step,
        visit=start.visit,
        control={},
        roles=assign_roles([set()] * num_members, needed, pipelines, sources.unit_bytes(start)),
        cut=cut,
        moves=[],
        checkpoint=durable.name,
        cached_layers=start.cached_layers,
        costs=start.costs,
        round_ended_at=start.round_ended_at,
    )


def _still_frozen(inventory: Inventory, control: dict[str, Any]) -> set[int]:
    """Return the units that a participant has read from a checkpoint, and that have stayed frozen since.

    The checkpoint's step does not tell. A worker that leaves writes a checkpoint before the freeze policy is asked. The
    policy may thaw layers at this very step.
    """
    frozen = range(first_trainable(int(control["boundary"])))
    fell_step = control.get("fell_step", 0)
    return {unit for unit, fell in inventory.read_ahead.items() if unit in frozen and fell == fell_step}


def _whole(found: "_InMemory", sources: PlanSources) -> bool:
    """Whether the participants together hold all units of a state."""
    num_units = len(sources.unit_bytes(Control.from_dict(found.control)))
    return set().union(*found.held) >= set(range(num_units))


@dataclass(frozen=True, slots=True)
class _InMemory:
    """A committed state. The participants have units of it in memory.

    Attributes:
        origin: `PEERS` or `MIRROR`.
        step: number of committed steps.
        control: the control state, by field name.
        held: indices of the units that each participant has, by rank.
    """

    origin: Origin
    step: int
    control: dict[str, Any]
    held: Sequence[set[int]]


def _in_memory(inventories: Sequence[Inventory]) -> Iterator[_InMemory]:
    """Yield the committed states that are in memory, newest first. Of one state, the units of stages come before
    mirrors."""
    # Collect the control states of each committed state.
    committed: dict[_Point, list[dict[str, Any]]] = defaultdict(list)
    mirrored: dict[_Point, dict[str, Any]] = {}
    for inventory in inventories:
        if inventory.step >= 0:
            committed[_point(inventory)].append(inventory.control)
        if inventory.in_doubt is not None:
            committed[_point(inventory.in_doubt)].append(inventory.in_doubt.control)
        mirrored |= {_point(mirror): mirror.control for mirror in inventory.mirrors}
    # Find the units that each participant has of each state.
    for point in sorted({*committed, *mirrored}, reverse=True):
        if controls := committed.get(point):
            # Some participants may have broken before they finished what follows the step. Take the furthest one.
            control = max(controls, key=_how_far)
            held = [_held(inventory, control, point) for inventory in inventories]
            yield _InMemory(Origin.PEERS, point[0], control, held)
        if point in mirrored:
            held = [
                set().union(*(each.units for each in inventory.mirrors if _point(each) == point))
                for inventory in inventories
            ]
            yield _InMemory(Origin.MIRROR, point[0], mirrored[point], held)


def _how_far(control: dict[str, Any]) -> tuple[int, int, bool]:
    """Order control states of one point by how much of what follows the step is done."""
    return control.get("decided_step", -1), control.get("evaluated_step", 0), control.get("visit_done", False)


def _held(inventory: Inventory, control: dict[str, Any], point: "_Point") -> set[int]:
    """Return the units of a state that a participant can send. Copies count only if the participant already has the
    boundary of `control`. Otherwise it takes over another boundary before it sends, and may drop copies."""
    if not _can_reach(inventory, point):
        doubted = inventory.in_doubt
        return set(doubted.units) if doubted is not None and _point(doubted) == point else set()
    same = inventory.control.get("boundary") == control.get("boundary")
    units = {*inventory.units, *(inventory.copies if same else ())}
    return units if point == _point(inventory) else units.difference(inventory.only_in_doubt)


#: `Control.point`.
_Point = tuple[int, int, int]


def _point(state: Inventory | OtherState) -> _Point:
    control = state.control
    return state.step, int(control.get("last_generation", 0)), int(control.get("visit", 0))


def _can_reach(inventory: Inventory, point: _Point) -> bool:
    """Whether a participant has committed the state `point`, or can commit it late."""
    step, _, visit = _point(inventory)
    return point in (_point(inventory), (step + inventory.pending_steps, inventory.pending, visit))


def _plan_from_memory(
    found: _InMemory,
    read: Sequence[set[int]],
    *,
    sources: PlanSources,
    num_members: int,
    pipelines: int,
    state_map: StateMap | None,
) -> TransferPlan:
    """Plan a regroup from a state in memory. `read` are the units that each participant has read ahead, by rank."""
    # Cut the model, and find the units that each stage needs of the old model.
    control, held = found.control, found.held
    before = Control.from_dict(control)
    after = before if state_map is None else state_map.control(before)
    cut = sources.cut(after)
    wanted_units = [cut.held_by(stage) for stage in range(cut.stages)]
    needed = [set(units) if state_map is None else sources_of(units, state_map) for units in wanted_units]
    # Give out roles, and move units that members neither hold nor have read ahead.
    there = [units | more for units, more in zip(held, read, strict=True)]
    sizes = sources.unit_bytes(before)
    roles = assign_roles(there[:num_members], needed, pipelines, sizes)
    wanted = [needed[stage] - read[rank] for rank, (_, stage) in enumerate(roles)]
    return TransferPlan(
        origin=found.origin,
        step=found.step,
        visit=before.visit,
        control=control,
        roles=roles,
        cut=cut,
        moves=plan_moves(held, wanted, sizes),
        cached_layers=after.cached_layers,
    )
